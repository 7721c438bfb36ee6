# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a turbo cache dtype cannot serve is refused at the start, with a reason
and the way out: nothing is dropped in silence.
"""

from copy import copy
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from vllm.config import (
    KVTransferConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionBackend,
    TurboAttentionImpl,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from .backend_utils import make_vllm_config
from .utils import DEVICE, all_presets


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder: Path = tmp_path_factory.mktemp("model")
    return make_vllm_config(folder)


def refused(feature: str, name: str = "turbo4"):
    """Expect a ValueError that names dtype and feature and the way out."""
    message = f"(?is){name}.*{feature}.*Use --kv-cache-dtype fp8 or auto"
    return pytest.raises(ValueError, match=message)


def select(
    backend: AttentionBackendEnum | None = None, name: str = "turbo4", **changes
) -> str:
    arguments = dict(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype=name, block_size=None
    )
    selector_config = AttentionSelectorConfig(**(arguments | changes))
    return current_platform.get_attn_backend_cls(backend, selector_config, 32)


SELECTIONS = {
    "head size 72": (dict(head_size=72), "head_size"),
    "head size 160": (dict(head_size=160), "head_size"),
    "block size 24": (dict(block_size=24), "block_size"),
    "MLA": (dict(use_mla=True), "MLA"),
    "sparse": (dict(use_sparse=True), "sparse"),
    "sinks": (dict(has_sink=True), "sinks"),
    "sliding window": (dict(has_sliding_window=True), "sliding window"),
    "mm-prefix": (dict(use_mm_prefix=True), "multimodal"),
    "per-head scales": (dict(use_per_head_quant_scales=True), "per-head"),
    "non-causal": (dict(use_non_causal=True), "non-causal"),
    "batch invariance": (dict(use_batch_invariant=True), "batch invariance"),
    "PCP": (dict(use_pcp=True), "PCP"),
    "DCP": (dict(use_dcp=True), "DCP"),
    "R-SWA": (dict(use_rswa=True), "R-SWA"),
    "adaptive verification": (
        dict(use_adaptive_verification=True),
        "adaptive verification",
    ),
    "encoder": (dict(attn_type=AttentionType.ENCODER), "encoder"),
    "encoder only": (dict(attn_type=AttentionType.ENCODER_ONLY), "encoder_only"),
    "cross": (dict(attn_type=AttentionType.ENCODER_DECODER), "encoder_decoder"),
}


@all_presets
@pytest.mark.parametrize("changes, feature", SELECTIONS.values(), ids=SELECTIONS)
def test_selection(name, changes, feature):
    with refused(feature, name):
        select(name=name, **changes)


@all_presets
def test_fp32_needs_a_cpu(name, monkeypatch):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    assert "turbo" in select(name=name, dtype=torch.float32)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with refused("dtype", name):
        select(name=name, dtype=torch.float32)


def test_all_reasons_are_named():
    with refused("MLA.*sinks.*FLASH_ATTN"):
        select(AttentionBackendEnum.FLASH_ATTN, use_mla=True, has_sink=True)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "TURBOQUANT"])
def test_other_backend(backend):
    with refused(f"{backend}.*drop --attention-backend"):
        select(AttentionBackendEnum[backend])


def test_xpu(monkeypatch):
    monkeypatch.setattr(current_platform, "is_xpu", lambda: True, raising=False)
    with refused("XPU"):
        select()


def make_impl(config: VllmConfig, **changes) -> TurboAttentionImpl:
    arguments = dict(
        num_heads=4,
        head_size=64,
        scale=0.125,
        num_kv_heads=2,
        kv_cache_dtype="turbo4",
    )
    with set_current_vllm_config(config):
        return TurboAttentionImpl(**(arguments | changes))


IMPL_ARGUMENTS = {
    "ALiBi": (dict(alibi_slopes=[0.5] * 4), "ALiBi"),
    "sliding window": (dict(sliding_window=128), "sliding window"),
    "soft cap": (dict(logits_soft_cap=30.0), "soft cap"),
    "sinks": (dict(sinks=torch.zeros(4)), "sinks"),
    "KV sharing": (dict(kv_sharing_target_layer_name="layers.0"), "KV sharing"),
    "encoder": (dict(attn_type=AttentionType.ENCODER), "encoder"),
    "encoder only": (dict(attn_type=AttentionType.ENCODER_ONLY), "encoder_only"),
    "cross": (dict(attn_type=AttentionType.ENCODER_DECODER), "encoder_decoder"),
    "unknown argument": (dict(chunk_lookback=4), "chunk_lookback"),
}


@pytest.mark.parametrize(
    "changes, feature", IMPL_ARGUMENTS.values(), ids=IMPL_ARGUMENTS
)
def test_impl_argument(config, changes, feature):
    with refused(feature):
        make_impl(config, **changes)


def test_impl_takes_what_means_nothing(config):
    """Models pass defaults explicitly."""
    make_impl(
        config,
        alibi_slopes=None,
        sliding_window=None,
        logits_soft_cap=0.0,
        kv_sharing_target_layer_name=None,
        sinks=None,
        use_alibi_sqrt=False,
    )


def with_attribute(config: VllmConfig, name: str, value: object) -> VllmConfig:
    changed = copy(config)
    setattr(changed, name, value)
    return changed


@pytest.mark.parametrize("method", ["ngram", "eagle", "mtp", "draft_model"])
def test_speculative_decoding(config, method):
    """Drafts are verified; a drafter with a cache of its own is not served yet."""
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    # A checkpoint of a drafter would be needed otherwise.
    speculative.method = method
    changed = with_attribute(config, "speculative_config", speculative)
    if method == "ngram":
        make_impl(changed)
        return
    with refused("speculative decoding with a draft model"):
        make_impl(changed)


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
    "chunked local": (
        lambda: make_spec(ChunkedLocalAttentionSpec, attention_chunk_size=64),
        "ChunkedLocal",
    ),
    "sliding window": (
        lambda: make_spec(SlidingWindowSpec, sliding_window=64),
        "SlidingWindow",
    ),
    "MLA": (lambda: make_spec(MLAAttentionSpec), "MLA"),
    "R-SWA": (lambda: make_spec(RSWASpec, rswa_window=64), "RSWA"),
    "sinks": (lambda: make_spec(SinkFullAttentionSpec, sink_len=4), "SinkFull"),
    # So without the hybrid KV cache manager.
    "chunked local as full": (lambda: make_spec(attention_chunk_size=64), "chunk"),
    # PrefillPrefixLMAttention's, whose metadata have causal=False.
    "prefix LM": (lambda: make_spec(non_causal=True), "non-causal"),
    "other size of V": (lambda: make_spec(head_size_v=32), "head_size_v|size of V"),
    "pooled": (lambda: make_spec(tokens_per_state=Fraction(1, 4)), "tokens_per_state"),
}


@pytest.mark.parametrize("make, feature", SPECS.values(), ids=SPECS)
def test_spec(config, make, feature):
    with refused(feature):
        make_builder(config, make())


def test_chunked_local_backend(config):
    """As Llama 4's layers make it, of this backend."""
    backend = create_chunked_local_attention_backend(TurboAttentionBackend, 64)
    spec = make_spec(ChunkedLocalAttentionSpec, attention_chunk_size=64)
    with refused("ChunkedLocal"):
        make_builder(config, spec, backend.get_builder_cls())


def test_permuted_kv_transfer(config):
    transfer = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", enable_permute_local_kv=True
    )
    changed = with_attribute(config, "kv_transfer_config", transfer)
    with refused("enable_permute_local_kv"):
        make_builder(changed, make_spec())
    transfer.enable_permute_local_kv = False
    make_builder(changed, make_spec())


def make_layer(config: VllmConfig, **changes) -> Attention:
    """A layer as models make it."""
    arguments = dict(
        num_heads=4,
        head_size=64,
        scale=0.125,
        num_kv_heads=2,
        cache_config=config.cache_config,
    )
    prefix = f"layers.{len(config.compilation_config.static_forward_context)}.attn"
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            return Attention(**(arguments | {"prefix": prefix} | changes))
    finally:
        torch.set_default_dtype(default)


LAYERS = {
    "sinks": (dict(sinks=torch.zeros(4)), "sinks"),
    "sliding window": (dict(per_layer_sliding_window=64), "sliding window"),
    "ALiBi": (dict(alibi_slopes=[0.5] * 4), "ALiBi"),
    "soft cap": (dict(logits_soft_cap=30.0), "soft cap"),
    "head size": (dict(head_size=72), "head_size"),
    "encoder only": (dict(attn_type=AttentionType.ENCODER_ONLY), "encoder_only"),
    "KV sharing": (
        dict(kv_sharing_target_layer_name="layers.0.attn"),
        "KV sharing",
    ),
}


@pytest.mark.parametrize("changes, feature", LAYERS.values(), ids=LAYERS)
def test_layer(config, changes, feature):
    with refused(feature):
        make_layer(config, **changes)


def test_layer_is_served(config):
    layer = make_layer(config)
    assert layer.attn_backend is TurboAttentionBackend
    spec = TurboAttentionBackend.customize_spec(layer.get_kv_cache_spec(config))
    layout = TurboFormat.from_cache_dtype("turbo4", 64)
    assert spec.page_size_bytes == 32 * 2 * layout.slot_size
    make_builder(config, spec)


def test_layer_with_another_size_of_values(config):
    """The implementation is not told; the spec is."""
    layer = make_layer(config, head_size_v=32)
    with refused("head_size_v|size of V"):
        spec = TurboAttentionBackend.customize_spec(layer.get_kv_cache_spec(config))
        make_builder(config, spec)


@pytest.mark.parametrize("argument", ["output_scale", "output_block_scale"])
def test_fused_output_quantization(config, argument):
    """Compilation never asks for it; a caller that does is told."""
    impl = make_impl(config)
    assert not impl.fused_output_quant_supported(None)
    x = torch.zeros(1, 4, 64)
    with pytest.raises(NotImplementedError, match="turbo4.*fused output quantization"):
        impl.forward(None, x, x, x, x, None, x, **{argument: torch.ones(())})
