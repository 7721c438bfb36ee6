# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What vLLM learns of a model's class, in this process.

vLLM asks a process of its own, which imports vLLM anew, lest a GPU be initialised here.
Where there is none, the class may as well be imported where it is needed next. It is a
plugin for pytest, too: `-p vllm_turbo_cpu_standins.inspection`.
"""

import sys
from collections.abc import Callable
from typing import Any


def call(function: Callable[[], Any]) -> Any:
    return function()


def inspect_here() -> None:
    """Has this process import and inspect models' classes by itself."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = call


def pytest_collection_finish() -> None:
    # A process that only shares the tests out has not imported vLLM.
    if "vllm.model_executor.models.registry" in sys.modules:
        inspect_here()
