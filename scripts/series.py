#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Apply, check and maintain the patch series; `series.py --help` lists the commands."""

import sys
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit("error: the series needs Python 3.11 or later")
sys.dont_write_bytecode = True

from turbo_series.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
