# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An MLA layer's kernels at work: which serve, what a step is cut into, and scratch."""

from collections.abc import Sequence
from functools import cached_property

import torch

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.attention.ops.turbo.choose import ChosenKernels
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    Partials,
    TensorSpecs,
)
from vllm.v1.attention.ops.turbo.latent.choose import (
    share_latent_kernels,
    start_latent_builds,
)
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import LatentKernels
from vllm.v1.attention.ops.turbo.layer.runner import num_draft_slots, take_scratch
from vllm.v1.attention.ops.turbo.planning.decode import (
    MAX_CALL_TOKENS,
    DecodePlan,
    DecodePlanner,
)
from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape, num_bytes

# Query tokens up to which a request attends to packed pages, absorbed. Of more, it pays
# to project the whole context up once: that takes 2 * L * (nope + V) flop a token and
# head of context, where absorbed attention takes 4 * L + 2 * R a query token and not
# 2 * (nope + R + V). They are even at 170 query tokens with DeepSeek's sizes, and at
# 400 with GLM's. Up to as many as vLLM's FLASHMLA has it pays at every shape of
# `ci/gpu.py mla` on an H200 in November 2026: 16 requests behind 4096 tokens decide,
# with DeepSeek's 16 heads 1040 us against 1144, with GLM's 20 1549 against 2161.
MAX_ABSORBED_LEN = 128


def decode_query_len(vllm_config: VllmConfig) -> int:
    """Query tokens of a decode request, at most, drafters' too."""
    return max_decode_query_len(vllm_config) + num_draft_slots(vllm_config)


def absorbed_query_len(vllm_config: VllmConfig) -> int:
    """Query tokens of a request that attends to packed pages, at most."""
    return max(MAX_ABSORBED_LEN, decode_query_len(vllm_config))


def find_spans(query_lens: Sequence[int], decode_len: int) -> list[tuple[int, int]]:
    """Cut requests that attend to packed pages into spans of similar lengths.

    A call has scratch for as many query tokens of each request as the longest has, so
    one extend among many decodes would take a lot.

    Args:
        query_lens: Query tokens of each request, zero for padding.
        decode_len: Query tokens of a decode, at most.

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
    """The calls that a step's requests with packed pages are cut into.

    Args:
        query_lens: Query tokens of each request, on the host.
        num_tokens: Tokens of all of them, and of padding.
        query_start_loc: (R + 1,) int32 on the device, where their tokens begin.
        decode_len: Query tokens of a decode, at most.

    """
    spans = []
    begin = 0
    for first, last in find_spans(query_lens, decode_len):
        own = query_lens[first:last]
        query_len, count = max(1, *own), sum(own)
        if last == len(query_lens):
            # A padded batch has requests without tokens at its end, and the tokens
            # that these would have.
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


class LatentRunner:
    """Stores and attends for one MLA layer by the kernels that were chosen for it.

    Attributes:
        shape: Query heads, one KV head, the latent's size and the model's dtype.
        scale: Softmax scale.
        layout: The cache's format.
        stored: Whether prefilled tokens, too, see themselves as they are stored.
        kernel_choice: ``attention_config.turbo_kernel``.
        decode_len: Query tokens of a decode request, at most.
        max_query_len: Query tokens of a request that attends to packed pages, at most.
        max_num_seqs: Requests of a step.
        max_num_tokens: Query tokens of a step.
        cache_config: vLLM's; its block size may be set after the layers are made.
        num_sms: Multiprocessors of the GPU.

    """

    def __init__(
        self,
        shape: LayerShape,
        scale: float,
        layout: LatentFormat,
        vllm_config: VllmConfig,
    ) -> None:
        self.shape = shape
        self.scale = scale
        self.layout = layout
        self.stored = vllm_config.attention_config.turbo_prefill == "stored"
        self.kernel_choice = vllm_config.attention_config.turbo_kernel
        self.decode_len = decode_query_len(vllm_config)
        self.max_query_len = absorbed_query_len(vllm_config)
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.cache_config = vllm_config.cache_config
        self.num_sms = 1
        if not current_platform.is_cpu():
            device = torch.accelerator.current_device_index()
            self.num_sms = num_compute_units(device)

    def start_builds(self) -> None:
        """Begin to build the kernels; ``chosen_kernels`` waits for their end."""
        if not current_platform.is_cpu():
            start_latent_builds(
                self.kernel_choice,
                self.layout,
                self.shape.num_heads,
                self.max_query_len,
            )

    @cached_property
    def chosen_kernels(self) -> ChosenKernels[LatentKernels]:
        """The kernels, shared with layers alike. They may be built here."""
        return share_latent_kernels(
            self.kernel_choice, self.layout, self.shape.num_heads, self.max_query_len
        )

    @property
    def kernels(self) -> LatentKernels:
        """The kernels that store and attend."""
        kernels = self.chosen_kernels.kernels
        assert kernels is not None
        return kernels

    @kernels.setter
    def kernels(self, kernels: LatentKernels) -> None:
        """Have these serve this layer alone."""
        self.chosen_kernels = ChosenKernels(kernels)

    @property
    def kernels_used(self) -> str:
        """The kernels that store and decode, and why these, for users."""
        if current_platform.is_cpu():
            return "PyTorch's operators, because this is a CPU"
        return f"{self.kernels.name} kernels, because {self.kernels.reason}"

    def num_splits(
        self, num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
    ) -> int:
        """A ``SplitsFn``: splits of a sequence that attention wants."""
        heads = self.shape.num_heads
        return self.kernels.num_decode_splits(num_seqs, heads, num_sms, query_len)

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
        query_rope: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: DecodePlan,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attend from all tokens of a plan: see ``LatentAttentionFn``."""
        scratch = take_scratch(self.partials_specs(plan.num_partials), query.device)
        for call in plan.calls:
            own, count = call.tokens, call.num_partials
            self.kernels.decode_attention(
                query[own],
                None if query_rope is None else query_rope[own],
                kv_cache,
                self.layout,
                call.batch,
                Partials(*(tensor[:count] for tensor in scratch)),
                output[own],
                lse[own],
                self.scale,
            )

    def partials_specs(self, num_partials: int) -> TensorSpecs:
        """Shapes and dtypes of the results of splits."""
        heads = self.shape.num_heads
        return [
            ((num_partials, heads, self.layout.rank), torch.float32),
            ((num_partials, heads), torch.float32),
        ]

    def rows_specs(self, num_tokens: int) -> TensorSpecs:
        """Shapes and dtypes of a prefill's own tokens as they are stored."""
        size = self.layout.rank + self.layout.rope
        return [((num_tokens, size), self.shape.dtype)]

    @property
    def max_partials(self) -> int:
        """Partial results of a call, at most: see ``planning.decode.cut_evenly``."""
        num_tokens = self.max_num_seqs * self.decode_len
        num_tokens = max(num_tokens, self.max_query_len, MAX_CALL_TOKENS)
        most = max(self.shape.max_partials, self.max_query_len)
        return min(most, num_tokens * MAX_KV_SPLITS)

    @property
    def max_absorbed_tokens(self) -> int:
        """Query tokens of a step that attend to packed pages, at most."""
        return min(self.max_num_tokens, self.max_num_seqs * self.max_query_len)

    def _largest_scratch(self) -> list[TensorSpecs]:
        """The most that each request to the workspace asks for, in any step."""
        own = self.rows_specs(self.max_num_tokens if self.stored else 0)
        return [self.partials_specs(self.max_partials), own]

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that the profile run reserves."""
        if current_platform.is_cpu():
            return 0
        return max(map(num_bytes, self._largest_scratch()))

    def reserve(self, device: torch.device) -> None:
        """Take all scratch of the largest step, and what the kernels keep for good."""
        for specs in self._largest_scratch():
            take_scratch(specs, device)
        # Not to be made in a CUDA graph's pool.
        self.kernels.make_matrices(self.layout.rank, device)
