# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Lets vLLM inspect a model's class in this process.

vLLM starts a process for it, which imports vLLM again, so that no GPU is initialised
here. Without a GPU, the class can be imported in the process that needs it next. The
module is also a plugin for pytest: `-p vllm_turbo_cpu_standins.inspection`.
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
    # A process that only distributes the tests has not imported vLLM.
    if "vllm.model_executor.models.registry" in sys.modules:
        inspect_here()
