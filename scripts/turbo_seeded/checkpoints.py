# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes a model's checkpoint in the formats of quantisation tools.

Each kind has the names, shapes and codes of its tool's files. The cache's scales, if a
kind has them, are 0.01: an engine that applies them to K and V gives other answers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# NVFP4's largest code, the number of neighbouring codes that share a scale, the codes.
FP4_MAX = 6.0
FP4_GROUP = 16
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The largest activation that kinds with static scales expect.
LARGEST_ACTIVATION = 2 * FP8_MAX
# Columns in the order in which AWQ packs them, the lowest bits first.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
CACHE_SCALE = 0.01
FP8_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}

Tensors = dict[str, torch.Tensor]


def pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes of 4 bits along the last dimension, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    words = (codes.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    # Wrapped to the range of an int32.
    return ((words + 2**31) % 2**32 - 2**31).int()


def groups(weight: torch.Tensor) -> torch.Tensor:
    """Returns [n, k / GROUP, GROUP] of a weight, [n, k]."""
    return weight.float().unflatten(1, (-1, GROUP))


def symmetric_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes [n, k] around 8, and the scales [n, groups]."""
    grouped = groups(weight)
    scales = (grouped.abs().amax(-1) / 7).to(torch.float16)
    codes = (grouped / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return codes.flatten(1), scales


def awq(weight: torch.Tensor) -> Tensors:
    grouped = groups(weight)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / 15).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    columns = codes.clamp(0, 15).flatten(1).T

    def pack(values: torch.Tensor) -> torch.Tensor:
        ordered = values.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)
        return pack_rows(ordered)

    return {
        "qweight": pack(columns),
        "qzeros": pack(zeros.T),
        "scales": scales.T.contiguous(),
    }


def gptq(weight: torch.Tensor) -> Tensors:
    codes, scales = symmetric_codes(weight)
    # The format stores a zero minus one.
    zeros = torch.full_like(scales.T, 7)
    return {
        "qweight": pack_rows(codes).T.contiguous(),
        "qzeros": pack_rows(zeros),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def packed_int4(weight: torch.Tensor) -> Tensors:
    codes, scales = symmetric_codes(weight)
    return {
        "weight_packed": pack_rows(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def to_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def fp8_channel(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / FP8_MAX
    return {"weight": to_fp8(weight, scale), "weight_scale": scale}


def fp8_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().max() / FP8_MAX
    return {
        "weight": to_fp8(weight, scale),
        "weight_scale": scale,
        "input_scale": torch.tensor(LARGEST_ACTIVATION / FP8_MAX),
    }


def fp8_block(weight: torch.Tensor) -> Tensors:
    """Packs like Qwen3's and DeepSeek's checkpoints: a scale for 128 x 128 weights."""
    tiles = weight.float().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scale = tiles.abs().amax((1, 3)) / FP8_MAX
    rows = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return {"weight": to_fp8(weight, rows), "weight_scale_inv": scale}


def nvfp4(weight: torch.Tensor) -> Tensors:
    grouped = weight.float().unflatten(1, (-1, FP4_GROUP))
    overall = weight.float().abs().max() / (FP4_MAX * FP8_MAX)
    scales = (grouped.abs().amax(-1) / FP4_MAX / overall).to(FP8)
    scaled = grouped / (scales.float() * overall)[..., None]
    distance = (scaled.abs()[..., None] - FP4_VALUES).abs()
    codes = (distance.argmin(-1) + 8 * (scaled < 0)).flatten(1)
    pairs = codes.unflatten(1, (-1, 2))
    return {
        "weight": (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": overall,
        "input_scale": torch.tensor(LARGEST_ACTIVATION / (FP4_MAX * FP8_MAX)),
    }


def as_it_is(weight: torch.Tensor) -> Tensors:
    return {"weight": weight}


@dataclass(frozen=True)
class Kind:
    """One tool's checkpoints.

    Attributes:
        config: `quantization_config`.
        pack: Turns a linear layer's weight, [n, k], into tensors, by the ends of their
            names.
        cache_scales: The names of an attention layer's scales of K and V.
        scale_per_head: Whether each KV head has a scale of its own.
        on_cpu: Whether a CPU has a kernel for such weights, or a stand-in.
        kl_bound: Bound of the KL divergence of `turbo4` from the unquantised cache, in
            nats per token of answers that are certain.
        rounds_activations: Whether activations are rounded to 8 or 4 bits. A small
            difference of any cause may then become a whole step.

    """

    config: dict[str, Any]
    pack: Callable[[torch.Tensor], Tensors] = as_it_is
    cache_scales: tuple[str, ...] = ()
    scale_per_head: bool = False
    on_cpu: bool = True
    kl_bound: float = 0.01
    rounds_activations: bool = False


def compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns LLM-Compressor's configuration; without weights it has no layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group} if weights else {},
        "ignore": ["lm_head", "re:.*mlp.gate$"] if weights else [],
    }


def with_cache(config: dict[str, Any], strategy: str) -> dict[str, Any]:
    return config | {"kv_cache_scheme": FP8_CACHE | {"strategy": strategy}}


def modelopt(algorithm: str, cache: str, **more: Any) -> dict[str, Any]:
    """Returns ModelOpt's configuration, in the form of hf_quant_config.json."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": cache}
    excluded = ["lm_head", "*.mlp.gate"]
    return {
        "quant_method": "modelopt",
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "quantization": quantization | {"exclude_modules": excluded} | more,
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
INT4 |= {"strategy": "group", "group_size": GROUP}
# Activations have 4 bits. Noise of a hundredth in attention's output then changes
# answers by 0.025 nats, and by a millionth of a nat with plain weights.
NVFP4_INPUTS = {"kl_bound": 0.1, "rounds_activations": True}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
OF_LAYER = ("k_scale", "v_scale")
OF_PROJECTIONS = ("k_proj.k_scale", "v_proj.v_scale")
DENSE = compressed("dense", {}, None)
FP8_W8A8 = compressed(
    "float-quantized",
    FLOAT8 | {"strategy": "channel", "dynamic": False},
    FLOAT8 | {"strategy": "token", "dynamic": True},
)

KINDS = {
    "cache": Kind(with_cache(DENSE, "tensor"), cache_scales=OF_LAYER),
    "cache-per-head": Kind(
        with_cache(DENSE, "attn_head"), cache_scales=OF_LAYER, scale_per_head=True
    ),
    "awq": Kind(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        awq,
    ),
    "gptq": Kind(
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq",
        },
        gptq,
    ),
    "int4": Kind(compressed("pack-quantized", INT4, None), packed_int4),
    "int4-cache": Kind(
        with_cache(compressed("pack-quantized", INT4, None), "tensor"),
        packed_int4,
        OF_LAYER,
    ),
    "w8a8-cache-per-head": Kind(
        with_cache(FP8_W8A8, "attn_head"),
        fp8_channel,
        OF_LAYER,
        scale_per_head=True,
        rounds_activations=True,
    ),
    "fp8": Kind(
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8_tensor,
        OF_LAYER,
        rounds_activations=True,
    ),
    "fp8-block": Kind(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [GROUP, GROUP],
        },
        fp8_block,
        on_cpu=False,
        rounds_activations=True,
    ),
    "modelopt-fp8": Kind(
        modelopt("FP8", "FP8"), fp8_tensor, OF_PROJECTIONS, rounds_activations=True
    ),
    "modelopt-nvfp4": Kind(
        modelopt("NVFP4", "FP8", group_size=FP4_GROUP),
        nvfp4,
        OF_PROJECTIONS,
        **NVFP4_INPUTS,
    ),
    "modelopt-nvfp4-cache": Kind(
        modelopt("NVFP4", "NVFP4", group_size=FP4_GROUP),
        nvfp4,
        OF_PROJECTIONS,
        **NVFP4_INPUTS,
    ),
}


def without_cache(kind: Kind) -> Kind:
    """Returns a kind of compressed-tensors without its cache scales."""
    config = {k: v for k, v in kind.config.items() if k != "kv_cache_scheme"}
    return replace(kind, config=config, cache_scales=(), scale_per_head=False)


def write_checkpoint(model: Path, folder: Path, kind: Kind) -> str:
    """Writes a model in the format of a kind's tool, and returns the folder.

    Args:
        model: A folder with the model's weights, unquantised.
        folder: The new folder.
        kind: The kind of checkpoint.

    """
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    plain = load_file(model / "model.safetensors")
    config["quantization_config"] = dict(kind.config)
    routers = [name.removesuffix(".weight") for name in plain if "mlp.gate." in name]
    if routers and kind.config["quant_method"] == "fp8":
        config["quantization_config"] |= {"modules_to_not_convert": routers}
    (folder / "config.json").write_text(json.dumps(config))
    weights: Tensors = {}
    for name, weight in plain.items():
        if name.endswith("_proj.weight"):
            packed = kind.pack(weight)
            layer = name.removesuffix("weight")
            weights |= {layer + end: tensor for end, tensor in packed.items()}
        else:
            weights[name] = weight
    heads = config["num_key_value_heads"] if kind.scale_per_head else 1
    for layer in range(config["num_hidden_layers"]):
        for end in kind.cache_scales:
            scale = torch.full((heads, 1, 1) if heads > 1 else (1,), CACHE_SCALE)
            weights[f"model.layers.{layer}.self_attn.{end}"] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
