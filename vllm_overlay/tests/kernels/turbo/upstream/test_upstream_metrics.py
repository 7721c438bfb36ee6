# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Bytes of a packed KV cache in ``--enable-mfu-metrics``."""

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.metrics import perf
from vllm.v1.metrics.perf import (
    AttentionMetrics,
    ExecutionContext,
    InvalidComponent,
    MLAAttentionMetrics,
)

from ..backend_utils import HEAD_SIZE, NUM_KV_HEADS, make_vllm_config
from ..mla.mla_utils import NOPE, NUM_HEADS, make_mla_config

# By dtype: the backend that vLLM selects for it, and its bytes a token and head. None
# stands for the backend that the platform selects.
PACKED: dict[str, tuple[AttentionBackendEnum | None, int]] = {
    # Codes and scales, for K and for V.
    "int4_per_token_head": (AttentionBackendEnum.TRITON_ATTN, 2 * (32 + 4)),
    "int8_per_token_head": (AttentionBackendEnum.TRITON_ATTN, 2 * (64 + 4)),
    # A norm for K; a scale and a zero for V.
    "turboquant_4bit_nc": (AttentionBackendEnum.TURBOQUANT, 32 + 2 + 32 + 4),
    "nvfp4": (AttentionBackendEnum.FLASHINFER, 2 * (32 + 4)),
    **{
        name: (None, TurboFormat.from_cache_dtype(name, HEAD_SIZE).slot_size)
        for name in TURBO_PRESETS
    },
}
PLAIN = {"auto": 2, "fp8": 1}


def cache_bytes(
    config: VllmConfig,
    kind: type[AttentionMetrics] = AttentionMetrics,
    query_size: int = 4 * HEAD_SIZE,
) -> tuple[int, int]:
    """Bytes of the cache that a token reads if it attends to 1000, and writes."""
    metrics = kind.from_vllm_config(config)
    context = ExecutionContext()
    context.add(1, 1000, is_prefill=False)
    read = metrics.get_read_bytes_breakdown(context)["attn_input"]
    queries = query_size * metrics.activation_byte_size
    return read - queries, metrics.get_write_bytes_breakdown(context)["kv_cache"]


@pytest.mark.parametrize("name", PACKED)
def test_bytes_of_packed_caches(folder, monkeypatch, name):
    backend, slot_size = PACKED[name]
    if backend is AttentionBackendEnum.FLASHINFER:
        pytest.importorskip("flashinfer", reason="its backend needs it")
    if backend is not None:
        # A platform without a GPU selects none of these.
        packs = backend.get_class()
        monkeypatch.setattr(perf, "get_attn_backend", lambda *args, **options: packs)
    read, written = cache_bytes(make_vllm_config(folder, name))
    token = NUM_KV_HEADS * slot_size
    assert (read, written) == (1000 * token, token)


@pytest.mark.parametrize("name", PLAIN)
def test_bytes_of_plain_caches(folder, name):
    token = NUM_KV_HEADS * 2 * HEAD_SIZE * PLAIN[name]
    assert cache_bytes(make_vllm_config(folder, name)) == (1000 * token, token)


@pytest.mark.parametrize(
    "name, token",
    [("auto", 1152), ("fp8", 576), ("turbo4", 340), ("turbo3", 276)],
)
def test_bytes_of_latents(folder, name, token):
    config = make_mla_config(folder, name, torch.bfloat16)
    query_size = NUM_HEADS * (NOPE + 64)
    found = cache_bytes(config, MLAAttentionMetrics, query_size)
    assert found == (1000 * token, token)


def test_no_backend(folder, monkeypatch):
    """Without a backend, metrics leave attention out, and the engine goes on."""

    def refuse(*args: object, **options: object) -> None:
        raise ValueError("none")

    monkeypatch.setattr(perf, "get_attn_backend", refuse)
    with pytest.raises(InvalidComponent, match="No attention backend: none"):
        AttentionMetrics.from_vllm_config(make_vllm_config(folder))
