#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# Ask the package index for a newer vLLM, and list what a step to it takes.
# Exit status: 0 no newer release, 3 a list was printed, another one if this broke.
set -eu
cd "$(dirname -- "$0")/.."
python=$(scripts/find_python.sh)
newer=$("$python" scripts/series.py newer)
[ -n "$newer" ] || { echo "no newer release" && exit; }
"$python" scripts/series.py step "$newer" --check
exit 3
