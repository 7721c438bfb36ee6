# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Triton kernels as a ``KernelSet``."""

from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    TRITON,
    AttentionFn,
    MergeFn,
    OutputsFn,
    SplitsFn,
    StoreFn,
    TensorSpecs,
)
from vllm.v1.attention.ops.turbo.triton import decode, merge
from vllm.v1.attention.ops.turbo.triton import store as triton_store


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

    def block_sizes(self, block_size: int, head_size: int) -> list[int]:
        block_n = decode.default_tuning(head_size).block_n
        has_whole_steps = block_size % block_n == 0
        return [block_size, TILE_TOKENS] if has_whole_steps else [block_size]

    def store_sizes(self, layout: TurboFormat, num_kv_heads: int) -> list[int]:
        return triton_store.store_sizes(layout, num_kv_heads)

    def output_lens(
        self, layout: TurboFormat, num_queries_per_kv: int, most: int
    ) -> list[int]:
        raise NotImplementedError("Triton has no extend_outputs")

    def output_scratch(
        self,
        layout: TurboFormat,
        num_kv_heads: int,
        num_sms: int,
        num_raw_tiles: int,
    ) -> TensorSpecs:
        raise NotImplementedError("Triton has no extend_outputs")

    def make_matrices(self, size: int, device: torch.device) -> None:
        for inverse in (False, True):
            rotation_matrix(size, device, inverse=inverse)
