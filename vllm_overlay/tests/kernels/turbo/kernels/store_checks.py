# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The store kernels under test, and the check that their bytes are the reference's."""

from functools import partial

import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.triton import store as triton_store
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..utils import (
    ON_GPU,
    KernelUnderTest,
    cuda_module,
    layer_caches,
    requires_cuda,
    requires_triton,
)


def store_by_cuda(call: StoreCall, *tuning: int) -> None:
    """Launch CUDA's store, with the fields of a ``StoreTuning`` if any are given."""
    cuda = cuda_module("store")
    cuda.store(call, tuning=cuda.StoreTuning(*tuning) if tuning else None)


TRITON = KernelUnderTest(
    "triton", triton_store.store, (requires_triton,), 200 if ON_GPU else 24
)
CUDA = KernelUnderTest("cuda", store_by_cuda, (requires_cuda,), 600)


def tuned(num_threads: int) -> list[KernelUnderTest]:
    """CUDA's store with each number of lanes for a scale group."""

    def launch(call: StoreCall, parts: int) -> None:
        store_by_cuda(call, parts, num_threads)

    return [
        CUDA._replace(name=f"cuda-{parts}", launch=partial(launch, parts=parts))
        for parts in (1, 2, 4)
    ]


def check_bytes(
    kernel: KernelUnderTest,
    layout: TurboFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    num_blocks: int | None = None,
    block_size: int = 16,
    cache_layout: KVCacheLayout = KVCacheLayout.LBHNC,
) -> None:
    """Store into caches of 0xFF with kernel and reference, and compare all bytes.

    Three layers share a buffer, with interleaved pages. Only one layer's bytes may
    change.
    """
    if num_blocks is None:
        num_blocks = slots.shape[0] // 8 + 3
    shape = (layout, num_blocks, key.shape[1], block_size, cache_layout)
    expected_buffer, expected = layer_caches(*shape)
    buffer, caches = layer_caches(*shape)
    reference.store(StoreCall(expected[1], slots, key, value, layout))
    kernel.launch(StoreCall(caches[1], slots, key, value, layout))
    assert torch.equal(buffer, expected_buffer)
    num_stored = int((slots >= 0).sum())
    num_written = int((buffer != 0xFF).sum())
    assert num_written <= num_stored * key.shape[1] * layout.slot_size
    assert (num_written > 0) == (num_stored > 0)
    assert (caches[0] == 0xFF).all() and (caches[2] == 0xFF).all()
