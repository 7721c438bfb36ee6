# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Triton kernels as a ``KernelSet``."""

from typing import Any, NamedTuple, NoReturn

import torch

from vllm.v1.attention.ops.turbo.format import TILE_TOKENS
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    TRITON,
    AttentionFn,
    MergeFn,
    OutputLensFn,
    OutputScratchFn,
    OutputsFn,
    SplitsFn,
    StoreFn,
    StoreSizesFn,
)
from vllm.v1.attention.ops.turbo.triton import decode, merge
from vllm.v1.attention.ops.turbo.triton import store as triton_store


def _no_outputs(*args: Any) -> NoReturn:
    raise NotImplementedError("Triton has no extend_outputs")


class TritonKernels(NamedTuple):
    """The ``KernelSet`` for any GPU. It has no extends: a prefill serves these."""

    reason: str = ""
    name: str = TRITON
    store: StoreFn = triton_store.store
    decode_attention: AttentionFn = decode.decode_attention
    num_decode_splits: SplitsFn = decode.num_kv_splits
    extend_attention: AttentionFn | None = None
    max_merged_tokens: int | None = None
    extend_outputs: OutputsFn | None = None
    merge_splits: MergeFn = merge.merge_splits
    num_extend_splits: SplitsFn = decode.num_kv_splits
    store_sizes: StoreSizesFn = triton_store.store_sizes
    output_lens: OutputLensFn = _no_outputs
    output_scratch: OutputScratchFn = _no_outputs

    def block_sizes(self, block_size: int, head_size: int) -> list[int]:
        block_n = decode.default_tuning(head_size).block_n
        has_whole_steps = block_size % block_n == 0
        return [block_size, TILE_TOKENS] if has_whole_steps else [block_size]

    def make_matrices(self, size: int, device: torch.device) -> None:
        for inverse in (False, True):
            rotation_matrix(size, device, inverse=inverse)
