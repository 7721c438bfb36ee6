# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The offset that is taken off K before it is stored: tables, and RoPE's part in them.

For any vector m, q.k = q.(k - m) + q.m. The cache stores k - m, and q.m is added back
to the scores of cached keys, in fp32 and with the query as computed. So m affects only
quality, and may differ between tokens. It is the mean of K (see ``keys.means``) or else
K's bias, rotated and averaged over segments of a sequence. The first token has a row of
its own. Such vectors are in coordinates that turn slowly, so the average has most of
them, and codes are left for the differences between keys.

Without means, m depends on the checkpoint's bias, on RoPE and on ``VERSION``, but not
on lengths, ranks, dtypes or devices. Then equal checkpoints give equal bytes.
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


# Splits a table of all positions, (P, ...), into the positions of each row.
InRows = Callable[[torch.Tensor], Iterable[torch.Tensor]]


def offset_segments(places: torch.Tensor) -> list[torch.Tensor]:
    """Positions by rows of ``KeyOffset.table``: the first, and all of each segment."""
    return [places[:1], *places.split(interface.OFFSET_SEGMENT)]


class TransformersRotary:
    """The average rotation of segments by RoPE in Transformers' modeling code.

    Its model computes cosines and sines once, and a function beside it rotates K of all
    layers. Such a rotation is also linear in cosines and sines.

    Args:
        rotary: The module of the model that has RoPE.
        in_rows: The positions of each row.

    Raises:
        UnknownRotation: If the module or the function has an unusual interface.

    """

    def __init__(self, rotary: nn.Module, in_rows: InRows = offset_segments) -> None:
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
        for places in in_rows(torch.arange(count, device="cpu")):
            tables = self._tables(own, places)
            means.append([table.double().mean(0).float() for table in tables])
        self.cos, self.sin = (torch.stack(parts) for parts in zip(*means))

    @staticmethod
    def _tables(rotary: Any, places: torch.Tensor) -> list[torch.Tensor]:
        """Cosines and sines at some positions, (P, D) fp32 each."""
        tables = rotary(torch.empty(1, device="cpu"), places[None])
        if any(table.shape[:-1] != (1, len(places)) for table in tables):
            raise UnknownRotation(type(rotary).__name__)
        return [table[0] for table in tables]

    def turn_back(self, rotary: nn.Module, count: int) -> None:
        """Rotate row p back from position p, for ``count`` positions."""
        own = copy.deepcopy(rotary).cpu()
        cos, sin = self._tables(own, torch.arange(count, device="cpu"))
        self.cos, self.sin = _inverse(cos, sin)

    def rotated(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotate the key of each row, (R, H, D) fp32."""
        keys = keys.transpose(0, 1)[None]
        tables = (x.to(keys.device)[None] for x in (self.cos, self.sin))
        _, rotated = self.rotate(keys, keys, *tables)
        return rotated[0].transpose(0, 1).contiguous()


def _inverse(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the inverse of a rotation that may also scale."""
    squares = cos * cos + sin * sin
    return cos / squares, -sin / squares


Rotary = RotaryEmbeddingBase | Phi3LongRoPEScaledRotaryEmbedding | TransformersRotary
_KNOWN = RotaryEmbeddingBase, Phi3LongRoPEScaledRotaryEmbedding


def _rotary_beside(parent: nn.Module) -> nn.Module | None:
    return next((x for x in parent.children() if isinstance(x, _KNOWN)), None)


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
    beside = _rotary_beside(parent)
    if beside is not None:
        return beside
    modules = list(model.modules())
    rotaries = [x for x in modules if re.search("Rotary|R[oO]PE", type(x).__name__)]
    if not rotaries:
        return None
    if any(type(x) is type(parent) and _rotary_beside(x) for x in modules):
        return None
    modeling = type(parent).__module__
    own = [x for x in rotaries if type(x).__module__ == modeling]
    # A Python module with the function that rotates belongs to Transformers.
    if len(own) == 1 and hasattr(sys.modules.get(modeling), ROTATE):
        return own[0]
    raise UnknownRotation(type((own or rotaries)[0]).__name__)


def mean_rotary(rotary: nn.Module, in_rows: InRows = offset_segments) -> Rotary:
    """A copy on the CPU whose position g rotates like the average of row g's tokens.

    Its cosines and sines are means over the segment's positions, because a rotation is
    linear in them. They are computed again in fp32: the layer's own are rounded to the
    model's dtype, and a call with another dtype would change them.

    Args:
        rotary: A module from ``find_rotary``.
        in_rows: The positions of each row.

    Raises:
        UnknownRotation: If a module of Transformers has an unusual interface.

    """
    if not isinstance(rotary, _KNOWN):
        return _transformers_rotary(rotary, in_rows)
    means, table = _cosines_and_sines(rotary)
    # Segment by segment, because a table of a million positions has 0.5 GB in fp32.
    rows = [x.double().mean(0) for x in in_rows(table)]
    return _with_table(means, torch.stack(rows).float())


def inverse_rotary(rotary: nn.Module, count: int) -> Rotary:
    """A copy on the CPU whose position p turns keys of position p back.

    Args:
        rotary: A module from ``find_rotary``.
        count: The number of positions.

    Raises:
        UnknownRotation: If there is no such copy, or RoPE has fewer positions.

    """
    if not isinstance(rotary, _KNOWN):
        back = _transformers_rotary(rotary)
        back.turn_back(rotary, count)
        return back
    copied: Any = copy.deepcopy(rotary).cpu()
    # The layer's own table, as it is rounded, for the layer has turned keys by it.
    is_phi3 = isinstance(rotary, Phi3LongRoPEScaledRotaryEmbedding)
    table = _table_in_use(copied) if is_phi3 else copied.cos_sin_cache
    if len(table) < count or table.is_complex():
        raise UnknownRotation(type(rotary).__name__)
    halves = table[:count].float().chunk(2, -1)
    return _with_table(copied, torch.cat(_inverse(*halves), -1))


def _transformers_rotary(
    rotary: nn.Module, in_rows: InRows = offset_segments
) -> TransformersRotary:
    try:
        return TransformersRotary(rotary, in_rows)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as e:
        raise UnknownRotation(type(rotary).__name__) from e


def _cosines_and_sines(rotary: nn.Module) -> tuple[Any, torch.Tensor]:
    """A copy on the CPU, and its cosines beside its sines by position, fp32."""
    copied: Any = copy.deepcopy(rotary).cpu()
    with torch.device("cpu"):
        if isinstance(rotary, Phi3LongRoPEScaledRotaryEmbedding):
            return copied, _table_in_use(copied)
        try:
            return copied, copied._compute_cos_sin_cache()
        except TypeError:  # a class with several caches
            return copied, copied.cos_sin_cache
        except (AttributeError, IndexError, RuntimeError, ValueError) as e:
            raise UnknownRotation(type(rotary).__name__) from e


def _with_table(copied: Any, table: torch.Tensor) -> Any:
    """Let a copy rotate by other cosines and sines."""
    copied.cos_sin_cache = table
    if isinstance(copied, Phi3LongRoPEScaledRotaryEmbedding):
        copied.long_short_cos_sin_cache, copied.use_long_rope = table, False
    return copied


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


def forward_of(inverse: Rotary) -> Rotary:
    """A copy of a rotation from ``inverse_rotary`` that turns keys forth again.

    If RoPE scales keys, the copy scales them by the inverse.
    """
    copied: Any = copy.deepcopy(inverse)
    if isinstance(copied, TransformersRotary):
        copied.sin = -copied.sin
        return copied
    cos, sin = copied.cos_sin_cache.chunk(2, -1)
    return _with_table(copied, torch.cat([cos, -sin], -1))


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
    is_own = isinstance(rotary, TransformersRotary)
    rows = len(rotary.cos if is_own else rotary.cos_sin_cache)  # type: ignore
    return rotate_rows(bias.repeat(rows, 1, 1), rotary)


@torch.no_grad()
def rotate_rows(keys: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the key of each row by the rotation of the row's number.

    Args:
        keys: (R, H, D) fp32, on the device of ``rotary``.
        rotary: A rotation with as many rows, at least.

    Returns:
        (R, H, D) fp32, contiguous.

    """
    if isinstance(rotary, TransformersRotary):
        return rotary.rotated(keys)
    rows = torch.arange(len(keys), device=keys.device)
    flat = keys.flatten(1)
    rotate: Any = getattr(rotary, "forward_native", rotary.forward)
    _, rotated = rotate(rows, flat.clone(), flat)
    assert rotated is not None
    return rotated.view(keys.shape).contiguous()


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
