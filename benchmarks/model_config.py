# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Changes a model's configuration: to fewer layers, or to quantised weights."""

from typing import Any

# Lists of a configuration with an item for each layer.
PER_LAYER = (
    "layer_types",
    "hybrid_override_pattern",
    "no_rope_layers",
    "hybrid_layer_pattern",
    "moe_layer_freq",
)
# Group sizes of AWQ's tools, which take a smaller one if a weight is no multiple.
AWQ_GROUPS = (128, 64, 32)
# Modules that AWQ's checkpoints of hybrids leave unquantised. Without names, vLLM reads
# the weights to find out.
NOT_CONVERTED = ["lm_head", "in_proj_a", "in_proj_b"]


def cut_layers(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """Returns a model's configuration with its first layers only.

    Raises:
        ValueError: If the model has fewer layers.
    """
    whole = config["num_hidden_layers"]
    if layers is None:
        return config
    if not 0 < layers <= whole:
        raise ValueError(f"{layers} layers of a model of {whole}")
    cut = {name: config[name][:layers] for name in PER_LAYER if name in config}
    return config | {"num_hidden_layers": layers} | cut


def with_awq(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a model's configuration with weights of 4 bits, as by AWQ's tools.

    Raises:
        ValueError: If its weights are quantised already, or no group size divides them.
    """
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"the model's weights are quantised already: {method}")
    sizes = {
        name: size
        for name, size in config.items()
        if name.endswith(("hidden_size", "intermediate_size")) and isinstance(size, int)
    }
    fitting = [g for g in AWQ_GROUPS if not any(size % g for size in sizes.values())]
    if not fitting:
        raise ValueError(f"AWQ has no groups that divide {sizes}")
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": fitting[0],
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": NOT_CONVERTED,
    }
    return config | {"quantization_config": quantization}
