# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks an engine's settings when its layers are known, and warns of idle settings."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backends.cache_dtype import warn_of_options
from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

logger = init_logger(__name__)

SLIDING_WINDOW = "sliding_window"


def check_layers(
    layers: Mapping[str, "AttentionLayerBase"], vllm_config: VllmConfig
) -> None:
    """Check the layers that have turbo pages, and the settings that name layers.

    Settings without an effect are warned of.

    Args:
        layers: The layers that have a cache on this rank, by name, also those of a
            drafter.
        vllm_config: The engine's configuration.

    Raises:
        ValueError: If TURBO does not serve a layer that has a turbo dtype, or
            ``kv_cache_dtype_skip_layers`` names a layer that does not exist.

    """
    engine_dtype = vllm_config.cache_config.cache_dtype
    # A layer without its own dtype, such as one with a state, is checked by its spec.
    turbo = {
        name: layer
        for name, layer in layers.items()
        if is_turbo_cache_dtype(getattr(layer, "kv_cache_dtype", engine_dtype))
    }
    if turbo:
        from vllm.v1.attention.ops.turbo.serving.startup import check_layer

        for name, layer in turbo.items():
            check_layer(name, layer, vllm_config)
    with_dtype = {x: layers[x] for x in layers if hasattr(layers[x], "kv_cache_dtype")}
    num_packed = sum(name in turbo for name in with_dtype)
    if num_packed or is_turbo_cache_dtype(engine_dtype):
        check_skipped_layers(with_dtype, vllm_config)
    else:
        warn_of_options(vllm_config.attention_config, engine_dtype)
    if is_turbo_cache_dtype(engine_dtype) and not num_packed:
        skipped = " ".join(vllm_config.cache_config.kv_cache_dtype_skip_layers)
        reason = "this model has no layers with K and V"
        if with_dtype:
            reason = f"--kv-cache-dtype-skip-layers {skipped} leaves all of them out"
        logger.warning_once(
            "KV cache %s: 0 of %d layers are packed, because %s.",
            engine_dtype,
            len(with_dtype),
            reason,
        )


def layer_numbers(names: Sequence[str]) -> list[int]:
    """The numbers in layers' names, as in ``kv_cache_dtype_skip_layers``."""
    parts = {part for name in names for part in name.split(".")}
    return sorted(int(part) for part in parts if part.isdecimal())


def _listed(numbers: Sequence[int]) -> str:
    """Numbers as a list or a range, for a message."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, last + 1)):
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


def check_skipped_layers(
    layers: Mapping[str, "AttentionLayerBase"], vllm_config: VllmConfig
) -> None:
    """Check that the layers to be left out exist.

    Args:
        layers: Layers with a cache dtype on this rank, by name.
        vllm_config: The engine's configuration.

    Raises:
        ValueError: If an entry is neither a layer's number nor "sliding_window".

    """
    cache_config = vllm_config.cache_config
    entries = cache_config.kv_cache_dtype_skip_layers
    numbers = layer_numbers(list(layers))
    # Other ranks have other layers, some of them without K and V.
    others = range(vllm_config.model_config.get_total_num_hidden_layers())
    unknown = set(entries) - {*map(str, (*numbers, *others)), SLIDING_WINDOW}
    has_all = vllm_config.parallel_config.pipeline_parallel_size == 1
    if unknown:
        reason = reasons.SKIPPED_NO_LAYER.of(
            entries=" ".join(x for x in entries if x in unknown),
            numbers=_listed(numbers if has_all and numbers else others),
        )
        raise ValueError(refusals.refusal(str(cache_config.cache_dtype), [reason]))
    known = set(map(str, numbers))
    if any(getattr(x, SLIDING_WINDOW, None) is not None for x in layers.values()):
        known.add(SLIDING_WINDOW)
    idle = [entry for entry in entries if entry not in known]
    if idle and has_all:
        logger.warning_once(
            "--kv-cache-dtype-skip-layers %s: no effect, because no layer with K and V "
            "has such a number or window.",
            " ".join(idle),
        )
