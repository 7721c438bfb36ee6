# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Places outside the backend where vLLM must know the turbo cache dtypes."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cache_dtype import (
    CacheDTypeBackend,
    engine_backend,
    select_own_backend,
)
from vllm.v1.attention.backends.fa_utils import is_fa_version_supported
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.attention.ops.turbo.format import (
    HEAD_SIZES,
    TILE_TOKENS,
    TURBO_PRESETS,
    TurboFormat,
    is_turbo_cache_dtype,
)
from vllm.v1.attention.selector import _cached_get_attn_backend, get_attn_backend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    get_kv_quant_mode,
    is_quantized_kv_cache,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..backend_utils import make_vllm_config
from ..utils import BF16, CACHE_LAYOUTS, all_head_sizes, all_presets, cache_spec
from .refusal_cases import select, selector_config

BACKEND_PATH = "vllm.v1.attention.backends.turbo_attn.TurboAttentionBackend"
OTHER_DTYPES = sorted(set(get_args(CacheDType)) - set(TURBO_PRESETS))


@all_presets
def test_cache_dtype(name):
    assert name in get_args(CacheDType)
    assert CacheConfig(cache_dtype=name).cache_dtype == name
    assert STR_DTYPE_TO_TORCH_DTYPE[name] == torch.uint8
    assert is_quantized_kv_cache(name)
    assert name in TurboAttentionBackend.supported_kv_cache_dtypes
    assert TurboAttentionBackend.supports_kv_cache_dtype(name)


@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_other_cache_dtypes_are_not_ours(name):
    """Names and modes of other cache dtypes do not overlap with turbo's."""
    assert not is_turbo_cache_dtype(name)
    assert not get_kv_quant_mode(name).is_turbo
    assert not TurboAttentionBackend.supports_kv_cache_dtype(name)


def test_quant_modes_are_distinct():
    modes = [get_kv_quant_mode(name) for name in TURBO_PRESETS]
    assert [mode.name.lower() for mode in modes] == list(TURBO_PRESETS)
    others = {get_kv_quant_mode(name) for name in OTHER_DTYPES}
    assert len(set(modes)) == len(TURBO_PRESETS)
    assert not others & set(modes)
    for mode in modes:
        # An alias has the value of another member.
        assert [n for n, m in KVQuantMode.__members__.items() if m == mode] == [
            mode.name
        ]
        assert mode.is_turbo
        assert not mode.is_turboquant
        assert not mode.is_per_token_head and not mode.is_nvfp4


def test_values_of_other_quant_modes_stay():
    assert KVQuantMode.OCTAVE_K3V4 == 12
    assert KVQuantMode.OCTAVE_K3V3_COMPACT == 14
    assert [mode for mode in KVQuantMode if mode.is_turbo] == [
        KVQuantMode.TURBO4,
        KVQuantMode.K4V3,
        KVQuantMode.TURBO3,
    ]


@all_presets
@all_head_sizes
@pytest.mark.parametrize("block_size", [16, 48, 528])
def test_page_size(name, head_size, block_size):
    spec = cache_spec(TurboFormat.from_cache_dtype(name, head_size), 8, block_size)
    layout = TurboFormat.from_cache_dtype(name, head_size)
    assert spec.page_size_bytes == block_size * 8 * layout.slot_size
    for raw in (spec, replace(spec, state_content_bytes=None)):
        assert TurboAttentionBackend.customize_spec(raw) == spec


def test_specs_of_other_dtypes_stay():
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    assert TurboAttentionBackend.customize_spec(spec) is spec


def test_backend_interface():
    assert AttentionBackendEnum.TURBO.get_path() == BACKEND_PATH
    assert AttentionBackendEnum.TURBO.get_class() is TurboAttentionBackend
    assert TurboAttentionBackend.get_name() == "TURBO"
    assert TurboAttentionBackend.forward_includes_kv_cache_update
    # Layouts with contiguous tokens of a (block, head).
    contiguous = {layout for layout in KVCacheLayout if layout.value[-2:] == (3, 4)}
    declared = TurboAttentionBackend.supported_kv_cache_layouts()
    assert set(declared) == contiguous - {KVCacheLayout.LHBNC}
    assert declared == CACHE_LAYOUTS
    assert TurboAttentionBackend.supports_block_size(528)
    assert not TurboAttentionBackend.supports_block_size(24)


def test_literals_are_of_the_format():
    """The backend repeats the format's literals, for tools that read its source."""
    (multiple,) = TurboAttentionBackend.get_supported_kernel_block_sizes()
    assert multiple == MultipleOf(TILE_TOKENS)
    assert TurboAttentionBackend.get_supported_head_sizes() == list(HEAD_SIZES)


def test_least_compute_capability(monkeypatch):
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True, raising=False)
    supports = TurboAttentionBackend.supports_compute_capability
    assert not supports(DeviceCapability(7, 5))
    assert supports(DeviceCapability(8, 0))
    assert supports(DeviceCapability(12, 0))


@pytest.mark.parametrize(
    "option, values",
    [
        ("turbo_prefill", ["raw", "stored"]),
        ("turbo_kernel", ["auto", "cuda", "triton"]),
        ("turbo_window", ["auto", 0, 1, 16]),
        ("turbo_means", ["auto", "off"]),
    ],
)
def test_attention_options(option, values):
    """The first value is the default, and no value makes a model compile again."""
    assert getattr(AttentionConfig(), option) == values[0]
    configs = [AttentionConfig(**{option: value}) for value in values]
    assert [getattr(config, option) for config in configs] == values
    assert len({config.compute_hash() for config in configs}) == 1
    assert AttentionConfig(use_non_causal=True).compute_hash() != (
        AttentionConfig().compute_hash()
    )
    with pytest.raises(ValidationError, match=option):
        AttentionConfig(**{option: "bogus"})


def fp8_checkpoint_layer(cache_dtype: str) -> torch.nn.Module:
    """An attention layer with loaded scales of an FP8 checkpoint."""
    layer = torch.nn.Module()
    layer.kv_cache_dtype = cache_dtype
    layer.calculate_kv_scales = False
    for scale in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
        setattr(layer, scale, torch.ones(()))
    method = BaseKVCacheMethod(None)
    method.create_weights(layer)
    for scale in ("q_scale", "k_scale", "v_scale", "prob_scale"):
        torch.nn.init.constant_(getattr(layer, scale), 0.5)
    method.process_weights_after_loading(layer)
    return layer


@all_presets
def test_scales_of_fp8_checkpoints_are_dropped(name):
    layer = fp8_checkpoint_layer(name)
    assert layer._k_scale == layer._v_scale == 1
    assert layer._k_scale_float == layer._v_scale_float == 1
    for scale in ("q_scale", "k_scale", "v_scale", "prob_scale"):
        assert not hasattr(layer, scale)


@all_presets
@pytest.mark.parametrize("selected", [None, AttentionBackendEnum.TURBO])
def test_no_platform_is_asked(name, selected, folder, monkeypatch):
    """The dtype selects the backend, and for other dtypes the platform does."""

    def list_backends(*args: object, **arguments: object) -> str:
        raise NotImplementedError("the platform was asked")

    monkeypatch.setattr(current_platform, "get_attn_backend_cls", list_backends)
    config = make_vllm_config(folder, name)
    config.attention_config.backend = selected
    with set_current_vllm_config(config):
        assert get_attn_backend(128, BF16, name) is TurboAttentionBackend
        _cached_get_attn_backend.cache_clear()
        with pytest.raises(NotImplementedError, match="the platform was asked"):
            get_attn_backend(128, BF16, "auto")


@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_other_dtypes_have_no_backend_of_their_own(name):
    assert select_own_backend(None, selector_config(name)) is None
    config = VllmConfig(cache_config=CacheConfig(cache_dtype=name))
    assert engine_backend(config) is CacheDTypeBackend


@pytest.mark.parametrize("name", [*TURBO_PRESETS, "auto"])
def test_gemma4_forces_no_backend(name, folder):
    """Gemma 4's own hook, for a model with two head sizes, forces no backend."""
    config = make_vllm_config(
        folder,
        name,
        architectures=["Gemma4ForCausalLM"],
        model_type="gemma4_text",
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        head_dim=256,
        global_head_dim=512,
    )
    forced = config.attention_config.backend
    if is_turbo_cache_dtype(name):
        assert forced is None
        # Its layers may still be refused: see test_refusals.py.
        assert select(name=name, head_size=512) == BACKEND_PATH
    elif not is_fa_version_supported(4):
        assert forced is AttentionBackendEnum.TRITON_ATTN
