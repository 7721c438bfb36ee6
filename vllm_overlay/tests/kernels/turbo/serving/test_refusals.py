# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Cases that a turbo cache dtype cannot serve are refused at the start, with a reason
and a way out: no feature is dropped silently.
"""

import json
from copy import copy
from pathlib import Path

import pytest
import torch

from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends import turbo_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.worker.utils import customize_attention_spec

from ..backend_utils import make_impl, make_layer, make_vllm_config
from ..utils import all_presets
from .refusal_cases import (
    IMPL_ARGUMENTS,
    MICRO_BATCHES,
    SELECTIONS,
    SPECS,
    WITH_DCP,
    dcp_config,
    fast_prefill_config,
    make_builder,
    make_spec,
    mm_prefix_config,
    parallel_config,
    select,
    share_with_skipped,
    speculative_config,
    with_adaptive_verification,
    with_attribute,
)


@pytest.fixture(scope="module")
def config(folder: Path) -> VllmConfig:
    """The configuration of a model with one layer, "layers.0.attn"."""
    config = make_vllm_config(folder)
    make_layer(config)
    return config


def refused(feature: str, name: str = "turbo4"):
    """Expect a ValueError that names dtype and feature; ``test_reasons.py`` tests the
    ways out.
    """
    return pytest.raises(ValueError, match=f"(?s)(?=.*{name}).*{feature}")


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
    with refused("dtype float32 .supported: float16, bfloat16; pass --dtype bf", name):
        select(name=name, dtype=torch.float32)


def test_all_reasons_are_named():
    with refused("FLASH_ATTN.*head_size 72.*sparse"):
        select(AttentionBackendEnum.FLASH_ATTN, head_size=72, use_sparse=True)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "TURBOQUANT"])
def test_other_backend(backend):
    with refused(f"backend {backend} .supported: TURBO; drop --attention-backend, or"):
        select(AttentionBackendEnum[backend])
    assert "turbo" in select(AttentionBackendEnum.TURBO)
    with refused("sparse"):
        select(AttentionBackendEnum.TURBO, use_sparse=True)


def test_scales_a_head_are_not_read():
    assert "turbo" in select(use_per_head_quant_scales=True)


@pytest.mark.parametrize("name", ["rocm", "xpu"])
def test_other_platforms(name, monkeypatch):
    monkeypatch.setattr(current_platform, "is_cuda", lambda: False)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "device_name", name)
    with refused(f"platform {name} .supported: CUDA.*Use --kv-cache-dtype fp8 or auto"):
        select()


@pytest.mark.parametrize(
    "changes, feature", IMPL_ARGUMENTS.values(), ids=IMPL_ARGUMENTS
)
def test_impl_argument(config, changes, feature):
    with refused(feature):
        make_impl(config, **changes)


def test_impl_takes_what_means_nothing(config):
    """Arguments without effect are taken: models pass defaults explicitly."""
    make_impl(
        config,
        alibi_slopes=None,
        sliding_window=None,
        logits_soft_cap=0.0,
        kv_sharing_target_layer_name=None,
        sinks=None,
        use_alibi_sqrt=False,
    )


def test_window_that_never_binds(config):
    """A window as long as the longest sequence counts as none."""
    assert "turbo" in select(has_sliding_window=True)
    for window, binds in ((2047, True), (2048, False), (4096, False)):
        impl = make_impl(config, sliding_window=window)
        assert impl.runner.scoring.sliding_window == (window if binds else None)


def test_window_of_a_drafter(config):
    """A drafter's sequences are as long as the target model's."""
    drafting = speculative_config(config, "draft_model")
    target = copy(config.model_config)
    target.max_model_len = 4096
    drafting.speculative_config.target_model_config = target
    for window, served in ((4095, 4095), (4096, None)):
        impl = make_impl(drafting, sliding_window=window)
        assert impl.runner.scoring.sliding_window == served


def test_window_is_packed(config):
    """A layer with a sliding window has pages as large as a layer without."""
    layers = [make_layer(config, per_layer_sliding_window=w) for w in (None, 64)]
    pages = []
    for layer in layers:
        spec = layer.get_kv_cache_spec(config)
        spec = customize_attention_spec(layer.get_attn_backend(), spec)
        pages.append(spec.page_size_bytes)
        make_builder(config, spec)
    assert pages[0] == pages[1]


@pytest.mark.parametrize("method", ["ngram", "eagle", "mtp", "draft_model"])
def test_speculative_decoding_is_served(config, method):
    make_impl(speculative_config(config, method))


def test_extracted_hidden_states(config):
    """Hidden states would be stored in the cache's dtype, as if they were K and V."""
    with refused("extract_hidden_states of --speculative-config"):
        make_impl(speculative_config(config, "extract_hidden_states"))


@pytest.mark.parametrize("changes", MICRO_BATCHES.values(), ids=MICRO_BATCHES)
def test_micro_batches(config, changes):
    """Each micro-batch would need a workspace and a plan of its own."""
    with refused("leave out --enable-dbo and --ubatch-size"):
        make_impl(parallel_config(config, **changes))


@pytest.mark.parametrize("change, arguments, feature", WITH_DCP.values(), ids=WITH_DCP)
def test_with_decode_context_parallelism(config, change, arguments, feature):
    make_impl(dcp_config(config))
    with refused(feature):
        make_impl(change(config), **arguments)


def test_pooled_blocks_with_decode_context_parallelism(config, monkeypatch):
    monkeypatch.setattr(turbo_attn.TurboAttentionImpl, "states_per_token", 4)
    with refused("DCP of pooled blocks"):
        make_impl(dcp_config(config))


def test_decode_context_parallelism_is_served(config):
    assert "turbo" in select(use_dcp=True)


def test_gpu_without_flash_attention(config, monkeypatch):
    """Without FlashAttention, prefills would exceed the reserved memory."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(turbo_attn, "get_flash_attn", lambda head_size: None)
    with refused("a vLLM without FlashAttention for head_size 64 on this GPU"):
        make_impl(config)


def test_one_micro_batch_is_the_batch(config):
    make_impl(parallel_config(config, ubatch_size=1))


def test_adaptive_verification_is_served():
    assert "turbo" in select(use_adaptive_verification=True)


@pytest.mark.parametrize("make, feature", SPECS.values(), ids=SPECS)
def test_spec(config, make, feature):
    with refused(feature):
        make_builder(config, make())


LAYERS = {
    name: IMPL_ARGUMENTS[name]
    for name in ("ALiBi", "soft cap of large heads", "encoder only")
} | {
    "sliding window of large heads": (
        dict(per_layer_sliding_window=64, head_size=512),
        "sliding window of 64 tokens of head_size 512",
    ),
    "head size": (dict(head_size=72), "head_size 72"),
}


@pytest.mark.parametrize("changes, feature", LAYERS.values(), ids=LAYERS)
def test_layer(config, changes, feature):
    with refused(feature):
        make_layer(config, **changes)


PALIGEMMA = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "model_type": "paligemma",
    "image_token_index": 500,
    "text_config": {
        "model_type": "gemma",
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}


def test_mm_prefix_with_images_and_without(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PALIGEMMA))
    for language_model_only in (False, True):
        model = ModelConfig(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            language_model_only=language_model_only,
        )
        layer = make_layer(with_attribute(config, "model_config", model))
        assert layer.attn_backend is TurboAttentionBackend
        assert layer.use_mm_prefix is not language_model_only
        assert layer.impl.runner.has_spans is not language_model_only


@pytest.mark.parametrize("head_size, has_spans", [(256, True), (512, False)])
def test_layers_of_large_heads_expect_no_images(config, head_size, has_spans):
    """Layers with heads of 512 expect no images: Gemma 4's see none, and are served."""
    impl = make_impl(mm_prefix_config(config), head_size=head_size)
    assert impl.runner.has_spans is has_spans


def test_mm_prefix_with_adaptive_verification(config):
    """The host does not know which tokens among decodes belong to a prompt."""
    drafting = with_adaptive_verification(config)
    make_builder(drafting, make_spec())
    make_builder(mm_prefix_config(config), make_spec())
    with refused("multimodal.*adaptive.*enable_adaptive_ver.*--language-model-only"):
        make_builder(mm_prefix_config(drafting), make_spec())


def test_fast_prefill(config):
    """Layers that share a cache would have other batches than layers that store."""
    with refused("leave out --kv-sharing-fast-prefill"):
        make_impl(fast_prefill_config(config))


@pytest.mark.parametrize("skipped", [0, 1])
def test_shared_caches_of_other_dtypes(tmp_path, skipped):
    """A layer would read bytes that another layer stores in another format."""
    with refused("KV sharing.*of turbo4 and of auto.*--kv-cache-dtype-skip-layers"):
        share_with_skipped(make_vllm_config(tmp_path), skipped)


def test_layer_is_served(config):
    layer = make_layer(config)
    assert layer.attn_backend is TurboAttentionBackend
    spec = TurboAttentionBackend.customize_spec(layer.get_kv_cache_spec(config))
    layout = TurboFormat.from_cache_dtype("turbo4", 64)
    assert spec.page_size_bytes == 32 * 2 * layout.slot_size
    make_builder(config, spec)


def test_layer_whose_values_have_no_rotation(config):
    with refused("head_size_v 32 .*64, 80, 96"):
        make_layer(config, head_size_v=32)


@pytest.mark.parametrize("argument", ["output_scale", "output_block_scale"])
def test_fused_output_quantization(config, argument):
    """Compilation never asks for fused quantisation; another caller gets an error."""
    impl = make_impl(config)
    assert not impl.fused_output_quant_supported(None)
    x = torch.zeros(1, 4, 64)
    with pytest.raises(NotImplementedError, match="turbo4.*fused output quantization"):
        impl.forward(None, x, x, x, x, None, x, **{argument: torch.ones(())})
