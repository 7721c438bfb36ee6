# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA kernels as a ``KernelSet``."""

from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.cuda import decode, extend_mma, extend_wgmma, merge
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    CUDA,
    AttentionFn,
    MergeFn,
    OutputLensFn,
    OutputScratchFn,
    OutputsFn,
    SplitsFn,
    StoreFn,
    StoreSizesFn,
)


class CudaKernels(NamedTuple):
    """The ``KernelSet`` for layouts that ``decode.DECODE`` supports."""

    reason: str = ""
    name: str = CUDA
    store: StoreFn = cuda_store.store
    decode_attention: AttentionFn = decode.decode_attention
    num_decode_splits: SplitsFn = decode.num_kv_splits
    extend_attention: AttentionFn | None = extend_mma.extend_attention
    max_merged_tokens: int | None = merge.MAX_MERGED_TOKENS
    extend_outputs: OutputsFn | None = None
    merge_splits: MergeFn = merge.merge_splits
    num_extend_splits: SplitsFn = extend_mma.num_kv_splits
    store_sizes: StoreSizesFn = cuda_store.store_sizes
    output_lens: OutputLensFn = extend_wgmma.output_lens
    output_scratch: OutputScratchFn = extend_wgmma.output_scratch

    def block_sizes(self, block_size: int, head_size: int) -> list[int]:
        return [block_size]

    def make_matrices(self, size: int, device: torch.device) -> None:
        cuda_store.make_matrices(size, device)
        for inverse in (False, True):
            rotation_matrix(size, device, inverse=inverse)  # for prefills
