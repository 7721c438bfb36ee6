# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures that several modules share, and those that hold for all tests: the
interpreter rounds to bf16 as GPUs do, and warms up with fewer tokens.

Functions import vLLM, so that the process that distributes tests to workers does not
import it: the workers start after that process.
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TURBO_MODULES = (
    "vllm.v1.attention.ops.turbo",
    "vllm.v1.attention.backends.turbo",
    "vllm.v1.attention.backends.cache_dtype",
)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the configurations of the module's models."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def rank_config(folder: Path) -> "Iterator[VllmConfig]":
    """The configuration of an engine with one rank, which can have weights."""
    from .backend_utils import one_rank

    with one_rank(folder) as config:
        yield config


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pieces of 64 tokens, or with a sliding window of 48 tokens more than it."""
    from .backend_utils import set_scratch

    set_scratch(monkeypatch, piece_tokens=64, least_tokens=48)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have segments of the offset of K of ``SEGMENT`` tokens."""
    from vllm.v1.attention.ops.turbo import interface

    from .utils import SEGMENT

    monkeypatch.setattr(interface, "OFFSET_SEGMENT", SEGMENT)


@pytest.fixture
def nothing_chosen(monkeypatch: pytest.MonkeyPatch, workspace: None) -> Iterator[None]:
    """As in a new process whose GPU can run CUDA's kernels: no kernels are chosen, and
    nothing is warm.
    """
    from vllm.v1.attention.ops.turbo import choose
    from vllm.v1.attention.ops.turbo.layer import launching

    monkeypatch.setattr(choose, "_chosen", [])
    monkeypatch.setattr(choose, "_launch_refusal", None)
    monkeypatch.setattr(choose.TurboSource, "unsupported_reason", lambda _: None)
    monkeypatch.setattr(choose, "cuda_build_error", lambda *args: None)
    monkeypatch.setattr(launching, "_warm", set())
    choose.share_kernels.cache_clear()
    yield
    choose.share_kernels.cache_clear()


class LogLine(NamedTuple):
    level: int
    text: str
    options: dict[str, Any]


class Log(list[LogLine]):
    """Lines in order, repeats included."""

    @property
    def warnings(self) -> list[str]:
        return [line.text for line in self if line.level == logging.WARNING]

    @property
    def infos(self) -> list[str]:
        return [line.text for line in self if line.level == logging.INFO]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """The lines that turbo's modules log, of those that are imported before a test."""
    lines = Log()

    def recorder(level: int) -> Any:
        return lambda text, *args, **options: lines.append(
            LogLine(level, text % args if args else text, options)
        )

    for name, module in sys.modules.copy().items():
        if name.startswith(TURBO_MODULES) and hasattr(module, "logger"):
            for method, level in (("info", logging.INFO), ("warning", logging.WARNING)):
                for suffix in ("", "_once"):
                    monkeypatch.setattr(
                        module.logger, method + suffix, recorder(level), raising=False
                    )
    return lines
