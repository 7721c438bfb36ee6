# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The offset that is taken off K before it is stored, in models that add a bias to K.

For any vector m, q.k = q.(k - m) + q.m. The cache stores k - m, and q.m is added back
to the scores of cached keys, in fp32 and with the query as computed. So m affects only
quality, and may differ between tokens. It is the mean of the rotated bias over segments
of a sequence, and the first token has a row of its own. A bias is in coordinates that
turn slowly, so the mean has most of it, and codes are left for the differences between
keys.

m depends on the checkpoint's bias, on RoPE and on ``VERSION``, but not on lengths,
ranks, dtypes or devices. Equal checkpoints give equal bytes.
"""

import copy
import hashlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import regex as re
import torch
from torch import nn

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
    Phi3LongRoPEScaledRotaryEmbedding,
)
from vllm.v1.attention.ops.turbo import interface

# The version of the rule below: a new rule changes the bytes of models with a bias.
VERSION = 3
# The buffer of an attention layer. Sleeping engines keep buffers, and no other tensor.
BUFFER = "turbo_key_offset"
# Flags by which configurations say that projections of attention have a bias. Qwen2's
# models always have one.
_BIAS_FLAGS = (
    "attention_bias",
    "qkv_bias",
    "add_qkv_bias",
    "attn_bias",
    "use_bias",
    "use_qkv_bias",
    "bias",
)
_BIASED_MODELS = ("qwen2",)
# In Transformers, the function that rotates, and the types of RoPE whose frequencies do
# not depend on the batch.
ROTATE = "apply_rotary_pos_emb"
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def may_add_key_bias(config: object) -> bool:
    """Whether a model's configuration suggests a bias of K.

    Only its weights show it for certain.

    Args:
        config: The text model's Hugging Face configuration.

    """
    model_type = getattr(config, "model_type", None) or ""
    flags = any(bool(getattr(config, flag, False)) for flag in _BIAS_FLAGS)
    return flags or model_type.startswith(_BIASED_MODELS)


class UnknownRotation(Exception):
    """RoPE rotates K of a layer in an unknown way, so the layer can have no offset."""


def _in_rows(places: torch.Tensor) -> list[torch.Tensor]:
    """Positions by rows of a table: the first, and all of each segment."""
    return [places[:1], *places.split(interface.OFFSET_SEGMENT)]


class TransformersRotary:
    """The average rotation of segments by RoPE in Transformers' modeling code.

    Its model computes cosines and sines once, and a function beside it rotates K of all
    layers. Such a rotation is also linear in cosines and sines.

    Args:
        rotary: The module of the model that has RoPE.

    Raises:
        UnknownRotation: If the module or the function has an unusual interface.

    """

    def __init__(self, rotary: nn.Module) -> None:
        name = type(rotary).__name__
        rotate = getattr(sys.modules[type(rotary).__module__], ROTATE, None)
        if rotate is None or getattr(rotary, "rope_type", None) not in FIXED_ROPE_TYPES:
            raise UnknownRotation(name)
        self.rotate: Callable[..., Any] = rotate
        own: Any = copy.deepcopy(rotary).cpu()
        rope = getattr(own.config, "rope_parameters", None) or {}
        scaled = rope.get("factor", 1) * rope.get("original_max_position_embeddings", 0)
        count = max(own.max_seq_len_cached, int(scaled))
        means = []
        for places in _in_rows(torch.arange(count, device="cpu")):
            tables = own(torch.empty(1, device="cpu"), places[None])
            if any(table.shape[:-1] != (1, len(places)) for table in tables):
                raise UnknownRotation(name)
            means.append([table[0].double().mean(0).float() for table in tables])
        self.cos, self.sin = (torch.stack(parts) for parts in zip(*means))

    def rotated(self, bias: torch.Tensor) -> torch.Tensor:
        """``mean_rotated`` of a bias: (H, D) to (G, H, D), fp32."""
        keys = bias[None, :, None].repeat(1, 1, len(self.cos), 1)
        _, rotated = self.rotate(keys, keys, self.cos[None], self.sin[None])
        return rotated[0].transpose(0, 1).contiguous()


Rotary = RotaryEmbeddingBase | Phi3LongRoPEScaledRotaryEmbedding | TransformersRotary


def _rotary_beside(parent: nn.Module) -> nn.Module | None:
    known = RotaryEmbeddingBase, Phi3LongRoPEScaledRotaryEmbedding
    return next((x for x in parent.children() if isinstance(x, known)), None)


def find_rotary(parent: nn.Module, model: nn.Module) -> nn.Module | None:
    """The module that rotates K of an attention layer; None if none does.

    Args:
        parent: The module that holds the layer. In vLLM's models RoPE is beside the
            layer, except in layers without RoPE.
        model: The whole model. In Transformers' models RoPE is there, for all layers.

    Raises:
        UnknownRotation: If the model has RoPE, but it is unknown whether it rotates
            this layer's keys. The message is the class of RoPE.

    """
    modules = list(model.modules())
    rotaries = [x for x in modules if re.search("Rotary|R[oO]PE", type(x).__name__)]
    beside = _rotary_beside(parent)
    if beside is not None or not rotaries:
        return beside
    if any(type(x) is type(parent) and _rotary_beside(x) for x in modules):
        return None
    modeling = type(parent).__module__
    own = [x for x in rotaries if type(x).__module__ == modeling]
    # A Python module with the function that rotates belongs to Transformers.
    if len(own) == 1 and hasattr(sys.modules.get(modeling), ROTATE):
        return own[0]
    raise UnknownRotation(type((own or rotaries)[0]).__name__)


def mean_rotary(rotary: nn.Module) -> Rotary:
    """A copy on the CPU whose position g rotates like the average of row g's tokens.

    Its cosines and sines are means over the segment's positions, because a rotation is
    linear in them. They are computed again in fp32: the layer's own are rounded to the
    model's dtype, and a call with another dtype would change them.

    Args:
        rotary: A module from ``find_rotary``.

    Raises:
        UnknownRotation: If a module of Transformers has an unusual interface.

    """
    means: Any
    if isinstance(rotary, Phi3LongRoPEScaledRotaryEmbedding):
        means = copy.deepcopy(rotary).cpu()
        with torch.device("cpu"):
            table = _table_in_use(means)
    elif isinstance(rotary, RotaryEmbeddingBase):
        means = copy.deepcopy(rotary).cpu()
        with torch.device("cpu"):
            try:
                table = means._compute_cos_sin_cache()
            except TypeError:  # a class with several caches
                table = means.cos_sin_cache
    else:
        try:
            return TransformersRotary(rotary)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as e:
            raise UnknownRotation(type(rotary).__name__) from e
    # Segment by segment, because a table of a million positions has 0.5 GB in fp32.
    rows = [x.double().mean(0) for x in _in_rows(table)]
    means.cos_sin_cache = torch.stack(rows).float()
    if isinstance(rotary, Phi3LongRoPEScaledRotaryEmbedding):
        means.long_short_cos_sin_cache, means.use_long_rope = means.cos_sin_cache, False
    return means


def _table_in_use(rotary: Phi3LongRoPEScaledRotaryEmbedding) -> torch.Tensor:
    """The cosines and sines of the factors, short or long, that the engine uses."""
    if rotary.use_long_rope:
        return rotary._compute_cos_sin_cache(
            rotary.max_position_embeddings, rotary.long_factor, rotary.long_mscale
        )
    return rotary._compute_cos_sin_cache(
        rotary.original_max_position_embeddings,
        rotary.short_factor,
        rotary.short_mscale,
    )


@torch.no_grad()
def mean_rotated(bias: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """The mean of a rotated bias over the positions of each row: see ``KeyOffset``.

    Args:
        bias: (H, D), of any dtype, on any device.
        rotary: The rotation of K, from ``mean_rotary``; None for none.

    Returns:
        (G, H, D) fp32 on the CPU, for as many segments as RoPE has positions; (1, H, D)
        without RoPE.

    """
    bias = bias.detach().to("cpu", torch.float32)
    if rotary is None:
        return bias[None].clone()
    if isinstance(rotary, TransformersRotary):
        return rotary.rotated(bias)
    table: Any = rotary.cos_sin_cache
    segments = torch.arange(len(table))
    key = bias.flatten().repeat(len(segments), 1)
    rotate: Any = getattr(rotary, "forward_native", rotary.forward)
    _, rotated = rotate(segments, key.clone(), key)
    assert rotated is not None
    return rotated.view(-1, *bias.shape).contiguous()


def lag_until(table: torch.Tensor, longest: float) -> int | None:
    """The most tokens that RoPE positions may lag behind sequence positions.

    M-RoPE's positions lag after images. With a longer lag, the offset of a segment
    leaves more of a bias than ``longest``.

    Args:
        table: (G, H, D), from ``mean_rotated``.
        longest: The largest Euclidean norm that may be left of a head's bias.

    Returns:
        Tokens, a multiple of a segment; None for any lag.

    """
    table = table[1:]
    if len(table) == 0:
        return None
    # Two means differ by at most twice the longest of them.
    if 2 * table.norm(dim=-1).max() <= longest:
        return None
    for lag in range(1, len(table)):
        if (table[lag:] - table[:-lag]).norm(dim=-1).max() > longest:
            return (lag - 1) * interface.OFFSET_SEGMENT
    return None


def digest(offsets: Iterable[torch.Tensor | None]) -> str:
    """Eight hexadecimal digits that identify offsets.

    Engines with the same digits can share pages.

    Args:
        offsets: (G, H, D) fp32 for each of this rank's layers, in order; None for a
            layer without an offset.

    """
    found = hashlib.sha256(f"K offset {VERSION}".encode())
    for offset in offsets:
        found.update(b"-" if offset is None else offset.cpu().numpy().tobytes())
    return found.hexdigest()[:8]
