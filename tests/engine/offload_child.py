# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs `turbo_offload.py` on a CPU, where pages are in the host's memory.

Usage: python offload_child.py SCRIPT [ARG]...
"""

import runpy
import sys
from pathlib import Path

from vllm_turbo_cpu_standins.offloading import emulate_offloading

emulate_offloading()
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
