# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek V3.2's layers with an implementation that stores latents by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.models.deepseek_v32.attention import DeepseekV32Attention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from ..mla.mla_utils import NUM_HEADS, make_mla_config
from ..utils import DEVICE, ON_GPU, gaussian, requires_triton

pytestmark = [
    requires_triton,
    pytest.mark.skipif(ON_GPU, reason="fp32 layers are for CPUs"),
]
RANK, ROPE, HIDDEN = 512, 64, 256


class OwnImpl(SparseMLACommonImpl[SparseMLACommonMetadata]):
    """An implementation that keeps what it is to store, and attends to nothing."""

    gathers_context = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stored: list[tuple[torch.Tensor, ...]] = []
        self.num_reserved = 0

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        self.stored.append((kv_c_normed, k_pe, kv_cache, slot_mapping))

    def forward_mqa(self, q: Any, *args: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(q[0]), None

    def reserve_workspace(self) -> None:
        self.num_reserved += 1


class OwnBackend(CPUMLABackend):
    @staticmethod
    def get_impl_cls() -> type[OwnImpl]:
        return OwnImpl


@pytest.fixture
def config(rank_config: VllmConfig, folder: Path) -> VllmConfig:
    return make_v32_config(folder, "auto")


def make_v32_config(folder: Path, cache_dtype: str, **changes: Any) -> VllmConfig:
    """The configuration of a DeepSeek V3.2 whose layers share other layers' lists."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    arguments: dict[str, Any] = {
        "q_lora_rank": 64,
        "rope_parameters": rope,
        "index_topk": 32,
        "index_topk_pattern": "SSSS",
    } | changes
    return make_mla_config(folder, cache_dtype, **arguments)


def make_v32_layer(config: VllmConfig, **changes: Any) -> DeepseekV32Attention:
    """A layer without an indexer, with weights and an empty buffer of lists."""
    text = config.model_config.hf_text_config
    num_tokens = config.scheduler_config.max_num_batched_tokens
    lists = torch.full((num_tokens, text.index_topk), -1, dtype=torch.int32)
    dtype = config.model_config.dtype
    context = config.compilation_config.static_forward_context
    name = f"layers.{len(context)}.self_attn"
    with set_current_vllm_config(config), set_default_torch_dtype(dtype), DEVICE:
        layer = DeepseekV32Attention(config, text, name, lists, **changes)
        for seed, (parameter_name, weight) in enumerate(layer.named_parameters()):
            values = gaussian(*weight.shape, dtype=torch.float32, seed=seed)
            is_norm = "norm" in parameter_name
            values = 1 + values / 8 if is_norm else values / weight.shape[-1] ** 0.5
            weight.data.copy_(values)
        for part in layer.children():
            if isinstance(part, LinearBase):
                part.quant_method.process_weights_after_loading(part)
        layer.process_weights_after_loading(dtype)
    return layer


def run_v32(
    config: VllmConfig,
    layer: DeepseekV32Attention,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    metadata: Any,
    slots: torch.Tensor,
) -> torch.Tensor:
    """The layer's output, (T, hidden size)."""
    name = layer.layer_name
    step = None if metadata is None else {name: metadata}
    with set_forward_context(step, config, slot_mapping={name: slots}):
        return layer(positions, hidden)


def latents_of(
    layer: DeepseekV32Attention, hidden: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents, (T, L), and rotary keys, (T, R), by vLLM's plain operators."""
    projected = layer.fused_qkv_a_proj(hidden)[0]
    _, kv_c, k_pe = projected.split([layer.q_lora_rank, RANK, ROPE], -1)
    kv_c = layer.kv_a_layernorm.forward_native(kv_c)
    keys = k_pe.unsqueeze(1)
    _, keys = layer.rotary_emb.forward_native(positions, keys.clone(), keys)
    return kv_c, keys.squeeze(1)


def make_metadata(num_tokens: int) -> SparseMLACommonMetadata:
    """The metadata of a request of ``num_tokens`` tokens."""
    return SparseMLACommonMetadata(
        num_reqs=1,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        num_actual_tokens=num_tokens,
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        req_id_per_token=torch.zeros(num_tokens, dtype=torch.int32),
    )


def test_the_implementation_stores(config):
    """The fused kernel writes no rows; the implementation gets what it computed."""
    layer = make_v32_layer(config, attn_backend=OwnBackend)
    # Rows of another size than the kernel writes.
    layer.kv_cache = torch.full((1, 32, 24), 7, dtype=torch.uint8)
    hidden, positions = gaussian(5, HIDDEN, seed=4), torch.arange(5) + 9
    slots = torch.tensor([4, -1, 0, 7, 2])
    run_v32(config, layer, hidden, positions, make_metadata(5), slots)
    ((kv_c, k_pe, kv_cache, own_slots),) = layer.impl.stored
    assert kv_cache is layer.kv_cache and (kv_cache == 7).all()
    assert torch.equal(own_slots, slots)
    for found, expected in zip((kv_c, k_pe), latents_of(layer, hidden, positions)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert layer.num_heads == NUM_HEADS


def test_workspace_is_reserved(config):
    """The profile run has no metadata."""
    layer = make_v32_layer(config, attn_backend=OwnBackend)
    hidden, positions = gaussian(5, HIDDEN, seed=4), torch.arange(5)
    output = run_v32(config, layer, hidden, positions, None, torch.arange(5))
    assert layer.impl.num_reserved == 1 and not layer.impl.stored
    assert output.shape == hidden.shape
