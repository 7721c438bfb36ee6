# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MLA models and settings that turbo pages do not serve are refused at the start."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.config.attention import HiSparseConfig
from vllm.config.vllm import enable_rope_kvcache_mla_fusion
from vllm.model_executor.layers.attention import MLAAttention
from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.turbo_mla import TurboMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops.turbo.reasons import MLA_REASONS, REASONS
from vllm.v1.attention.ops.turbo.refusals import MLA_SETTINGS, MLA_SPEC_FEATURES
from vllm.v1.attention.ops.turbo.serving.connectors import CONNECTORS, MLA_CONNECTORS
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from ..backend_utils import make_layer
from ..serving.refusal_cases import (
    MICRO_BATCHES,
    listed,
    make_builder,
    make_spec,
    multi_config,
    parallel_config,
    reasons_of,
    select,
    selector_config,
    speculative_config,
    transfer_config,
    with_adaptive_verification,
    with_setting,
)
from ..serving.test_refusals import refused
from ..utils import ON_GPU
from .mla_utils import FP32, MLABatch, make_mla_builder, make_mla_config, make_mla_layer

pytestmark = pytest.mark.skipif(ON_GPU, reason="fp32 layers are for CPUs")


@pytest.fixture
def config(folder: Path, rank_config: VllmConfig) -> VllmConfig:
    return make_mla_config(folder)


MLA = dict(use_mla=True, head_size=576)
SELECTIONS = {
    "head size 192": (dict(head_size=192), "head_size 192 .supported: 320, 512, 576"),
    "head size 640": (dict(head_size=640), "head_size 640"),
    "block size 24": (dict(block_size=24), "block_size 24 .supported: multiples of 16"),
    "non-causal": (dict(use_non_causal=True), "non-causal"),
    "batch invariance": (dict(use_batch_invariant=True), "batch invariance"),
    "PCP": (dict(use_pcp=True), "--prefill-context-parallel-size"),
    "DCP": (dict(use_dcp=True), "--decode-context-parallel-size"),
    "R-SWA": (dict(use_rswa=True), "R-SWA"),
    "adaptive verification": (dict(use_adaptive_verification=True), "adaptive"),
    "encoder": (dict(attn_type=AttentionType.ENCODER), "encoder attention"),
    "sinks": (dict(has_sink=True), "attention sinks of MLA"),
    "sliding window": (dict(has_sliding_window=True), "sliding window of MLA"),
    "images": (dict(use_mm_prefix=True), "--language-model-only"),
}


@pytest.mark.parametrize("name", ["turbo4", "turbo3"])
def test_selection(name):
    assert select(name=name, **MLA).endswith("turbo_mla.TurboMLABackend")
    sparse = dict(use_sparse=True)
    assert select(name=name, **MLA, **sparse).endswith(".TurboMLASparseBackend")
    for changes, feature in SELECTIONS.values():
        for kind in ({}, sparse):
            with refused(feature, name):
                select(name=name, **(MLA | changes | kind))


def test_one_vector_has_one_width():
    with refused(
        "k4v3 of MLA, where K and V are one vector .supported: turbo4, turbo3", ""
    ):
        select(name="k4v3", **MLA)


OTHER_BACKENDS = {
    "TRITON_MLA": (MLA, "TURBO_MLA"),
    "FLASHMLA": (MLA, "TURBO_MLA"),
    "TURBO": (MLA, "TURBO_MLA"),
    "TURBO_MLA": ({}, "TURBO"),
    "FLASHMLA_SPARSE": (MLA | dict(use_sparse=True), "TURBO_MLA_SPARSE"),
}


@pytest.mark.parametrize("backend", OTHER_BACKENDS)
def test_other_backend(backend):
    arguments, own = OTHER_BACKENDS[backend]
    with refused(f"backend {backend} .supported: {own}; drop .* or pass {own} if"):
        select(AttentionBackendEnum[backend], **arguments)
    assert "turbo_mla" in select(AttentionBackendEnum.TURBO_MLA, **MLA)


def test_fp32_needs_a_cpu(monkeypatch):
    assert "turbo_mla" in select(dtype=FP32, **MLA)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with refused("dtype float32"):
        select(dtype=FP32, **MLA)


LAYERS = {
    "sliding window": (dict(sliding_window=64), "sliding window of MLA"),
    "indexer": (dict(indexer=object()), "layer argument indexer"),
    "sinks": (dict(sinks=torch.ones(4)), "layer argument sinks"),
}


@pytest.mark.parametrize("changes, feature", LAYERS.values(), ids=LAYERS)
def test_layer(config, changes, feature):
    with refused(feature):
        make_mla_layer(config, **changes)


@pytest.mark.parametrize("rank, rope", [(448, 64), (512, 128), (320, 0), (576, 0)])
def test_sizes(config, folder, rank, rope):
    with refused(f"latent of {rank} and {rope} rotary|head_size"):
        make_mla_layer(make_mla_config(folder, rank=rank, rope=rope))


def setting(part: str, **values: object) -> Callable[[VllmConfig], VllmConfig]:
    """A function that changes values in one part of a configuration."""
    return partial(with_setting, part=part, **values)


SETTINGS: dict[str, tuple[Callable[[VllmConfig], VllmConfig], str]] = {
    "skipped layers": (
        setting("cache_config", kv_cache_dtype_skip_layers=["7"]),
        "MLA with --kv-cache-dtype-skip-layers 7 ",
    ),
    "quantized queries": (
        setting("attention_config", use_prefill_query_quantization=True),
        "leave out --attention-config.use_prefill_query_quantization",
    ),
    "fused update": (
        setting("compilation_config.pass_config", fuse_rope_kvcache_cat_mla=True),
        "leave out --compilation-config.pass_config.fuse_rope_kvcache_cat_mla",
    ),
    "sinks": (
        setting("model_config.hf_text_config", learnable_sink=True),
        "attention sinks of MLA",
    ),
    "windows": (
        setting("model_config.hf_text_config", swa_kv_lora_rank=1024),
        "sliding window of MLA",
    ),
    "pooled indexer": (
        setting("model_config.hf_text_config", index_kpool=4),
        "sparse MLA whose indexer pools tokens",
    ),
    "HiSparse": (
        setting("attention_config", hisparse_config=HiSparseConfig()),
        "leave out --attention-config.hisparse_config",
    ),
    "DSpark": (partial(speculative_config, method="dspark"), "method dspark"),
    "DFlash": (partial(speculative_config, method="dflash"), "method dflash"),
    "adaptive verification": (with_adaptive_verification, "adaptive"),
    "PCP": (
        setting("parallel_config", prefill_context_parallel_size=2),
        "--prefill-context-parallel-size",
    ),
    "DCP": (
        setting("parallel_config", decode_context_parallel_size=2),
        "--decode-context-parallel-size",
    ),
    "hidden states": (
        partial(speculative_config, method="extract_hidden_states"),
        "extract_hidden_states",
    ),
    "micro-batches": (
        partial(parallel_config, **MICRO_BATCHES["2"]),
        "leave out --enable-dbo and --ubatch-size",
    ),
    "connector": (
        partial(transfer_config, name="LMCacheConnectorV1"),
        "KV connector LMCacheConnectorV1",
    ),
}


SIZES = dict(
    num_heads=4,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
)


def make_impl(config: VllmConfig, **changes: object) -> object:
    """An implementation, made as by vLLM's MLA layer."""
    none = "alibi_slopes", "sliding_window", "logits_soft_cap", "indexer"
    arguments = dict.fromkeys([*none, "kv_sharing_target_layer_name"]) | dict(
        head_size=576,
        scale=0.1,
        num_kv_heads=1,
        kv_cache_dtype="turbo4",
        attn_type=AttentionType.DECODER,
        qk_head_dim=128,
        kv_b_proj=nn.Linear(1, 1),
    )
    with set_current_vllm_config(config):
        return TurboMLABackend.get_impl_cls()(**(arguments | SIZES | changes))


@pytest.mark.parametrize("change, feature", SETTINGS.values(), ids=SETTINGS)
def test_setting(config, change, feature):
    make_impl(config)
    with refused(feature):
        make_impl(change(config))


@pytest.mark.parametrize("name", CONNECTORS)
def test_connectors(config, name):
    """Connectors known to work with MLA are served; refusals of others name one."""
    options, instead = {}, "(use [A-Z]|leave it out)"
    if name in MLA_CONNECTORS:
        make_impl(transfer_config(config, name))
        options = {"kv_connector_extra_config": {"canonical_layout": True}}
        instead = "leave out canonical_layout"
    with refused(f"KV connector {name} .*{instead}"):
        make_impl(transfer_config(config, name, **options))


def test_connectors_of_others(config):
    """Each connector within MultiConnector is checked."""
    make_impl(multi_config(config, "OffloadingConnector", "ExampleConnector"))
    with refused("KV connector NixlConnector .it is not known to work with MLA"):
        make_impl(multi_config(config, "OffloadingConnector", "NixlConnector"))


@pytest.mark.parametrize("method", ["ngram", "eagle", "eagle3", "mtp", "draft_model"])
def test_drafts_are_served(config, method):
    make_impl(speculative_config(config, method))


def test_fused_cache_update(config):
    """The fused update is off without a flag, even if the compiler sees the update."""
    config.compilation_config.use_inductor_graph_partition = True
    assert not enable_rope_kvcache_mla_fusion(config)
    config.cache_config.cache_dtype = "fp8"
    assert enable_rope_kvcache_mla_fusion(config)
    assert config.compilation_config.cudagraph_mode != CUDAGraphMode.FULL


@pytest.mark.parametrize("window", ["auto", 0, 16])
def test_recent_window(config, window):
    """MLA has no recent window; a number of tokens is refused."""
    message = "turbo_window=16 cannot be had, because MLA"
    is_refused = pytest.raises(ValueError, match=message)
    with is_refused if window == 16 else nullcontext():
        make_impl(with_setting(config, "attention_config", turbo_window=window))


def test_cuda_kernels_need_a_gpu(config):
    changed = with_setting(config, "attention_config", turbo_kernel="cuda")
    with pytest.raises(ValueError, match="turbo_kernel.*CPU platform"):
        make_impl(changed)


MLA_PAGE = dict(num_kv_heads=1, head_size=576)
mla_spec = partial(make_spec, MLAAttentionSpec, **MLA_PAGE)
SPECS: dict[str, tuple[Callable[[], AttentionSpec], str]] = {
    "sliding window": (
        partial(make_spec, SlidingWindowMLASpec, sliding_window=64, **MLA_PAGE),
        "layers of kind SlidingWindowMLA",
    ),
    "K and V": (make_spec, "layers of kind FullAttention"),
    "non-causal": (partial(mla_spec, non_causal_multi_token_decode=True), "non-causal"),
    "top-k": (partial(mla_spec, topk_buffer_width=64), "sparse"),
    "index group": (partial(mla_spec, is_index_group_leader=True), "sparse"),
    "pooled": (partial(mla_spec, tokens_per_state=Fraction(4, 1)), "tokens_per_state"),
}


@pytest.mark.parametrize("make, feature", SPECS.values(), ids=SPECS)
def test_spec(config, make, feature):
    make_mla_layer(config)
    with refused(feature):
        make_builder(config, make(), TurboMLABackend.get_builder_cls())


def test_non_causal_batch(config):
    """A drafter's non-causal batch is refused; its layer does not announce it."""
    layer = make_mla_layer(config)
    common = MLABatch.make(layer, [(3, 16)]).common
    with pytest.raises(NotImplementedError, match="turbo4.*non-causal"):
        make_mla_builder(config, layer).build(0, replace(common, causal=False))


class OwnMLAAttention(MLAAttention):
    """A model's own layer class, which may store by other means."""


platforms = pytest.mark.parametrize("platform", [Platform, current_platform])


@platforms
def test_layers_of_kimi_linear(config, platform):
    """Kimi-Linear stores latents with a kernel of its own. The backend is selected as
    for any layer, and the start refuses it.
    """
    make_mla_layer(config)
    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        layer = MultiHeadLatentAttention(
            config=KimiLinearConfig(vocab_size=64, num_hidden_layers=1),
            hidden_size=256,
            cache_config=config.cache_config,
            prefix="layers.9.self_attn",
            **SIZES,
        )
    assert layer.get_attn_backend() is TurboMLABackend
    with refused(r"layer layers\.9\.self_attn of DeepseekV2ForCausalLM .MultiHeadLat"):
        platform.update_block_size_for_backend(config)


@platforms
def test_layers_of_another_class(config, platform, monkeypatch):
    make_mla_layer(config)
    platform.update_block_size_for_backend(config)
    layer = make_mla_layer(config)
    layer.__class__ = OwnMLAAttention
    with refused(rf"layer {layer.layer_name} of .*OwnMLAAttention, TURBO_MLA"):
        platform.update_block_size_for_backend(config)


def start_beside_k_and_v(
    config: VllmConfig, platform: Platform = current_platform
) -> None:
    """Start with a layer of MLA and one with K and V, as a drafter has."""
    make_mla_layer(config)
    make_layer(config, prefix="draft.0")
    platform.update_block_size_for_backend(config)


@platforms
def test_layers_with_k_and_v_beside(config, platform):
    with refused("MLA beside layers with K and V"):
        start_beside_k_and_v(config, platform)


def selection_reasons(config: VllmConfig) -> Iterator[str]:
    """The reasons for which a selection is refused."""
    fields = selector_config()._fields
    flags = {name: True for name in fields if name.startswith(("use_", "has_"))}
    yield from reasons_of(partial(select, **(MLA | flags | dict(use_sparse=False))))


def test_the_list_of_reasons_is_complete(config, folder):
    """``MLA_REASONS`` has exactly the reasons that only MLA is refused for."""
    builder = TurboMLABackend.get_builder_cls()
    calls: list[Callable[[], object]] = [
        *(partial(make_impl, change(config)) for change, _ in SETTINGS.values()),
        partial(make_impl, config, sliding_window=64),
        partial(make_impl, config, kv_lora_rank=448),
        *(partial(make_builder, config, make(), builder) for make, _ in SPECS.values()),
        partial(start_beside_k_and_v, make_mla_config(folder)),
    ]
    texts = [text for call in calls for text in reasons_of(call)]
    texts += reasons_of(partial(make_impl, config, kv_cache_dtype="k4v3"), "k4v3")
    texts += selection_reasons(config)
    found = {listed(text, (*REASONS, *MLA_REASONS)) for text in texts}
    assert found - set(REASONS) == set(MLA_REASONS)
    assert not set(REASONS) & set(MLA_REASONS)
    assert {*MLA_SETTINGS, *MLA_SPEC_FEATURES} <= {*REASONS, *MLA_REASONS}
