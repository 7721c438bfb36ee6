# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Places outside the backend where vLLM must know the turbo cache dtypes."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

import vllm
import vllm.platforms
from vllm.config import AttentionConfig, CacheConfig
from vllm.config.cache import CacheDType
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, Platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends import turbo_attn
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
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    get_kv_quant_mode,
    is_quantized_kv_cache,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..backend_utils import make_vllm_config
from ..utils import CACHE_LAYOUTS, all_head_sizes, all_presets, cache_spec, function_of
from .refusal_cases import (
    cuda_module,
    cuda_platform,
    select_on_cuda,
    selector_config,
)

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
def test_this_platform_selects_the_backend(name, selected):
    path = current_platform.get_attn_backend_cls(selected, selector_config(name), 32)
    assert path == BACKEND_PATH


def load_selector(platform: str, **names: object) -> Callable[..., Any]:
    """``get_attn_backend_cls`` of a platform whose module cannot be imported.

    Its only globals are ``names`` and those that the turbo branch needs.
    """
    path = Path(inspect.getfile(vllm.platforms)).with_name(f"{platform}.py")
    names["is_turbo_cache_dtype"] = is_turbo_cache_dtype
    return function_of(path, "get_attn_backend_cls", **names)


class Listed(Exception):
    """A platform was asked for its list of backends."""


class Device(Platform):
    """A GPU of compute capability 9.0, whose list of backends raises ``Listed``."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_valid_backends(cls, *, attn_selector_config, **arguments: Any) -> None:
        raise Listed(attn_selector_config)


capabilities = pytest.mark.parametrize(
    "capability",
    [DeviceCapability(8, 0), DeviceCapability(9, 0), DeviceCapability(10, 0)],
)


def choose_on_cuda(capability: DeviceCapability, config: AttentionSelectorConfig):
    """Valid backends, reasons against the others, and the chosen backend's path."""
    device = cuda_platform(capability)
    valid, invalid = device.get_valid_backends(capability, config, 32)
    names = [candidate.backend.name for candidate in valid]
    reasons = {backend.name: why for backend, (_, why) in invalid.items()}
    return names, reasons, device.get_attn_backend_cls(None, config, 32)


@all_presets
@capabilities
def test_cuda_lists_have_turbo(name, capability):
    names, _, path = choose_on_cuda(capability, selector_config(name))
    assert names == ["TURBO"] and path == BACKEND_PATH


@pytest.mark.parametrize("name", ["auto", "fp8", "turboquant_4bit_nc"])
@capabilities
def test_cuda_lists_are_as_before(name, capability, monkeypatch):
    def list_others(**arguments):
        return [backend for backend in listed(**arguments) if backend.name != "TURBO"]

    config = selector_config(name)
    names, reasons, path = choose_on_cuda(capability, config)
    assert names and reasons.pop("TURBO") == ["kv_cache_dtype not supported"]
    listed = cuda_module()._get_backend_priorities
    monkeypatch.setattr(cuda_module(), "_get_backend_priorities", list_others)
    assert choose_on_cuda(capability, config) == (names, reasons, path)


@all_presets
@pytest.mark.parametrize("platform", ["rocm", "xpu", "cpu"])
def test_other_platforms_ask_first(name, platform, monkeypatch):
    calls = []

    def record(*args):
        calls.append(args)
        return "path"

    monkeypatch.setattr(turbo_attn, "get_turbo_backend_path", record)
    named, config = AttentionBackendEnum.FLASH_ATTN, selector_config(name)
    assert load_selector(platform)(Device, named, config, 32) == "path"
    capability = None if platform == "cpu" else Device.get_device_capability()
    assert calls == [(named, config, capability)]


@pytest.mark.parametrize(
    "platform, name, expected",
    [
        ("rocm", "fp8", None),
        ("rocm", "turboquant_4bit_nc", None),
        ("xpu", "auto", AttentionBackendEnum.TRITON_ATTN),
        ("xpu", "turboquant_4bit_nc", AttentionBackendEnum.TURBOQUANT),
        ("cpu", "auto", AttentionBackendEnum.CPU_ATTN),
    ],
)
def test_other_dtypes_go_on_as_before(platform, name, expected, monkeypatch):
    """Other dtypes get the expected backend, or (None) reach the list of all."""

    def refuse(*args):
        raise AssertionError("turbo was asked")

    monkeypatch.setattr(turbo_attn, "get_turbo_backend_path", refuse)
    config = selector_config(name)
    select = load_selector(
        platform,
        AttentionBackendEnum=AttentionBackendEnum,
        logger=init_logger(__name__),
    )
    if expected is None:
        with pytest.raises(Listed) as raised:
            select(Device, None, config, 32)
        assert raised.value.args == (config,)
    else:
        selected = AttentionBackendEnum.TRITON_ATTN
        assert select(Device, selected, config, 32) == expected.get_path()


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
        assert select_on_cuda(name=name, head_size=512) == BACKEND_PATH
    elif not is_fa_version_supported(4):
        assert forced is AttentionBackendEnum.TRITON_ATTN
