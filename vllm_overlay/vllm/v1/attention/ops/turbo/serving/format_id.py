# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The identity of turbo pages: all that determines their bytes, besides their dtype.

It is the layout's version. If a model has an offset of K, a mean of latents, or layers
in several dtypes, it also has a digest of these. The digest is of the whole model,
whatever ranks its layers and heads are divided among. Engines with the same identity
may exchange pages, and find each other's pages where they are kept.
"""

import hashlib
import json
from dataclasses import replace

import torch

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import (
    get_pp_group,
    get_tp_group,
    model_parallel_is_initialized,
)
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.attention.ops.turbo.format import LAYOUT_VERSION, is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.kv_cache_interface import KVCacheSpec

# The dtype of each layer, and the digests of its KV heads' offsets or of its latents'
# mean, if it has any.
LayerFormats = dict[str, tuple[str, list[str]]]


def _own_formats(
    vllm_config: VllmConfig, names: set[str], tp_rank: int
) -> LayerFormats:
    """The formats of this rank's layers; only a KV head's first rank has its digest."""
    formats: LayerFormats = {}
    latents = get_layers_from_vllm_config(vllm_config, MLAAttention)
    for name in sorted(names & latents.keys()):
        means: list[str] = []
        if is_turbo_cache_dtype(latents[name].kv_cache_dtype):
            mean = latents[name].impl.runner.mean
            # All ranks have the same latents, so the first one counts.
            if mean is not None and tp_rank == 0:
                means = [key_offset.digest([mean.latent])]
        formats[name] = latents[name].kv_cache_dtype, means
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    for name in sorted(names & layers.keys()):
        heads: list[str] = []
        if is_turbo_cache_dtype(layers[name].kv_cache_dtype):
            runner = layers[name].impl.runner
            table = runner.scoring.key_offset
            if table is not None and tp_rank % runner.key_offset_replicas == 0:
                heads = [key_offset.digest([head]) for head in table.cpu().unbind(1)]
        formats[name] = layers[name].kv_cache_dtype, heads
    return formats


def _gather(own: LayerFormats, group: GroupCoordinator) -> list[LayerFormats]:
    if group.world_size == 1:
        return [own]
    all_ranks = [own] * group.world_size
    torch.distributed.all_gather_object(all_ranks, own, group=group.cpu_group)
    return all_ranks


def model_formats(vllm_config: VllmConfig, names: set[str]) -> LayerFormats:
    """The formats of all ranks' layers, if each calls this with its own names."""
    if not model_parallel_is_initialized():
        return _own_formats(vllm_config, names, 0)
    tp_group = get_tp_group()
    own = _own_formats(vllm_config, names, tp_group.rank_in_group)
    stage: LayerFormats = {}
    for formats in _gather(own, tp_group):
        for name, (dtype, heads) in formats.items():
            stage.setdefault(name, (dtype, []))[1].extend(heads)
    model: LayerFormats = {}
    for formats in _gather(stage, get_pp_group()):
        model |= formats
    return model


def format_id(formats: LayerFormats) -> str:
    """The identity of a model's pages, as one word."""
    is_plain = len({dtype for dtype, _ in formats.values()}) == 1
    if is_plain and not any(heads for _, heads in formats.values()):
        return str(LAYOUT_VERSION)
    text = json.dumps([LAYOUT_VERSION, sorted(formats.items())])
    return f"{LAYOUT_VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def with_format_ids(
    specs: dict[str, KVCacheSpec], vllm_config: VllmConfig
) -> dict[str, KVCacheSpec]:
    """Set the identity of turbo pages in the cache specs of an engine.

    All ranks call this when their weights are loaded. The spec of one layer may stand
    for others, also for layers without turbo pages. So all specs get the identity,
    except those that have one.

    Args:
        specs: Cache specs of the layers of this rank, by name.
        vllm_config: The engine's configuration.

    """
    word = format_id(model_formats(vllm_config, set(specs)))
    return {
        name: spec if spec.format_id else replace(spec, format_id=word)
        for name, spec in specs.items()
    }
