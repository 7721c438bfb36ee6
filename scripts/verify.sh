#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# Compare TARGET with what apply.sh wrote; `--help` lists the options.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=$("$here/find_python.sh")
exec "$python" "$here/series.py" verify "$@"
