# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures: the interpreter rounds to bf16 as GPUs do, and warms up with fewer tokens.

Functions import vLLM, so that the process that distributes tests to workers does not
import it: the workers start after that process.
"""

import sys
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest tests: Triton compiles a 3-bit store for over a minute."""
    from .utils import ON_GPU

    if ON_GPU:
        longest_first = ("turbo3", "k4v3")
        items.sort(key=lambda item: [name not in item.name for name in longest_first])


@pytest.fixture(autouse=True, scope="session")
def no_amx() -> Iterator[None]:
    """Have vLLM's CPU platform behave as on a CPU without AMX, on any CPU."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def round_to_nearest_bf16() -> Iterator[None]:
    """Have the interpreter round to the nearest bf16 number, as GPUs do.

    Otherwise it truncates: up to twice the error, and always toward zero. Rounding lets
    one tolerance serve GPUs and the interpreter.
    """
    from .utils import CAN_RUN_KERNELS, ON_GPU

    if ON_GPU or not CAN_RUN_KERNELS:
        yield
        return
    import numpy as np
    import torch
    from triton.runtime import interpreter

    from vllm.triton_utils import tl

    convert = interpreter._convert_float

    def convert_float(x, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) != (tl.float32, tl.bfloat16):
            return convert(x, input_dtype, output_dtype, rounding_mode)
        rounded = torch.from_numpy(np.array(x)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_float)
        yield


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The workspace of vLLM, not locked, as in the profile run."""
    import torch

    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    from .utils import DEVICE, ON_GPU

    if not ON_GPU:
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    init_workspace_manager(DEVICE)
    yield
    reset_workspace_manager()


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm up with few tokens: the interpreter takes seconds for the usual number."""
    from .utils import ON_GPU

    # A test that runs the backend has imported it.
    warm_up = sys.modules.get("vllm.v1.attention.ops.turbo.layer.warm_up")
    if warm_up is not None and not ON_GPU:
        monkeypatch.setattr(warm_up, "_PREFILL_CONTEXT", 16)
        monkeypatch.setattr(warm_up, "_PREFILL_LENS", (2, 3))
        monkeypatch.setattr(warm_up, "_FLASH_ATTN_QUERIES", 16)
