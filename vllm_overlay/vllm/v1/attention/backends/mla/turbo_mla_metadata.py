# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The metadata of a step for MLA's layers with turbo pages, and its builder."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    align_mla_chunked_context_workspace_size,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.latent.runner import (
    LatentRunner,
    absorbed_query_len,
    plan_spans,
)
from vllm.v1.attention.ops.turbo.layer.base import decode_query_len
from vllm.v1.attention.ops.turbo.planning.decode import DecodePlan
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape
from vllm.v1.attention.ops.turbo.serving.startup import log_turbo_cache
from vllm.v1.kv_cache_interface import AttentionSpec

# Rows of a piece of context that is projected up. Its keys and values of all heads, and
# its keys with their rotary parts, have to fit in the memory that vLLM's profile run
# measures. That run has only the first, of 65536 rows. A quarter of these rows leaves
# room for fragmentation by pieces of different sizes.
# Tuning: with vLLM's rows, 64 requests on contexts of up to 50000 tokens took 5.2 GiB
# where 1.3 GiB had been measured, on an H200, 2026-11, `ci/gpu.py memory`.
MAX_CONTEXT_ROWS = 16384


@dataclass
class TurboMLADecodeMetadata(MLACommonDecodeMetadata):
    """The metadata of requests that attend to packed pages.

    Attributes:
        plans: The calls of the layers' kernels, by the layers' shapes.

    """

    plans: dict[LayerShape, DecodePlan] = field(default_factory=dict, repr=False)


@dataclass
class TurboMLAMetadata(MLACommonMetadata[TurboMLADecodeMetadata]):
    """The metadata of a step.

    Attributes:
        prefill_token_to_seq: (T,) int32, the prefill request of each prefilled token;
            None if there is none, or if they see each other as computed.

    """

    prefill_token_to_seq: torch.Tensor | None = None


def check_spec(kv_cache_spec: AttentionSpec, serves_sparse: bool = False) -> None:
    """Refuse an MLA layer's cache spec that is not served, with a ValueError."""
    found = refusals.unsupported_mla_spec(kv_cache_spec, serves_sparse)
    if found:
        cache_dtype = kv_cache_spec.kv_quant_mode.name.lower()
        raise ValueError(refusals.refusal(cache_dtype, found))


def bounded_rows(vllm_config: VllmConfig, size: int) -> int:
    """The rows of context that a prefill projects up at once, of vLLM's ``size``."""
    return align_mla_chunked_context_workspace_size(
        vllm_config, min(size, MAX_CONTEXT_ROWS)
    )


class TurboMLAMetadataBuilder(MLACommonMetadataBuilder[TurboMLAMetadata]):
    """Builds ``TurboMLAMetadata``.

    All requests that may have drafts are decodes, because their lengths on the host are
    not exact. Decodes take all lengths of sequences from the device.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    # Decodes only need views of tensors that the drafter updates between its steps.
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        check_spec(kv_cache_spec)
        self.reorder_batch_threshold = absorbed_query_len(vllm_config)
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, TurboMLAMetadata
        )
        self.decode_len = decode_query_len(vllm_config)
        self.stored = vllm_config.attention_config.turbo_prefill == "stored"
        context = vllm_config.compilation_config.static_forward_context
        runners = [context[name].impl.runner for name in layer_names]
        # One runner of each shape, because layers of a shape have the same kernels.
        self.runners: list[LatentRunner] = list(
            {runner.shape: runner for runner in runners}.values()
        )
        log_turbo_cache(vllm_config)

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        base = MLACommonMetadataBuilder
        size = base.determine_chunked_prefill_workspace_size(vllm_config)
        return bounded_rows(vllm_config, size)

    @staticmethod
    def determine_prefill_query_data_type(
        vllm_config: VllmConfig, model_dtype: torch.dtype
    ) -> torch.dtype:
        return model_dtype

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TurboMLAMetadata:
        if common_attn_metadata.causal is not True:
            cache_dtype = self.kv_cache_spec.kv_quant_mode.name.lower()
            raise NotImplementedError(
                refusals.refusal(cache_dtype, [reasons.NON_CAUSAL])
            )
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        prefill = metadata.prefill
        if prefill is not None and self.stored:
            assert prefill.query_lens_cpu is not None
            requests = torch.arange(metadata.num_prefills, dtype=torch.int32)
            metadata.prefill_token_to_seq = async_tensor_h2d(
                requests.repeat_interleave(prefill.query_lens_cpu), self.device
            )
        return metadata

    def update_draft_decode_metadata(self, metadata: TurboMLAMetadata) -> None:
        pass

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> TurboMLADecodeMetadata:
        spans = plan_spans(
            query_start_loc_cpu.diff().tolist(),
            num_decode_tokens,
            query_start_loc_device,
            self.decode_len,
        )
        plans = {
            runner.shape: runner.plan(spans, block_table_tensor, seq_lens_device)
            for runner in self.runners
        }
        return TurboMLADecodeMetadata(
            block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, plans
        )
