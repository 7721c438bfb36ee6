#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# Print a Python that is new enough to make environments with.
for python in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    command -v "$python"
    exit
  fi
done
echo "Python 3.11 or later is needed; PYTHON names one" >&2
exit 1
