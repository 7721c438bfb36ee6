# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Cases that are refused, each with a pattern of its message."""

from collections.abc import Callable
from copy import copy
from fractions import Fraction
from functools import cache, partial

import pytest
import regex as re
import torch

from vllm.config import (
    AttentionConfig,
    KVTransferConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.cache_dtype import select_own_backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.turbo_attn import TurboMetadataBuilder
from vllm.v1.attention.ops.turbo.reasons import REASONS, Reason
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    get_kv_quant_mode,
)

from ..backend_utils import make_layer
from ..utils import DEVICE


def selector_config(name: str = "turbo4", **changes) -> AttentionSelectorConfig:
    arguments = dict(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype=name, block_size=None
    )
    return AttentionSelectorConfig(**(arguments | changes))


def select(
    backend: AttentionBackendEnum | None = None, name: str = "turbo4", **changes
) -> str:
    """The path of the backend that a dtype selects."""
    found = select_own_backend(backend, selector_config(name, **changes))
    return ".".join(found.full_cls_name())


KINDS = {
    "encoder": (dict(attn_type=AttentionType.ENCODER), "encoder attention"),
    "encoder only": (
        dict(attn_type=AttentionType.ENCODER_ONLY),
        "encoder-only attention",
    ),
    "cross": (dict(attn_type=AttentionType.ENCODER_DECODER), "cross. attention"),
}
SELECTIONS = {
    "head size 72": (dict(head_size=72), "head_size 72 .supported: 64, 80, .*512"),
    "head size 160": (dict(head_size=160), "head_size 160 .supported"),
    "block size 24": (
        dict(block_size=24),
        "block_size 24 .supported: multiples of 16; leave out --block-size",
    ),
    "block size 8": (dict(block_size=8), "block_size 8 .supported: multiples of 16"),
    "sparse": (dict(use_sparse=True), "sparse attention"),
    "non-causal": (dict(use_non_causal=True), "non-causal"),
    "batch invariance": (
        dict(use_batch_invariant=True),
        "batch invariance .unset VLLM_BATCH_INVARIANT",
    ),
    "PCP": (dict(use_pcp=True), "leave out --prefill-context-parallel-size"),
    "R-SWA": (dict(use_rswa=True), "R-SWA"),
    **KINDS,
}


IMPL_ARGUMENTS = {
    "ALiBi": (dict(alibi_slopes=[0.5] * 4), "ALiBi"),
    "sliding window of large heads": (
        dict(sliding_window=128, head_size=512),
        "sliding window of 128 tokens of head_size 512 .supported: head_size of up to "
        "256; --kv-cache-dtype-skip-layers sliding_window",
    ),
    "soft cap of large heads": (
        dict(logits_soft_cap=30.0, head_size=512),
        "soft cap of 30 of head_size 512",
    ),
    **KINDS,
    "unknown argument": (dict(chunk_lookback=4), "chunk_lookback"),
    "pooled layer that is skipped": (
        dict(kv_cache_dtype="auto"),
        "pooled blocks .*--kv-cache-dtype-skip-layers, nor sliding_window",
    ),
}


def with_attribute(config: VllmConfig, name: str, value: object) -> VllmConfig:
    changed = copy(config)
    setattr(changed, name, value)
    return changed


def with_setting(config: VllmConfig, part: str, **values: object) -> VllmConfig:
    """A copy of the configuration with other values in one part, "config.subconfig"."""
    changed = whole = copy(config)
    for name in part.split("."):
        own = copy(getattr(changed, name))
        object.__setattr__(changed, name, own)
        changed = own
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    return whole


def speculative_config(config: VllmConfig, method: str) -> VllmConfig:
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    # Set afterwards, because validation would need a drafter's checkpoint.
    speculative.method = method
    return with_attribute(config, "speculative_config", speculative)


def mm_prefix_config(config: VllmConfig) -> VllmConfig:
    """The configuration of a model whose image tokens see each other."""
    # The cached property is set, because computing it needs a checkpoint.
    return with_setting(config, "model_config", is_mm_prefix_lm=True)


def with_adaptive_verification(config: VllmConfig) -> VllmConfig:
    changed = speculative_config(config, "draft_model")
    changed.speculative_config.enable_adaptive_verification = True
    return changed


def fast_prefill_config(config: VllmConfig) -> VllmConfig:
    return with_setting(config, "cache_config", kv_sharing_fast_prefill=True)


def make_spec(spec_type: type = FullAttentionSpec, **changes) -> AttentionSpec:
    arguments = dict(
        block_size=32,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode("turbo4"),
    )
    return spec_type(**(arguments | changes))


def make_builder(
    config: VllmConfig,
    spec: AttentionSpec,
    builder: type[TurboMetadataBuilder] = TurboMetadataBuilder,
) -> TurboMetadataBuilder:
    return builder(spec, ["layers.0.attn"], config, DEVICE)


SPECS = {
    "sliding window of sparse attention": (
        partial(make_spec, SlidingWindowMLASpec, sliding_window=64),
        "SlidingWindowMLA",
    ),
    "MLA": (partial(make_spec, MLAAttentionSpec), "MLA"),
    "R-SWA": (partial(make_spec, RSWASpec, rswa_window=64), "RSWA"),
    "sinks": (partial(make_spec, SinkFullAttentionSpec, sink_len=4), "SinkFull"),
    # PrefillPrefixLMAttention's, whose metadata have causal=False.
    "prefix LM": (partial(make_spec, non_causal=True), "non-causal"),
    "size of V": (partial(make_spec, head_size_v=32), "head_size_v 32 .*64, 80"),
    "pooled": (
        partial(make_spec, tokens_per_state=Fraction(1, 4)),
        "tokens_per_state 1/4",
    ),
}


def dcp_config(config: VllmConfig, **attention) -> VllmConfig:
    """The configuration of ranks that share the context (DCP)."""
    sizes = dict(tensor_parallel_size=4, decode_context_parallel_size=2)
    changed = parallel_config(config, **sizes)
    attention_config = AttentionConfig(turbo_window=0, **attention)
    return with_attribute(changed, "attention_config", attention_config)


# A change of the configuration, arguments of the layer, and the reason's pattern.
WITH_DCP = {
    "stored": (
        lambda config: dcp_config(config, turbo_prefill="stored"),
        {},
        "DCP with turbo_prefill stored .leave out --attention-config.turbo_prefill",
    ),
    "sliding window": (
        dcp_config,
        dict(sliding_window=64),
        "DCP of a sliding window.*leave out --dec",
    ),
    "head size": (
        dcp_config,
        dict(head_size=96),
        "DCP of head_size 96 .supported: 64, 128, 256; leave out --decode-c",
    ),
    "shared cache": (
        dcp_config,
        dict(kv_sharing_target_layer_name="layers.0.attn"),
        "DCP of KV sharing",
    ),
    "images": (
        lambda config: mm_prefix_config(dcp_config(config)),
        {},
        "DCP with partial multimodal.*--language-model-only",
    ),
    "adaptive verification": (
        lambda config: with_adaptive_verification(dcp_config(config)),
        {},
        "DCP with adaptive verification",
    ),
}


MICRO_BATCHES = {"dual batch overlap": dict(enable_dbo=True), "2": dict(ubatch_size=2)}


def parallel_config(config: VllmConfig, **changes) -> VllmConfig:
    # An explicit executor, so that the number of GPUs does not matter.
    changes = {"distributed_executor_backend": "mp"} | changes
    return with_attribute(config, "parallel_config", ParallelConfig(**changes))


PACKED = make_spec(state_content_bytes=68)


class OwnAttention(torch.nn.Module, AttentionLayerBase):
    """An attention layer of a model's own class, for which no backend is selected."""

    def __init__(self, backend: type[AttentionBackend], spec: AttentionSpec):
        super().__init__()
        self.kv_cache_dtype = "turbo4"
        self.backend = backend
        self.spec = spec

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        return self.spec


def transfer_config(config: VllmConfig, name: str, **changes) -> VllmConfig:
    transfer = KVTransferConfig(kv_connector=name, kv_role="kv_both", **changes)
    return with_attribute(config, "kv_transfer_config", transfer)


def multi_config(config: VllmConfig, *names: str) -> VllmConfig:
    """The configuration of an engine with several connectors."""
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    return transfer_config(
        config, "MultiConnector", kv_connector_extra_config={"connectors": children}
    )


def share_with_skipped(config: VllmConfig, skipped: int) -> None:
    """Make two layers that share a cache, one packed and one in the model's dtype."""
    config.cache_config.kv_cache_dtype_skip_layers = [str(skipped)]
    target = make_layer(config)
    sharing = make_layer(config, kv_sharing_target_layer_name=target.layer_name)
    dtypes = [target.kv_cache_dtype, sharing.kv_cache_dtype]
    assert sorted(dtypes) == ["auto", "turbo4"]
    packed = target if skipped else sharing
    TurboMetadataBuilder(make_spec(), [packed.layer_name], config, DEVICE)


@cache
def serve_parser() -> FlexibleArgumentParser:
    """The parser of the arguments of ``vllm serve`` that configure an engine."""
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def serve_options() -> set[str]:
    """The names of the arguments that the parser knows."""
    actions = serve_parser()._actions
    return {name for action in actions for name in action.option_strings}


def reasons_of(call: Callable[[], object], name: str = "turbo4") -> list[str]:
    """The reasons in the message of a refusal."""
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        call()
    found = re.fullmatch(
        rf"--kv-cache-dtype {name} does not support this: (.*?)\."
        r"(?: Use --kv-cache-dtype fp8 or auto instead\.)?",
        str(raised.value),
    )
    assert found is not None, raised.value
    # Brackets have semicolons of their own.
    return re.findall(r"(?! )(?:[^;(]|\([^)]*\))+", found[1])


def pattern(reason: Reason) -> str:
    """A regular expression that matches a reason with any values."""
    return re.sub("<[^>]*>", "[^<>]+", re.escape(str(reason), literal_spaces=True))


def listed(text: str, reasons: tuple[Reason, ...] = REASONS) -> Reason:
    """The only listed reason that matches the text."""
    (found,) = (each for each in reasons if re.fullmatch(pattern(each), text))
    assert "None" not in text
    return found
