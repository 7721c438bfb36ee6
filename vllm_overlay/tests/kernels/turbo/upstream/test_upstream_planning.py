# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Defects of vLLM's ``turboquant_*`` dtypes in how it configures and sizes a run.

As in ``test_upstream_defects.py``, a defect that the series mends passes with both
dtypes, and a defect that it leaves fails strictly with vLLM's.
"""

from pathlib import Path

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability, Platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends import turboquant_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from ..backend_utils import make_engine_config, make_vllm_config
from ..utils import BF16, function_of
from .scene import BACKENDS, both, fails_upstream

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 10, 4, 2, 64


def engine_config(folder: Path, name: str, **arguments) -> VllmConfig:
    """The configuration of a Llama with some layers, as an engine's user makes it."""
    make_vllm_config(folder, num_hidden_layers=NUM_LAYERS)
    return make_engine_config(folder, name, **arguments)


def make_layers(config: VllmConfig, full: set[int]) -> None:
    """Make attention layers with a sliding window, except those in ``full``.

    Skipped layers have the model's dtype and FlashAttention. Others are packed.
    """
    cache_config = config.cache_config
    skipped = cache_config.kv_cache_dtype_skip_layers
    with set_current_vllm_config(config), set_default_torch_dtype(BF16):
        for index in range(NUM_LAYERS):
            window = None if index in full else 64
            is_skipped = str(index) in skipped or (
                window is not None and "sliding_window" in skipped
            )
            Attention(
                NUM_HEADS,
                HEAD_SIZE,
                HEAD_SIZE**-0.5,
                NUM_KV_HEADS,
                cache_config=cache_config,
                per_layer_sliding_window=window,
                prefix=f"layers.{index}.attn",
                attn_backend=(
                    FlashAttentionBackend
                    if is_skipped
                    else BACKENDS[cache_config.cache_dtype]
                ),
            )


def packed_token_bytes(config: VllmConfig, backends: list) -> list[tuple[float, int]]:
    """Bytes a token and KV head of each packed layer: those that vLLM's planner takes,
    and those that the layer's backend fills.
    """
    # As on a GPU: the CPU platform does not align blocks.
    config.cache_config.block_size = 16
    config.cache_config.user_specified_block_size = False
    Platform.update_block_size_for_backend(config)
    with set_current_vllm_config(config):
        specs = get_kv_cache_spec(config)
        layouts = get_supported_kv_cache_layouts(backends)
        names = [layout.name for layout in layouts]
        resolve_kv_cache_layout(config, [names], specs.values())
        groups = get_kv_cache_groups(config, dict(specs))
    taken = []
    for group in groups:
        for layer in group.layer_names:
            spec, own = group.kv_cache_spec, specs[layer]
            assert isinstance(spec, AttentionSpec) and isinstance(own, AttentionSpec)
            content = own.state_content_bytes
            if content is not None:
                num_tokens = spec.block_size * spec.num_kv_heads
                taken.append((spec.page_size_bytes / num_tokens, content))
    return taken


def check_packed_pages(folder: Path, name: str, full: set[int]) -> None:
    config = engine_config(folder, name, kv_cache_dtype_skip_layers=["sliding_window"])
    make_layers(config, full)
    taken = packed_token_bytes(config, [FlashAttentionBackend, BACKENDS[name]])
    assert taken
    for page_bytes, content in taken:
        assert page_bytes == content


@both
def test_packed_pages_beside_sliding_windows(folder, name):
    """Sliding-window layers stay at the model's dtype, and full layers are packed.

    Packed layers once took half the bytes of bf16, with any dtype.
    """
    check_packed_pages(folder, name, full={3, 7})


@fails_upstream(AssertionError, "https://github.com/vllm-project/vllm/pull/54599")
def test_packed_pages_beside_a_full_boundary_layer(folder, name):
    """The same, but the last layer has no window. vLLM keeps that layer at the model's
    dtype, so that there are pages of three kinds.
    """
    check_packed_pages(folder, name, full={3, NUM_LAYERS - 1})


@fails_upstream(AssertionError)
def test_all_layers_are_packed(folder, name):
    """No layers are skipped but those that a user names."""
    config = engine_config(folder, name)
    assert config.cache_config.kv_cache_dtype_skip_layers == []


@fails_upstream(AssertionError, "https://github.com/vllm-project/vllm/pull/47531")
def test_flash_attention_version_is_not_forced(folder, name):
    config = engine_config(folder, name)
    assert config.attention_config.flash_attn_version is None


class SM100(Platform):
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(10, 0)


class FlashInfer:
    """FlashInfer's backend on a GPU of compute capability 10.0, as far as planning
    asks, without FlashInfer and a GPU.
    """

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return function_of(
            Path(turboquant_attn.__file__).with_name("flashinfer.py"),
            "supported_kv_cache_layouts",
            current_platform=SM100,
            KVCacheLayout=KVCacheLayout,
        )(cls)


@fails_upstream(ValueError)
def test_layout_in_common_with_skipped_layers_on_sm100(name):
    """Packed layers and FlashInfer have a layout in common.

    On sm100 FlashInfer is the first choice for layers at the model's dtype, and reads
    only pages of whole heads. One layout serves all layers of a run.
    """
    assert get_supported_kv_cache_layouts([FlashInfer, BACKENDS[name]])
