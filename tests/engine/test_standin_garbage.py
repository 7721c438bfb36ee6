# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Python looks for garbage less often where the stand-ins are installed."""

from harness import run_python
from vllm_turbo_cpu_standins import THRESHOLD


def test_pytorchs_import_sets_the_threshold():
    done = run_python("-c", "import gc, torch; print(gc.get_threshold())")
    assert done.stdout == f"{THRESHOLD}\n", done.stderr
