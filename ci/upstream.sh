#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# vLLM's own tests of connectors and offloading under turbo4, on a CPU: ten minutes.
set -eu
cd "$(dirname -- "$0")/.."
python=$(scripts/find_python.sh)
VENV=${VENV:-$PWD/.venv}
"$python" scripts/env.py --venv "$VENV" --tools test upstream
PYTHON="$VENV/bin/python" scripts/apply.sh
exec "$VENV/bin/python" ci/upstream_tests.py "$@"
