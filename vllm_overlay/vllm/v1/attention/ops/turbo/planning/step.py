# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A step's whole plan, which all layers of a KV cache group share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from vllm.v1.attention.ops.turbo.interface import (
    KeyOffset,
    RecentWindow,
    WindowUpdate,
)
from vllm.v1.attention.ops.turbo.planning.decode import (
    DecodePlan,
    DecodePlanner,
)
from vllm.v1.attention.ops.turbo.planning.prefill_plan import PrefillPlan
from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan
from vllm.v1.attention.ops.turbo.planning.scratch import DecodeScratch, LayerShape


@dataclass
class StepPlan:
    """A batch of R requests and T query tokens: decodes, then extends, then prefills.

    Attributes:
        num_actual_tokens: T, without padding.
        slot_mapping: (T,) int64 slots of the query tokens, -1 for none.
        seq_lens: (R,) int32 lengths on the device, query tokens included.
        query_start_loc: (R + 1,) int32 on the device, where requests' tokens begin.
        block_table: (R, max_blocks) int32 on the device.
        num_decodes: Decode requests; with CUDA graphs, padded.
        num_decode_tokens: Query tokens of these, padded likewise.
        decode_query_len: Query tokens of a decode request, at most.
        decode_start_loc: (num_decodes + 1,) int32 on the device, where their tokens
            begin; None if each has ``decode_query_len``.
        extends: Requests with few query tokens, if kernels for them are there.
        prefill: How the other requests are served; None if there are none.
        span_prefills: Decode requests with tokens that see later ones, an image's, are
            prefilled once more: the place of each one's first token, and how.
        shared_prefills: All that is prefilled, likewise, by layers that read another's
            cache. None if others, too, read all tokens from the cache.
        mm_prefix_range: By a request's place, the first and last positions of
            tokens that see each other. None if none do, and for layers without a
            sliding window if the model says so: Gemma 4's does, by this name.
        decode_plans: By the layers' shapes, how decodes and extends are served. None
            where no kernels serve.
        decode_scratch: By the layers' shapes, the addresses that the plan leaves open:
            those that the first layer of a shape was given.
        local_seq_lens: (R,) int32 on the device, where ranks share the context: what
            this one has of it, and all query tokens. None where they do not.

    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    decode_query_len: int
    decode_start_loc: torch.Tensor | None
    extends: list[RequestSpan]
    prefill: PrefillPlan | None
    span_prefills: list[tuple[int, PrefillPlan]] = field(default_factory=list)
    shared_prefills: list[tuple[int, PrefillPlan]] | None = None
    mm_prefix_range: Mapping[int, list[tuple[int, int]]] | None = None
    decode_plans: dict[LayerShape, DecodePlan] = field(default_factory=dict, repr=False)
    decode_scratch: dict[LayerShape, DecodeScratch] = field(
        default_factory=dict, repr=False
    )
    local_seq_lens: torch.Tensor | None = None

    @property
    def num_packed_tokens(self) -> int:
        """Query tokens of decodes and extends: those before the prefills'."""
        return self.num_decode_tokens + sum(span.num_tokens for span in self.extends)

    def prefills(self, shares_cache: bool) -> list[tuple[int, PrefillPlan]]:
        """The prefills: the place of each plan's first token, and the plan.

        Args:
            shares_cache: Whether the layer reads another's cache.

        """
        if shares_cache and self.shared_prefills is not None:
            return self.shared_prefills
        if self.prefill is None:
            return self.span_prefills
        return [(self.num_packed_tokens, self.prefill), *self.span_prefills]

    def sees_spans(self, sliding_window: int | None) -> bool:
        """Whether tokens of a layer see later ones of their span."""
        return sliding_window is not None or self.mm_prefix_range is not None

    def key_offset(self, table: torch.Tensor | None) -> KeyOffset | None:
        """The offset of the step's keys, from a layer's table; None for none."""
        if table is None:
            return None
        num_requests = self.query_start_loc.shape[0] - 1
        return KeyOffset(table, self.seq_lens[:num_requests], self.query_start_loc)

    def window_update(self, window: RecentWindow) -> WindowUpdate:
        """The store's work for the recent windows of the step's requests."""
        num_requests = self.query_start_loc.shape[0] - 1
        seq_lens = self.seq_lens[:num_requests]
        return WindowUpdate(window, self.block_table, seq_lens, self.query_start_loc)

    def plan_decodes(self, planners: Iterable[DecodePlanner]) -> None:
        """Make the ``decode_plans``."""
        decodes = RequestSpan(
            0,
            self.num_decodes,
            0,
            self.num_decode_tokens,
            self.decode_query_len,
            self.decode_start_loc,
        )
        seq_lens = self.seq_lens
        if self.local_seq_lens is not None:
            seq_lens = self.local_seq_lens
        for planner in planners:
            self.decode_plans[planner.shape] = planner.plan(
                decodes, self.extends, self.block_table, seq_lens
            )
