# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which kernels store and decode: CUDA's or Triton's. Both read the same bytes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import torch

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.rotation import rotation_matrix

logger = init_logger(__name__)

# Query tokens of a request up to which its cached context is read as it is packed, and
# queries of a KV head: of more, so many passes would decode it that dequantising it
# once is faster. Measured on an H200, with four query heads a KV head
# (benchmark_turbo_extend.py).
MAX_EXTEND_LEN = 48
_MAX_EXTEND_ROWS = 192


def max_extend_len(group: int) -> int:
    """Query tokens that ``extend_attention`` serves, with so many heads a KV head."""
    return min(MAX_EXTEND_LEN, max(1, _MAX_EXTEND_ROWS // group))


class TurboKernels(NamedTuple):
    """The entry points of one set of kernels, with the same parameters in each.

    Attributes:
        store: Quantises K and V into their slots, and rotates q.
        decode_attention: Attends from as many query tokens of each sequence.
        num_kv_splits: Partial results a query that ``decode_attention`` is to have
            room for, by sequences, KV heads, multiprocessors and query tokens.
        make_matrices: Makes, by head size and device, what the kernels keep.
        name: Theirs, for users.
        reason: Why they were chosen.
        extend_attention: As ``decode_attention``, of up to ``max_extend_len`` query
            tokens a sequence; None if prefill has to serve those.
        num_extend_splits: As ``num_kv_splits``, of ``extend_attention``.

    """

    store: Callable[..., None]
    decode_attention: Callable[..., None]
    num_kv_splits: Callable[[int, int, int, int], int]
    make_matrices: Callable[[int, torch.device], object]
    name: str
    reason: str
    extend_attention: Callable[..., None] | None = None
    num_extend_splits: Callable[[int, int, int, int], int] | None = None


def _triton_matrices(head_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(
        rotation_matrix(head_size, device, inverse=inverse) for inverse in (False, True)
    )


def triton_kernels(reason: str = "") -> TurboKernels:
    """Triton's, for any GPU."""
    from vllm.v1.attention.ops.turbo import triton_decode, triton_store

    return TurboKernels(
        triton_store.store,
        triton_decode.decode_attention,
        triton_decode.num_kv_splits,
        _triton_matrices,
        "Triton",
        reason,
    )


def cuda_kernels(reason: str = "") -> TurboKernels:
    """CUDA's, for layouts without a ``cuda_error``."""
    from vllm.v1.attention.ops.turbo import cuda_decode, cuda_extend, cuda_store

    def make_matrices(head_size: int, device: torch.device) -> None:
        cuda_store.make_matrices(head_size, device)
        _triton_matrices(head_size, device)  # of prefill

    return TurboKernels(
        cuda_store.store,
        cuda_decode.decode_attention,
        cuda_decode.num_kv_splits,
        make_matrices,
        "CUDA",
        reason,
        cuda_extend.extend_attention,
        cuda_extend.num_kv_splits,
    )


def cuda_unsupported_reason(layout: TurboFormat) -> str | None:
    """Why there are no CUDA kernels for this device and layout, if so."""
    if not (current_platform.is_cuda() and current_platform.has_device_capability(80)):
        return "the CUDA kernels need an NVIDIA GPU of compute capability 8.0 or later"
    from vllm.v1.attention.ops.turbo import cuda_decode

    return cuda_decode.unsupported_reason(layout)


@cache
def cuda_build_error(layout: TurboFormat, group: int, query_len: int = 1) -> str | None:
    """Build and load the CUDA kernels, side by side; why that failed, if it did.

    Cached, so that a build that fails does so once for all layers.

    Args:
        layout: The cache's format.
        group: Query heads a KV head.
        query_len: Query tokens a sequence at most.

    """
    from vllm.v1.attention.ops.turbo import (
        cuda_decode,
        cuda_extend,
        cuda_merge,
        cuda_store,
    )

    device = torch.device("cuda", torch.accelerator.current_device_index())
    loads: list[Callable[[], object]] = [partial(cuda_store.load_library, layout)]
    loads += [
        partial(cuda_decode.load, layout, num_queries, device)
        for num_queries in sorted({group, group * query_len})
    ]
    num_queries = group * max_extend_len(group)
    loads.append(partial(cuda_extend.load, layout, num_queries, device))
    loads.append(partial(cuda_merge.load, layout.head_size))
    # The compiler takes a core for each.
    with ThreadPoolExecutor(len(loads)) as pool:
        results = [pool.submit(load) for load in loads]
    try:
        for result in results:
            result.result()
    except RuntimeError as error:
        return str(error)
    return None


def cuda_refusal(reason: str) -> str:
    """The message for CUDA kernels that were asked for and cannot be had."""
    return (
        f"attention_config.turbo_kernel=cuda cannot be used, because {reason}. "
        "Use auto or triton instead."
    )


def choose_kernels(
    choice: str, layout: TurboFormat, group: int, query_len: int = 1
) -> TurboKernels:
    """The kernels of a layer, built: to be called before the first request.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        layout: The cache's format.
        group: Query heads a KV head.
        query_len: Query tokens a sequence at most.

    Raises:
        ValueError: If CUDA's are asked for and cannot be had.

    """
    asked_for = f"turbo_kernel is {choice}"
    if choice == "triton":
        return triton_kernels(asked_for)
    unsupported = cuda_unsupported_reason(layout)
    error = None if unsupported else cuda_build_error(layout, group, query_len)
    reason = unsupported or error
    if reason is None:
        return cuda_kernels("they could be built" if choice == "auto" else asked_for)
    if choice == "cuda":
        raise ValueError(cuda_refusal(reason))
    if unsupported:
        return triton_kernels(unsupported)
    # The CUDA kernels are faster, and here the user can have them.
    logger.warning_once("Turbo KV cache: Triton kernels, because %s.", error)
    return triton_kernels("the CUDA kernels could not be built")
