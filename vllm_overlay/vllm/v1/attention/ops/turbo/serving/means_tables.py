# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Gives layers the tables that follow from a pass of text.

They are the offsets of K or the means of latents, and the directions of queries.
"""

import torch
from torch import nn

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_tp_group, model_parallel_is_initialized
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.keys import directions
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.keys.bias import turbo_layers
from vllm.v1.attention.ops.turbo.keys.means import LayerMeans, Means

# Reasons why a layer goes without means, though others may have them.
UNKNOWN_ROPE = "a rotation of K that is not known"
NOT_RUN = "no keys or latents in a pass of text"
LAYER_REASONS = (refusals.SOFT_CAP, refusals.STATES, UNKNOWN_ROPE, NOT_RUN)


def set_tables(
    model: nn.Module, means: Means, max_model_len: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Give layers of a turbo dtype the offsets and directions that follow from means.

    Args:
        model: A model with loaded weights.
        means: The means of all ranks' heads.
        max_model_len: The most positions of a sequence.

    Returns:
        The share of K's length that the mean takes, by layer; and by other layer the
        reason why it has no means. Layers that read another's cache are in neither.

    """
    layers = {
        layer.layer_name: (layer, parent) for layer, parent in turbo_layers(model)
    }
    readers = {
        layer.kv_sharing_target_layer_name
        for layer, _ in layers.values()
        if layer.impl.runner.scoring.soft_cap is not None
    }
    # The rotations of rows of an offset's table, and of a direction's.
    rotaries: dict[nn.Module | None, tuple[key_offset.Rotary | None, ...]] = {
        None: (None, None)
    }
    in_rows = directions.direction_segments(max_model_len)
    used: dict[str, float] = {}
    without: dict[str, str] = {}
    for name, (layer, parent) in layers.items():
        runner = layer.impl.runner
        if layer.kv_sharing_target_layer_name is not None:
            continue
        problem = refusals.SOFT_CAP if name in readers else runner.means_problem
        if problem is not None:
            without[name] = problem
            continue
        own = _own_heads(means.get(name), layer, parent)
        if own is None or not own.is_usable:
            without[name] = NOT_RUN
            continue
        try:
            rotary = key_offset.find_rotary(parent, model)
            if rotary is not None and rotary not in rotaries:
                rotaries[rotary] = (
                    key_offset.mean_rotary(rotary),
                    key_offset.mean_rotary(rotary, in_rows),
                )
        except key_offset.UnknownRotation:
            without[name] = UNKNOWN_ROPE
            continue
        of_offset, of_direction = rotaries[rotary]
        table = own.table(of_offset)
        runner.set_key_offset(_buffer(layer, key_offset.BUFFER, table))
        runner.key_offset_replicas = kv_head_replicas(layer, parent)
        across = directions.direction_table(own.direction, of_direction)
        runner.query_direction = _buffer(layer, directions.BUFFER, across)
        if runner.key_bias is not None:
            runner.key_bias.set_means(table)
        used[name] = own.share
    for latent in latent_layers(model):
        own = means.get(latent.layer_name)
        if (
            own is None
            or own.rest.shape != (1, latent.kv_lora_rank)
            or not own.is_usable
        ):
            without[latent.layer_name] = NOT_RUN
            continue
        device = next(latent.kv_b_proj.parameters()).device
        latent.impl.runner.set_latent_mean(latent, own.rest[0], device)
        used[latent.layer_name] = own.share
    return used, without


def latent_layers(model: nn.Module) -> list[MLAAttention]:
    """A model's layers of latents of a turbo dtype."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, MLAAttention)
        and is_turbo_cache_dtype(layer.kv_cache_dtype)
    ]


def kv_head_replicas(layer: Attention | MLAAttention, parent: nn.Module) -> int:
    """Consecutive tensor parallel ranks that have the same KV heads of a layer."""
    if isinstance(layer, MLAAttention):
        return get_tp_group().world_size
    for module in parent.children():
        linear = getattr(module, "base_layer", module)  # below a LoRA
        if isinstance(linear, QKVParallelLinear) and (
            linear.num_kv_heads == layer.num_kv_heads
        ):
            return linear.num_kv_head_replicas
    return 1


def _own_heads(
    means: LayerMeans | None, layer: Attention, parent: nn.Module
) -> LayerMeans | None:
    """The means of this rank's heads; None if they are not those of the layer."""
    if means is None:
        return None
    part, num_parts = 0, 1
    if model_parallel_is_initialized():
        replicas = kv_head_replicas(layer, parent)
        part = get_tp_group().rank_in_group // replicas
        num_parts = get_tp_group().world_size // replicas
    num_heads = layer.num_kv_heads
    if means.rest.shape != (num_parts * num_heads, layer.head_size):
        return None
    return means.heads(slice(part * num_heads, (part + 1) * num_heads))


def _buffer(layer: Attention, name: str, table: torch.Tensor) -> torch.Tensor:
    """Make a table a buffer of a layer, before its kernels and graphs are made."""
    device = next(layer.parameters(), layer._k_scale).device
    if hasattr(layer, name):
        delattr(layer, name)
    layer.register_buffer(name, table.to(device), persistent=False)
    return getattr(layer, name)


def share_tables(vllm_config: VllmConfig) -> None:
    """Let layers, also of drafters, have the offset of the cache that they read."""
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    for layer in layers.values():
        target = layers.get(layer.kv_sharing_target_layer_name or "")
        if target is not None and is_turbo_cache_dtype(layer.kv_cache_dtype):
            table = target.impl.runner.scoring.key_offset
            layer.impl.runner.set_key_offset(table)
