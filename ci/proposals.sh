#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# The tests of all proposals, without and with each change, on a CPU: ten minutes.
set -eu
cd "$(dirname -- "$0")/.."
python=$(scripts/find_python.sh)
VENV=${VENV:-$PWD/.venv}
"$python" scripts/env.py --venv "$VENV" --tools test lint upstream
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" scripts/series.py sdist --git "$scratch/vllm"
for folder in proposals/*/; do
  PYTHON=$VENV/bin/python "$python" scripts/series.py pr --check \
    "$(basename "$folder")" "$scratch/vllm"
done
