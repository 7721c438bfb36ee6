# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An MLA layer at work: its kernels, the calls of a step, and scratch."""

from collections.abc import Sequence

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    DecodeBatch,
    Partials,
    TensorSpecs,
)
from vllm.v1.attention.ops.turbo.latent.choose import LatentSource
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import (
    GatherCall,
    LatentCall,
    LatentStoreCall,
)
from vllm.v1.attention.ops.turbo.latent.kernels import LatentKernels
from vllm.v1.attention.ops.turbo.latent.mean import LatentMean, register_latent_mean
from vllm.v1.attention.ops.turbo.layer.base import Runner, decode_query_len
from vllm.v1.attention.ops.turbo.layer.scratch import take_scratch
from vllm.v1.attention.ops.turbo.planning.decode import (
    MAX_CALL_TOKENS,
    DecodePlan,
    DecodePlanner,
)
from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape

# The most query tokens with which a request attends to packed pages with absorbed
# weights. With more, it is faster to project the whole context up once. This takes
# 2 * L * (nope + V) flop for each token and head of the context. Absorbed attention
# takes 4 * L + 2 * R flop for each of these and each query token, in place of
# 2 * (nope + R + V). Both take the same at 170 query tokens with DeepSeek's sizes, and
# at 400 with GLM's. The limit is that of vLLM's FLASHMLA.
# Tuning: us absorbed / projected up for 128 query tokens, 16 requests behind 4096
# tokens, which decide, an H200, 2026-11, `ci/gpu.py mla`.
# DeepSeek's 16 heads: 1040 / 1144. GLM's 20 heads: 1549 / 2161.
MAX_ABSORBED_LEN = 128


def absorbed_query_len(vllm_config: VllmConfig) -> int:
    """The most query tokens of a request that attends to packed pages."""
    return max(MAX_ABSORBED_LEN, decode_query_len(vllm_config))


def find_spans(query_lens: Sequence[int], decode_len: int) -> list[tuple[int, int]]:
    """Cut requests that attend to packed pages into spans of similar lengths.

    A call has scratch for the longest request's query tokens in each request, so one
    extend among many decodes would take much scratch.

    Args:
        query_lens: Query tokens of each request, zero for padding.
        decode_len: The most query tokens of a decode.

    Returns:
        First and last (exclusive) request of each span.

    """
    spans: list[tuple[int, int]] = []
    longest = 0
    for i, length in enumerate(query_lens):
        if spans:
            first = spans[-1][0]
            fits = max(longest, length) * (i + 1 - first) <= MAX_CALL_TOKENS
            if longest <= decode_len:
                fits = length <= decode_len
            if fits:
                spans[-1] = first, i + 1
                longest = max(longest, length)
                continue
        spans.append((i, i + 1))
        longest = length
    return spans


def plan_spans(
    query_lens: Sequence[int],
    num_tokens: int,
    query_start_loc: torch.Tensor,
    decode_len: int,
) -> list[RequestSpan]:
    """Cut a step's requests that attend to packed pages into spans, a call for each.

    Args:
        query_lens: Query tokens of each request, on the host.
        num_tokens: Query tokens of all requests and of padding.
        query_start_loc: (R + 1,) int32 on the device, where their tokens begin.
        decode_len: The most query tokens of a decode.

    """
    spans = []
    begin = 0
    for first, last in find_spans(query_lens, decode_len):
        own = query_lens[first:last]
        query_len, count = max(1, *own), sum(own)
        if last == len(query_lens):
            # A padded batch ends in requests without tokens, but counts their tokens.
            count = num_tokens - begin
        start_loc = None
        if count != query_len * (last - first):
            start_loc = query_start_loc[first : last + 1]
            if first > 0:
                start_loc = start_loc - start_loc[0]
        spans.append(
            RequestSpan(first, last - first, begin, count, query_len, start_loc)
        )
        begin += count
    return spans


class LatentRunner(Runner[LatentKernels]):
    """One MLA layer, which stores and attends.

    Attributes:
        scale: Softmax scale.
        layout: The cache's format.
        decode_len: The most query tokens of a decode request.
        is_sparse: Whether query tokens attend to lists of tokens.
        max_query_len: The most query tokens of a request that attends to packed pages.
        mean: The mean that latents lose when they are stored; None for none.

    """

    def __init__(
        self,
        shape: LayerShape,
        scale: float,
        layout: LatentFormat,
        vllm_config: VllmConfig,
        is_sparse: bool = False,
    ) -> None:
        super().__init__(shape, vllm_config)
        self.scale = scale
        self.layout = layout
        self.is_sparse = is_sparse
        self.decode_len = decode_query_len(vllm_config)
        self.max_query_len = absorbed_query_len(vllm_config)
        self.mean: LatentMean | None = None

    def set_latent_mean(
        self, layer: nn.Module, mean: torch.Tensor, device: torch.device
    ) -> None:
        """Take a mean off latents before they are stored.

        It is called when weights have been loaded, before the profile run, which
        launches the kernels for layers with a mean. Pages that were stored before do
        not fit. All ranks that share the layer set the same mean, because all store the
        same latents. A later call changes the numbers in place, because CUDA graphs
        read them at this address.

        Args:
            layer: The layer of this runner, which gets a buffer.
            mean: (L,) of any floating dtype, on any device.
            device: The device of the kernels.

        Raises:
            ValueError: If the mean is not finite.

        """
        assert mean.shape == (self.layout.rank,), (mean.shape, self.layout)
        self.mean = register_latent_mean(layer, mean, device)

    @property
    def source(self) -> LatentSource:
        heads = self.shape.num_heads
        return LatentSource(self.layout, heads, self.max_query_len, self.is_sparse)

    @property
    def launch_key(self) -> tuple[object, ...]:
        return (
            self.shape,
            self.layout,
            self.kernel_choice,
            self.decode_len,
            self.max_query_len,
            self.is_sparse,
            self.max_num_tokens,
            self.mean is not None,
        )

    def num_splits(
        self, num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
    ) -> int:
        """A ``SplitsFn``: splits of a sequence that attention asks for."""
        heads = self.shape.num_heads
        return self.entry_points.num_decode_splits(num_seqs, heads, num_sms, query_len)

    def plan(
        self,
        spans: list[RequestSpan],
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> DecodePlan:
        """Cut the requests of a step into calls.

        Args:
            spans: The spans of all requests.
            block_table: (R, max_blocks) int32 on the device.
            seq_lens: (R,) int32 on the device, query tokens included.

        """
        planner = DecodePlanner(
            self.shape, self.num_sms, self.num_splits, self.num_splits
        )
        return planner.plan(spans[0], spans[1:], block_table, seq_lens)

    def decode(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: DecodePlan,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attend from all tokens of a plan: see ``LatentCall``."""
        scratch = take_scratch(self.partials_specs(plan.num_partials), query.device)
        for planned in plan.calls:
            own, count = planned.tokens, planned.num_partials
            call = LatentCall(
                kv_cache,
                self.layout,
                planned.batch,
                self.scale,
                output[own],
                lse[own],
                query[own],
                query_rope[own] if self.layout.rope else None,
                None if self.mean is None else self.mean.rotated,
            )
            partials = Partials(*(tensor[:count] for tensor in scratch))
            self.entry_points.decode_attention(call, partials)

    def attend_to_lists(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attend from each query token to tokens of its own: see ``LatentCall``.

        Args:
            query: (T, Hq, L).
            query_rope: (T, Hq, R).
            kv_cache: (num_blocks, N, C) uint8.
            slots: (T, K) int32, the tokens' slots.
            counts: (T,) int32, how many each query token has.
            output: (T, Hq, L), written.
            lse: (T, Hq) fp32, written.

        """
        num_tokens = query.shape[0]
        once = max(1, min(num_tokens, self.max_partials))
        splits = self.num_splits(once, 1, self.num_sms)
        splits = min(splits, self.max_partials // once)
        scratch = take_scratch(self.partials_specs(once * splits), query.device)
        for begin in range(0, num_tokens, once):
            own = slice(begin, begin + once)
            count = counts[own].shape[0]
            partials = Partials(*(tensor[: count * splits] for tensor in scratch))
            call = LatentCall(
                kv_cache,
                self.layout,
                DecodeBatch(count, slots[own], counts[own]),
                self.scale,
                output[own],
                lse[own],
                query[own],
                query_rope[own] if self.layout.rope else None,
                None if self.mean is None else self.mean.rotated,
                is_sparse=True,
            )
            self.entry_points.decode_attention(call, partials)

    def store(
        self,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
    ) -> None:
        """Store tokens: see ``LatentStoreCall``."""
        rope = k_pe if self.layout.rope else None
        mean = None if self.mean is None else self.mean.latent
        call = LatentStoreCall(kv_cache, slot_mapping, kv_c, rope, self.layout, mean)
        self.entry_points.store(call)

    def gather(self, call: GatherCall) -> None:
        """Dequantise tokens: see ``GatherCall``, whose mean is the layer's."""
        if self.mean is not None:
            call = call._replace(mean=self.mean.latent)
        self.entry_points.gather(call)

    def partials_specs(self, num_partials: int) -> TensorSpecs:
        """Shapes and dtypes of the results of splits."""
        heads = self.shape.num_heads
        return [
            ((num_partials, heads, self.layout.rank), torch.float32),
            ((num_partials, heads), torch.float32),
        ]

    def rows_specs(self, num_tokens: int) -> TensorSpecs:
        """Shapes and dtypes of a prefill's dequantised own tokens."""
        size = self.layout.rank + self.layout.rope
        return [((num_tokens, size), self.shape.dtype)]

    @property
    def max_partials(self) -> int:
        """The most partial results of a call: see ``planning.decode.cut_evenly``."""
        num_tokens = self.max_num_seqs * self.decode_len
        num_tokens = max(num_tokens, self.max_query_len, MAX_CALL_TOKENS)
        most = max(self.shape.max_partials, self.max_query_len)
        return min(most, num_tokens * MAX_KV_SPLITS)

    @property
    def max_absorbed_tokens(self) -> int:
        """The most query tokens of a step that attend to packed pages."""
        if self.is_sparse:
            return self.max_num_tokens
        return min(self.max_num_tokens, self.max_num_seqs * self.max_query_len)

    def largest_scratch(self) -> list[TensorSpecs]:
        own = self.rows_specs(self.max_num_tokens if self.stored else 0)
        return [self.partials_specs(self.max_partials), own]
