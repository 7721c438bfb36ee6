# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The metadata of a step for layers with turbo pages, and the builder that plans it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.layer.base import num_draft_slots
from vllm.v1.attention.ops.turbo.layer.prefill_planner import prefill_planner
from vllm.v1.attention.ops.turbo.planning.decode import find_extends
from vllm.v1.attention.ops.turbo.planning.prefill import PrefillPlanner
from vllm.v1.attention.ops.turbo.planning.prefill_plan import PrefillPlan, Span
from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan
from vllm.v1.attention.ops.turbo.planning.spans import find_spans
from vllm.v1.attention.ops.turbo.planning.step import StepPlan
from vllm.v1.attention.ops.turbo.serving.startup import log_turbo_cache, share_caches
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec


@dataclass
class TurboMetadata(StepPlan, AttentionMetadata):
    """The metadata of a step: its plan, without scratch memory."""


class TurboMetadataBuilder(AttentionMetadataBuilder[TurboMetadata]):
    """Builds ``TurboMetadata``.

    Lengths on the host are not exact for requests whose drafts are verified. Only the
    device knows how many drafts of the last step were rejected. With adaptive
    verification, only it knows how many are verified in this step. So all requests that
    may have drafts are decodes, and decodes take all lengths from the device.

    Arguments of ``build`` count the layers' tokens, which may be several for each
    token of a request. Attributes that model runners read count the requests' tokens.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int = 1
    # Decodes only need views of tensors that the drafter updates between its steps.
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.cache_dtype = kv_cache_spec.kv_quant_mode.name.lower()
        found = refusals.unsupported_spec_features(kv_cache_spec)
        speculative = vllm_config.speculative_config
        self.has_device_query_lens = (
            speculative is not None and speculative.enable_adaptive_verification
        )
        # Adaptive verification hides where prompts' tokens are among those of decodes.
        if self.has_device_query_lens and vllm_config.model_config.is_mm_prefix_lm:
            found.append(reasons.MM_PREFIX_OF_ADAPTIVE_VERIFICATION)
        if found:
            raise ValueError(refusals.refusal(self.cache_dtype, found))
        # Lengths of a shared context do not include query tokens.
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        # Requests that decode in the target model also decode in the drafter.
        layer_type: type = AttentionLayerBase
        layers: list[Any] = list(
            get_layers_from_vllm_config(vllm_config, layer_type, layer_names).values()
        )
        self.is_drafter = all(layer.is_draft_layer for layer in layers)
        if self.is_drafter:
            self.reorder_batch_threshold += num_draft_slots(vllm_config)
        share_caches(vllm_config)
        runners = [layer.impl.runner for layer in layers]
        # One runner of each shape, because layers of a shape have the same kernels.
        self.runners = list({runner.shape: runner for runner in runners}.values())
        self.context_parallel = runners[0].context_parallel
        if self.context_parallel is not None:
            if type(kv_cache_spec) is not FullAttentionSpec:
                found = [reasons.DCP_OF_WINDOWS]
                raise ValueError(refusals.refusal(self.cache_dtype, found))
            # Local lengths are computed from tensors that the drafter updates.
            self.supports_draft_decode_metadata_update = False
            # CUDA graphs read it at this address.
            self.local_seq_lens = torch.zeros(
                vllm_config.scheduler_config.max_num_seqs,
                dtype=torch.int32,
                device=device,
            )
        self.stored = vllm_config.attention_config.turbo_prefill == "stored"
        own = [runner for runner in runners if runner.stored == self.stored]
        self.prefill_planner = prefill_planner(own, self.stored, device)
        # Layers that read another's cache have a separate plan.
        shared = [runner for runner in runners if runner.stored != self.stored]
        self.shared_planner = prefill_planner(shared, True, device)
        # Other layers clamp spans to their sliding window. So does a drafter, whose
        # layers are in a group with the layers whose caches they read.
        unclamped = (
            layer.impl.runner.scoring.sliding_window
            for layer in layers
            if layer.impl.runner.scoring.sliding_window is not None
            and not layer.is_draft_layer
            and not getattr(layer, "mm_prefix_clamp_sliding_window", False)
        )
        self.unclamped_window = min(unclamped, default=None)
        log_turbo_cache(vllm_config)

    @property
    def decode_threshold(self) -> int:
        """The most query tokens of the layers with which a request is a decode."""
        assert self.reorder_batch_threshold is not None
        return self.runners[0].states_per_token * self.reorder_batch_threshold

    @property
    def max_extend_len(self) -> int:
        """The most query tokens of an extend that the kernels of all layers serve."""
        return min((runner.max_extend_len for runner in self.runners), default=0)

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        return max_decode_query_len(vllm_config)

    def update_draft_decode_metadata(self, metadata: TurboMetadata) -> None:
        pass

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TurboMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(
                refusals.refusal(self.cache_dtype, [reasons.NON_CAUSAL])
            )
        # Requests are split by query tokens alone, not by whether they are prefilled.
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.decode_threshold
        )
        query_len, is_uniform = self._decode_query_len(
            common, num_decodes, num_decode_tokens
        )
        spans = self._find_spans(common)
        extends = []
        rows = [(row, row + 1) for row in sorted({span.request for span in spans})]
        # Attention to packed pages serves these only causally: a prefill replaces it.
        rows = [(first, last) for first, last in rows if first < num_decodes]
        num_packed = num_decodes
        if num_prefills > 0:
            # Attention to packed pages is causal, so requests with spans are prefilled.
            with_spans = (x.request for x in spans if x.request >= num_decodes)
            end = next(with_spans, common.num_reqs)
            extends = self._build_extends(common, num_decodes, end)
            num_packed += sum(extend.num_requests for extend in extends)
            if num_packed < common.num_reqs:
                rows.insert(0, (num_packed, common.num_reqs))
        prefills = self._plan_prefills(common, rows, spans, self.prefill_planner)
        prefill = None
        if prefills and num_packed < common.num_reqs:
            _, prefill = prefills.pop(0)
        shared_prefills = None
        if self.shared_planner is not None:
            shared_prefills = self._plan_prefills(
                common, rows, spans, self.shared_planner
            )
        metadata = TurboMetadata(
            num_actual_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            seq_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            block_table=common.block_table_tensor,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            decode_query_len=query_len,
            decode_start_loc=(
                None if is_uniform else common.query_start_loc[: num_decodes + 1]
            ),
            extends=extends,
            prefill=prefill,
            span_prefills=prefills,
            shared_prefills=shared_prefills,
            mm_prefix_range=common.mm_req_doc_ranges if spans else None,
            local_seq_lens=self._local_seq_lens(common),
        )
        planners = (runner.planner for runner in self.runners)
        metadata.plan_decodes(planner for planner in planners if planner is not None)
        return metadata

    def _local_seq_lens(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """``StepPlan.local_seq_lens``, at an address that does not change."""
        if self.context_parallel is None:
            return None
        num_reqs = common.num_reqs
        local = self.local_seq_lens[:num_reqs]
        local.copy_(
            self.context_parallel.local_seq_lens(
                common.seq_lens[:num_reqs], common.query_start_loc[: num_reqs + 1]
            )
        )
        return local

    def _find_spans(self, common: CommonAttentionMetadata) -> list[Span]:
        """The spans of the step's tokens that see later ones.

        A drafter has none, because the model verifies its tokens.

        Raises:
            NotImplementedError: If tokens see earlier ones that their layer's sliding
                window hides. vLLM's runner makes no such spans: see
                ``compute_mm_prefix_ranges``.

        """
        ranges = common.mm_req_doc_ranges
        if self.is_drafter or not ranges or not any(ranges.values()):
            return []
        num_reqs = common.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1]
        spans = find_spans(ranges, starts, self._seq_lens_cpu(common)[:num_reqs])
        if self.unclamped_window is not None:
            lens = (
                last - first + 1
                for span in spans
                for first, last in ranges[span.request]
                if first <= span.position <= last
            )
            longest = max(lens, default=0)
            if longest > self.unclamped_window:
                reason = reasons.MM_PREFIX_BEYOND_WINDOW.of(
                    num_tokens=longest, sliding_window=self.unclamped_window
                )
                raise NotImplementedError(refusals.refusal(self.cache_dtype, [reason]))
        return spans

    def _plan_prefills(
        self,
        common: CommonAttentionMetadata,
        rows: list[tuple[int, int]],
        spans: list[Span],
        planner: PrefillPlanner | None,
    ) -> list[tuple[int, PrefillPlan]]:
        """Plan some requests as prefills.

        Args:
            common: The batch.
            rows: The first and last (exclusive) request of each plan.
            spans: All spans of the batch.
            planner: The planner of the layers; None if there are no such layers.

        Returns:
            The index of each plan's first token, and the plan.

        """
        if planner is None or not rows:
            return []
        seq_lens_cpu = self._seq_lens_cpu(common)
        starts = common.query_start_loc_cpu
        return [
            (
                int(starts[first]),
                planner.plan(
                    starts[first : last + 1],
                    seq_lens_cpu[first:last],
                    common.block_table_tensor[first:last],
                    [
                        span._replace(request=span.request - first)
                        for span in spans
                        if first <= span.request < last
                    ],
                ),
            )
            for first, last in rows
        ]

    def _seq_lens_cpu(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Lengths on the host, (R,) int32, exact for requests that are prefilled.

        Raises:
            ValueError: If the model runner has none.

        """
        if common.seq_lens_cpu_upper_bound is None:
            raise ValueError(
                f"--kv-cache-dtype {self.cache_dtype} plans prefills by lengths on the "
                "host, and this model runner gives none "
                "(CommonAttentionMetadata.seq_lens_cpu_upper_bound)"
            )
        return common.seq_lens_cpu_upper_bound

    def _decode_query_len(
        self, common: CommonAttentionMetadata, num_decodes: int, num_decode_tokens: int
    ) -> tuple[int, bool]:
        """The most query tokens of a decode, and whether each decode has as many."""
        if self.decode_threshold == 1 or num_decodes == 0:
            return 1, True
        query_lens = common.query_start_loc_cpu[: num_decodes + 1].diff()
        query_len = max(int(query_lens.max()), 1)
        if self.has_device_query_lens and max(query_len, common.max_query_len) > 1:
            # The host's lengths are an even share of the drafts that are verified.
            return self.decode_threshold, False
        # A padded batch ends in requests without tokens, but counts their tokens.
        return query_len, num_decodes * query_len == num_decode_tokens

    def _build_extends(
        self, common: CommonAttentionMetadata, num_decodes: int, end: int
    ) -> list[RequestSpan]:
        """The extends among requests ``num_decodes`` to ``end`` (exclusive)."""
        starts = common.query_start_loc_cpu[num_decodes : end + 1]
        query_lens = starts.diff()
        seq_lens = self._seq_lens_cpu(common)[num_decodes:end]
        calls = find_extends(
            query_lens.tolist(),
            (seq_lens - query_lens).tolist(),
            self.max_extend_len,
            self.runners[0].max_extend_tokens,
            min(runner.max_call_tokens for runner in self.runners),
        )
        places = starts.tolist()
        return RequestSpan.of_extends(
            [(num_decodes + first, places[first : last + 1]) for first, last in calls],
            self.device,
        )
