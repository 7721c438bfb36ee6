#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# Apply the series to TARGET, or to the installed vLLM; `--help` lists the options.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=$("$here/find_python.sh")
exec "$python" "$here/series.py" apply "$@"
