# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Flint's attention, which writes the cache before the backend sees K and V. Under a
turbo dtype the backend stores instead, and attends to the stored tokens.
"""

import pytest
import torch

from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.models.flint.configs import FlintConfig
from vllm.models.flint.model import FlintAttention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.interface import StoreCall

from ..backend_utils import HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, kernel_paths, set_path
from ..batch_utils import PADDING, Batch
from ..utils import BF16, DEVICE, ON_GPU, gaussian

HIDDEN = NUM_HEADS * HEAD_SIZE
EPSILON = 1e-6
# A decode with more context than the window, one with less, a prefix hit, and a first
# chunk.
REQUESTS = [(1, 40), (1, 9), (20, 33), (5, 0)]
SINKS = [float("-inf"), -20.0, 2.0, 4.0]


def make_attention(config: VllmConfig, layer_idx: int) -> FlintAttention:
    """An attention module with weights, whose output projection is the identity.

    The first layer has a sliding window, and the second no RoPE.
    """
    config.compilation_config.static_forward_context.clear()
    model = FlintConfig(
        hidden_size=HIDDEN,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        no_rope_layer_indices=[1],
        sliding_window=17,
        max_position_embeddings=2048,
    )
    with set_default_torch_dtype(BF16), DEVICE:
        module = FlintAttention(
            model, layer_idx, config.cache_config, None, f"layers.{layer_idx}"
        )
    weight = module.qkv_proj.weight
    weight.data.copy_(gaussian(*weight.shape, dtype=BF16, seed=1) / HIDDEN**0.5)
    module.o_proj.weight.data.copy_(torch.eye(HIDDEN))
    for seed, norm in enumerate((module.q_norm, module.k_norm), 2):
        norm.weight.data.copy_(1 + gaussian(HEAD_SIZE, seed=seed) / 4)
    module.softmax_offset.data.copy_(torch.tensor(SINKS))
    for projection in (module.qkv_proj, module.o_proj):
        projection.quant_method.process_weights_after_loading(projection)
    return module


def normalise_and_rotate(
    x: torch.Tensor, norm: torch.Tensor, positions: torch.Tensor, rotary
) -> torch.Tensor:
    """RMSNorm and RoPE of heads, (T, H, D), rounded as Flint's kernel does."""
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
    x = (x * scale * norm.float()).to(BF16).float()
    if rotary is not None:
        cos, sin = rotary.cos_sin_cache[positions].float()[:, None].chunk(2, -1)
        first, second = x.chunk(2, -1)
        x = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return x.to(BF16)


@kernel_paths
@pytest.mark.parametrize("layer_idx", [0, 1], ids=["window", "no rope"])
def test_pages_and_outputs(rank_config, layer_idx, path):
    module = make_attention(rank_config, layer_idx)
    layer, impl = module.attn, module.attn.impl
    set_path(impl, path)
    batch = Batch.make(impl, REQUESTS)
    layer.kv_cache = batch.cache
    metadata = batch.build(rank_config, impl)
    num_tokens = sum(length for length, _ in REQUESTS)
    hidden = gaussian(num_tokens + PADDING, HIDDEN, dtype=BF16, seed=7)
    runs = [torch.arange(n) + context for n, context in REQUESTS]
    positions = torch.cat([*runs, torch.zeros(PADDING).long()]).to(DEVICE)

    qkv, _ = module.qkv_proj(hidden)
    sizes = [module.q_size, module.kv_size, module.kv_size]
    q, k, v = (x.unflatten(-1, (-1, HEAD_SIZE)) for x in qkv.split(sizes, -1))
    batch.query, batch.key = (
        normalise_and_rotate(x, norm.weight, positions, module.rotary_emb)
        for x, norm in ((q, module.q_norm), (k, module.k_norm))
    )
    batch.value = v
    expected = batch.cache.clone()
    slots = batch.common.slot_mapping
    reference.store(StoreCall(expected, slots, batch.key, v, impl.runner.layout))

    name = layer.layer_name
    with set_forward_context(
        {name: metadata}, rank_config, slot_mapping={name: batch.common.slot_mapping}
    ):
        output = module(positions, hidden)[:num_tokens]
    # On a GPU a coordinate of K may be rounded differently: its norm is approximate.
    different = (batch.cache != expected).sum()
    assert different <= (num_tokens if ON_GPU else 0)
    batch.check(impl, output.view(num_tokens, NUM_HEADS, HEAD_SIZE))


def test_profile_run(rank_config):
    """Without a cache, nothing is stored and the output is zero."""
    module = make_attention(rank_config, 0)
    set_path(module.attn.impl, "torch")
    hidden = gaussian(4, HIDDEN, dtype=BF16, seed=7)
    with set_forward_context(None, rank_config):
        output = module(torch.arange(4, device=DEVICE), hidden)
    assert (output == 0).all()
