# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Defects of vLLM's ``turboquant_*`` dtypes in how it configures and sizes a run.

As in ``test_upstream_defects.py``, what the series mends passes with both dtypes, and
what it leaves fails strictly with vLLM's.
"""

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability, Platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends import turboquant_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
)
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from .backend_utils import make_vllm_config
from .scene import BACKENDS, both, unmended
from .utils import BF16

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 10, 4, 2, 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def engine_config(folder: Path, name: str, **arguments) -> VllmConfig:
    """The configuration of a Llama of some layers, as an engine's user makes it."""
    make_vllm_config(folder)
    description = json.loads((folder / "config.json").read_text())
    description["num_hidden_layers"] = NUM_LAYERS
    (folder / "config.json").write_text(json.dumps(description))
    return EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=name,
        **arguments,
    ).create_engine_config()


def make_layers(config: VllmConfig, full: set[int]) -> None:
    """Attention layers, with a sliding window but for ``full``; those that are skipped
    at the model's dtype by FlashAttention, the others packed.
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
    """What vLLM's planner takes for a token and KV head of each packed layer, and what
    the layer's backend fills.
    """
    # As on a GPU; the CPU platform does not align.
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
    """Sliding-window layers stay at the model's dtype, and full ones are packed. These
    once cost half of bf16, whatever their dtype.
    """
    check_packed_pages(folder, name, full={3, 7})


@unmended(AssertionError, "https://github.com/vllm-project/vllm/pull/54599")
def test_packed_pages_beside_a_full_boundary_layer(folder, name):
    """The same where the last layer has no window, which is a layer that vLLM keeps at
    the model's dtype: pages of three kinds.
    """
    check_packed_pages(folder, name, full={3, NUM_LAYERS - 1})


@unmended(AssertionError)
def test_all_layers_are_packed(folder, name):
    """A user who asks for a cache dtype may name layers to skip, and gets no others."""
    config = engine_config(folder, name)
    assert config.cache_config.kv_cache_dtype_skip_layers == []


@unmended(AssertionError, "https://github.com/vllm-project/vllm/pull/47531")
def test_flash_attention_version_is_not_forced(folder, name):
    config = engine_config(folder, name)
    assert config.attention_config.flash_attn_version is None


def flashinfer_layouts(capability: DeviceCapability) -> tuple[KVCacheLayout, ...]:
    """What FlashInfer's backend declares on a GPU. Neither need be here."""
    path = Path(turboquant_attn.__file__).with_name("flashinfer.py")
    (function,) = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name == "supported_kv_cache_layouts"
    )
    function.decorator_list, function.returns = [], None
    platform = SimpleNamespace(get_device_capability=lambda: capability)
    scope: dict[str, Any] = {
        "current_platform": platform,
        "KVCacheLayout": KVCacheLayout,
    }
    exec(compile(ast.Module([function], []), path, "exec"), scope)
    return scope["supported_kv_cache_layouts"](None)


@unmended(ValueError)
def test_layout_in_common_with_skipped_layers_on_sm100(name):
    """FlashInfer, the first choice there for layers at the model's dtype, reads pages
    of whole heads only, and one layout serves all layers of a run.
    """
    layouts = flashinfer_layouts(DeviceCapability(10, 0))
    flashinfer = SimpleNamespace(supported_kv_cache_layouts=lambda: layouts)
    backends: list[Any] = [flashinfer, BACKENDS[name]]
    assert get_supported_kv_cache_layouts(backends)
