# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Has the bias of K read while weights are loaded, and finds loaders that do not."""

from torch import nn

from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.keys.bias import (
    find_key_bias,
    is_normalised,
    layer_number,
    set_key_offsets,
    turbo_layers,
    warn_of_key_biases,
    warn_of_lagging_positions,
)


def prepare_key_biases(model: nn.Module) -> None:
    """Set the offset of K in layers that add a bias to it, and warn of layers that
    cannot have one.

    Args:
        model: A model with its checkpoint's weights, not processed yet.

    """
    set_key_offsets(model)
    warn_of_key_biases(model)
    runners = [layer.impl.runner for layer, _ in turbo_layers(model)]
    for runner in runners:
        runner.bias_was_sought = True
    biases = (runner.key_bias for runner in runners)
    warn_of_lagging_positions(bias for bias in biases if bias is not None)


def check_key_biases(model: nn.Module) -> None:
    """Check that no layer stores a bias of K because its loader did not have it read.

    Args:
        model: A model whose weights are loaded, and whose means of K are taken off.

    Raises:
        ValueError: If a layer without an offset adds a bias to K, and it was not sought
            while weights were loaded.

    """
    unread = {}
    for layer, parent in turbo_layers(model):
        runner = layer.impl.runner
        has_offset = runner.scoring.key_offset is not None
        if runner.bias_was_sought or has_offset or is_normalised(parent):
            continue
        bias = find_key_bias(layer, parent)
        if bias is not None and bias.any():
            unread[layer_number(layer.layer_name)] = layer.kv_cache_dtype
    if unread:
        reason = reasons.UNREAD_BIAS.of(layers=", ".join(unread))
        raise ValueError(refusals.refusal(next(iter(unread.values())), [reason]))
