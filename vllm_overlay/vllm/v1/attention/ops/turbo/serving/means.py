# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Takes the means of K off in an engine whose weights are loaded: see ``keys.means``.

All ranks of a model decide together, and all have the means of the first rank. So the
bytes of pages do not depend on the division among ranks.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import (
    get_pp_group,
    get_tp_group,
    get_world_group,
    model_parallel_is_initialized,
)
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.keys import means as key_means
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.keys.bias import layer_number, turbo_layers
from vllm.v1.attention.ops.turbo.keys.means import LayerMeans, Means, PassRunner
from vllm.v1.attention.ops.turbo.keys.text import TEXT
from vllm.v1.attention.ops.turbo.serving.means_file import (
    checksum,
    means_path,
    read_means,
    weight_files,
    write_means,
)

logger = init_logger(__name__)

# Reasons why a model, or a layer, goes without means.
OTHER_CACHES = "some layers of the model have caches or states of other kinds"
NO_TOKENIZER = "no tokenizer can be loaded"
PASS_FAILS = "a pass of text fails"
SHORT_TEXT = f"the text has fewer than {key_means.MIN_TOKENS} tokens"
SOFT_CAP = "a soft cap"
UNKNOWN_ROPE = "a rotation of K that is not known"
NOT_RUN = "no keys in a pass of text"
STATES = "several stored tokens for each token of a request"
LAYER_REASONS = (SOFT_CAP, STATES, UNKNOWN_ROPE, NOT_RUN)


class Start(NamedTuple):
    """The first rank's part of the decision.

    Attributes:
        means: The means of all layers and heads, from a file; None for none.
        path: The file for the means; None if the checkpoint's files are not known.
        key: The checkpoint's checksum, likewise.
        text: The tokens to measure with; none if there are means.
        problem: The reason why there can be no means; None for none.

    """

    means: Means | None = None
    path: Path | None = None
    key: str = ""
    text: list[int] = []
    problem: str | None = None


def _world() -> GroupCoordinator | None:
    """The group of all ranks of a model; None if there is one rank."""
    if not model_parallel_is_initialized() or get_world_group().world_size == 1:
        return None
    return get_world_group()


def _from_first_rank(value: Any) -> Any:
    world = _world()
    return value if world is None else world.broadcast_object(value)


def _gathered(value: Any, group: GroupCoordinator | None) -> list[Any]:
    if group is None or group.world_size == 1:
        return [value]
    found = [value] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def _agreed(problem: str | None) -> str | None:
    """The problem of the first rank that has one."""
    return next((x for x in _gathered(problem, _world()) if x is not None), None)


def _is_first_rank() -> bool:
    world = _world()
    return world is None or world.rank_in_group == 0


def model_problem(model: nn.Module) -> str | None:
    """The reason why a model's layers rule a pass out; None for none."""
    others = (
        isinstance(module, AttentionLayerBase) and not isinstance(module, Attention)
        for module in model.modules()
    )
    return OTHER_CACHES if any(others) else None


def text_tokens(vllm_config: VllmConfig) -> list[int]:
    """The first tokens of the text, as the model's tokenizer has them.

    Raises:
        ValueError: If there is no tokenizer. Loading one may raise other errors.

    """
    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    if tokenizer is None:
        raise ValueError("--skip-tokenizer-init")
    model_config = vllm_config.model_config
    hf_config = model_config.hf_text_config
    positions = getattr(hf_config, "max_position_embeddings", None)
    most = min(key_means.MAX_TOKENS, positions or model_config.max_model_len)
    return list(tokenizer.encode(TEXT))[:most]


def _start(vllm_config: VllmConfig) -> Start:
    """Look for means in a file, or else for a text to measure with."""
    path, key = None, ""
    try:
        files = weight_files(vllm_config)
        if files:
            key = checksum(files)
            path = means_path(key)
            found = read_means(path, key)
            if found is not None:
                return Start(found, path, key)
    except OSError as error:
        logger.warning("Turbo KV cache: the weights cannot be read again: %s.", error)
    try:
        text = text_tokens(vllm_config)
    except Exception as error:  # tokenizers raise errors of many classes
        return Start(problem=f"{NO_TOKENIZER}: {error}")
    if len(text) < key_means.MIN_TOKENS:
        return Start(problem=SHORT_TEXT)
    return Start(None, path, key, text)


def _measured(
    runner: PassRunner, vllm_config: VllmConfig, text: list[int]
) -> tuple[Means, str | None]:
    """The means of all layers and heads by a pass, and the reason if there are none."""
    first = key_means.first_tokens(vllm_config.model_config.get_vocab_size())
    own: Means = {}
    problem = None
    try:
        own = key_means.run_pass(runner, vllm_config, text, first)
    except Exception as error:  # a model may need arguments that are not known here
        problem = f"{PASS_FAILS}: {type(error).__name__}: {error}"
    if runner.device.type != "cpu":
        torch.accelerator.empty_cache()
    problem = _agreed(problem)
    if problem is not None:
        return {}, problem
    if not model_parallel_is_initialized():
        return own, None
    tp_group, model = get_tp_group(), runner.get_model()
    layers = key_means.attention_layers(model)
    heads = {
        name: means
        for name, means in own.items()
        if tp_group.rank_in_group % kv_head_replicas(*layers[name]) == 0
    }
    stage: dict[str, list[LayerMeans]] = {}
    for each in _gathered(heads, tp_group):
        for name, means in each.items():
            stage.setdefault(name, []).append(means)
    whole = {
        name: LayerMeans(*map(torch.cat, zip(*parts))) for name, parts in stage.items()
    }
    merged: Means = {}
    for each in _gathered(whole, get_pp_group()):
        merged |= each
    return merged, None


def kv_head_replicas(layer: Attention, parent: nn.Module) -> int:
    """Consecutive tensor parallel ranks that have the same KV heads of a layer."""
    for module in parent.children():
        linear = getattr(module, "base_layer", module)  # below a LoRA
        if isinstance(linear, QKVParallelLinear) and (
            linear.num_kv_heads == layer.num_kv_heads
        ):
            return linear.num_kv_head_replicas
    return 1


def set_key_means(runner: PassRunner, vllm_config: VllmConfig) -> None:
    """Take the means of K off in all layers that can have them, and log how many.

    All ranks call this when weights are loaded, and before format ids are told. The
    means are read from a file, or else measured and written to it. A layer with an
    offset of its bias of K gets the means instead, which include the bias.

    Args:
        runner: The engine's model runner.
        vllm_config: The engine's configuration.

    """
    cache_dtype = vllm_config.cache_config.cache_dtype
    if not is_turbo_cache_dtype(cache_dtype):
        return
    if vllm_config.attention_config.turbo_means == "off":
        return
    began_s = time.monotonic()
    model = runner.get_model()
    problem = refusals.means_problem(vllm_config) or _agreed(model_problem(model))
    start = Start()
    if problem is None:
        start = _from_first_rank(_start(vllm_config) if _is_first_rank() else None)
        problem = start.problem
    means = start.means
    if problem is None and means is None:
        means, problem = _measured(runner, vllm_config, start.text)
        if start.path is not None and problem is None and _is_first_rank():
            means = write_means(start.path, start.key, means)
        means = _from_first_rank(means)
    if problem is not None or means is None:
        if _is_first_rank():
            logger.info_once(
                "KV cache %s: the means of K stay in, because %s.", cache_dtype, problem
            )
        return
    used, without = set_tables(model, means)
    _share_tables(vllm_config)
    _report(vllm_config, used, without, start, time.monotonic() - began_s)


def set_tables(
    model: nn.Module, means: Means
) -> tuple[dict[str, float], dict[str, str]]:
    """Give layers of a turbo dtype the offsets that follow from means.

    Args:
        model: A model with loaded weights.
        means: The means of all ranks' heads.

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
    rotaries: dict[nn.Module | None, key_offset.Rotary | None] = {None: None}
    used: dict[str, float] = {}
    without: dict[str, str] = {}
    for name, (layer, parent) in layers.items():
        runner = layer.impl.runner
        if layer.kv_sharing_target_layer_name is not None:
            continue
        if runner.scoring.soft_cap is not None or name in readers:
            without[name] = SOFT_CAP
            continue
        if runner.states_per_token > 1:
            without[name] = STATES
            continue
        own = _own_heads(means.get(name), layer, parent)
        if own is None or not own.is_usable:
            without[name] = NOT_RUN
            continue
        try:
            rotary = key_offset.find_rotary(parent, model)
            if rotary is not None and rotary not in rotaries:
                rotaries[rotary] = key_offset.mean_rotary(rotary)
        except key_offset.UnknownRotation:
            without[name] = UNKNOWN_ROPE
            continue
        table = own.table(rotaries[rotary])
        _set_table(layer, table)
        runner.key_offset_replicas = kv_head_replicas(layer, parent)
        if runner.key_bias is not None:
            runner.key_bias.set_means(table)
        used[name] = own.share
    return used, without


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


def _set_table(layer: Attention, table: torch.Tensor) -> None:
    """Let a layer take a table off K, before its kernels and graphs are made."""
    device = next(layer.parameters(), layer._k_scale).device
    if hasattr(layer, key_offset.BUFFER):
        delattr(layer, key_offset.BUFFER)
    layer.register_buffer(key_offset.BUFFER, table.to(device), persistent=False)
    layer.impl.runner.set_key_offset(getattr(layer, key_offset.BUFFER))


def _share_tables(vllm_config: VllmConfig) -> None:
    """Let layers, also of drafters, have the offset of the cache that they read."""
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    for layer in layers.values():
        target = layers.get(layer.kv_sharing_target_layer_name or "")
        if target is not None and is_turbo_cache_dtype(layer.kv_cache_dtype):
            table = target.impl.runner.scoring.key_offset
            layer.impl.runner.set_key_offset(table)


def _report(
    vllm_config: VllmConfig,
    used: dict[str, float],
    without: dict[str, str],
    start: Start,
    seconds: float,
) -> None:
    """Log how many layers have means, how long these are, and their file."""
    if model_parallel_is_initialized() and not get_tp_group().is_first_rank:
        return
    line = (
        f"the means of K are taken off in {len(used)} of {len(used | without)} layers"
    )
    if used:
        shares = sorted(100 * share for share in used.values())
        line += f", and are {shares[0]:.0f} to {shares[-1]:.0f} % as long as K"
    source = "read from" if start.means is not None else "measured, and kept in"
    kept = f"{source} {start.path}" if start.path else "measured, and kept in no file"
    words = [f"{line}; {kept} ({seconds:.1f} s)", *_grouped(without)]
    cache_dtype = vllm_config.cache_config.cache_dtype
    logger.info_once("KV cache %s: %s.", cache_dtype, ". ".join(words), scope="process")
    if used and vllm_config.kv_transfer_config is not None:
        logger.info_once(
            "Engines that exchange pages need the same means of K: copy the file to "
            "VLLM_CACHE_ROOT of the others, or start all with "
            "--attention-config.turbo_means off.",
            scope="process",
        )


def _grouped(without: dict[str, str]) -> Iterator[str]:
    """Words for layers without means, by their reason."""
    for reason in dict.fromkeys(without.values()):
        names = [layer_number(name) for name in without if without[name] == reason]
        yield f"Layers {', '.join(names)} have none, because of {reason}"
