# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The whole plan of a step, which all layers of a KV cache group share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail, TailUpdate
from vllm.v1.attention.ops.turbo.interface import KeyOffset, QueryDirection
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
        num_decodes: Decode requests, padded with CUDA graphs.
        num_decode_tokens: Query tokens of these, padded likewise.
        decode_query_len: The most query tokens of a decode request.
        decode_start_loc: (num_decodes + 1,) int32 on the device, where their tokens
            begin; None if each has ``decode_query_len``.
        extends: Requests with few query tokens, if there are kernels for them.
        prefill: The plan of the other requests; None if there are none.
        span_prefills: For decode requests whose tokens see later ones, as an image's
            do, the index of the first token, and the plan of a prefill that replaces
            the result.
        shared_prefills: For layers that read another's cache, the same pairs for all
            prefills. None if other layers also read all tokens from the cache.
        mm_prefix_range: The first and last positions of tokens that see each other, by
            a request's index. None if none do. Models such as Gemma 4 set it to None,
            by this name, for layers without a sliding window.
        decode_plans: The calls of decodes and extends, by the layers' shapes. Empty
            where no kernels serve.
        decode_scratch: The scratch tensors of ``decode_plans``, by the layers' shapes,
            as the first layer of a shape allocated them.
        local_seq_lens: (R,) int32 on the device, this rank's share of the context and
            all query tokens, if ranks share the context; else None.

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
        """Query tokens of decodes and extends, which come before the prefills'."""
        return self.num_decode_tokens + sum(span.num_tokens for span in self.extends)

    def prefills(self, shares_cache: bool) -> list[tuple[int, PrefillPlan]]:
        """The index of each prefill's first token, and its plan.

        Args:
            shares_cache: Whether the layer reads another's cache.

        """
        if shares_cache and self.shared_prefills is not None:
            return self.shared_prefills
        if self.prefill is None:
            return self.span_prefills
        return [(self.num_packed_tokens, self.prefill), *self.span_prefills]

    def sees_spans(self, sliding_window: int | None) -> bool:
        """Whether tokens of a layer see later tokens of their span."""
        return sliding_window is not None or self.mm_prefix_range is not None

    @property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths of the step's sequences, and where their tokens begin."""
        num_requests = self.query_start_loc.shape[0] - 1
        return self.seq_lens[:num_requests], self.query_start_loc

    def key_offset(self, table: torch.Tensor | None) -> KeyOffset | None:
        """The offset of the step's keys, from a layer's table; None for none."""
        return None if table is None else KeyOffset(table, *self._places)

    def query_direction(self, table: torch.Tensor | None) -> QueryDirection | None:
        """The direction for the step's keys, from a layer's table; None for none."""
        return None if table is None else QueryDirection(table, *self._places)

    def tail_update(self, tail: Tail) -> TailUpdate:
        """The store's work for the tails of the step's requests."""
        return TailUpdate(tail, self.block_table, *self._places)

    def plan_decodes(self, planners: Iterable[DecodePlanner]) -> None:
        """Fill in ``decode_plans``."""
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
