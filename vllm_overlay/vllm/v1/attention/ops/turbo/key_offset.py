# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The offset that is taken off K before it is stored, of models that add a bias to it.

For any vector m, q.k = q.(k - m) + q.m. What is stored is k - m, and the scores of
cached keys get q.m back, in fp32 and of the query as it is. So m decides on quality
alone, and may be another for each token. It is the mean of the rotated bias over
segments of a sequence: a bias lies in coordinates that turn slowly, so that most of it
is in the mean, and the codes are left to what differs between keys.

m follows from the checkpoint's bias, from RoPE and from ``VERSION``: not from lengths,
ranks, dtypes or devices. Equal checkpoints make equal bytes.
"""

import copy
import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.v1.attention.ops.turbo import interface

# Of the rule below: another changes the bytes of models with a bias.
VERSION = 2
# The buffer of an attention layer. Sleeping engines keep buffers, and no other tensor.
BUFFER = "turbo_key_offset"
# What configurations call it that attention's projections have a bias; Qwen2's models
# always do.
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


def may_add_key_bias(config: object) -> bool:
    """Whether a model's configuration lets one expect a bias of K.

    Only its weights tell for sure.

    Args:
        config: The text model's, of HuggingFace.

    """
    model_type = getattr(config, "model_type", None) or ""
    flags = any(bool(getattr(config, flag, False)) for flag in _BIAS_FLAGS)
    return flags or model_type.startswith(_BIASED_MODELS)


def find_rotary(parent: nn.Module) -> RotaryEmbeddingBase | None:
    """The rotary embedding beside an attention layer; None if there is none."""
    found = (x for x in parent.children() if isinstance(x, RotaryEmbeddingBase))
    return next(found, None)


def mean_rotary(rotary: RotaryEmbeddingBase) -> RotaryEmbeddingBase:
    """A copy on the CPU whose position g rotates as segment g does on average.

    Its cosines and sines are means over the segment's positions; a rotation is linear
    in them. They are made anew, in fp32: the layer's own are rounded to the model's
    dtype, and calling it with another would change them.
    """
    means = copy.deepcopy(rotary).cpu()
    with torch.device("cpu"):
        try:
            table = means._compute_cos_sin_cache()
        except TypeError:  # of a class that has several
            table = means.cos_sin_cache
    # One by one: a table of a million positions has half a gigabyte in fp32.
    segments = table.split(interface.OFFSET_SEGMENT)
    means.cos_sin_cache = torch.stack([x.double().mean(0) for x in segments]).float()
    return means


@torch.no_grad()
def mean_rotated(
    bias: torch.Tensor, rotary: RotaryEmbeddingBase | None
) -> torch.Tensor:
    """The mean of a rotated bias over each segment of the positions.

    Args:
        bias: (H, D), of any dtype, on any device.
        rotary: How K is rotated, from ``mean_rotary``; None if it is not.

    Returns:
        (G, H, D) fp32 on the CPU: of as many segments as RoPE has positions for.

    """
    bias = bias.detach().to("cpu", torch.float32)
    if rotary is None:
        return bias[None].clone()
    segments = torch.arange(rotary.cos_sin_cache.shape[0])
    key = bias.flatten().repeat(len(segments), 1)
    _, rotated = rotary.forward_native(segments, key.clone(), key)
    assert rotated is not None
    return rotated.view(-1, *bias.shape).contiguous()


def digest(offsets: Iterable[torch.Tensor | None]) -> str:
    """Eight hexadecimal digits that tell tables apart: pages can be shared by engines
    that say the same.

    Args:
        offsets: (G, H, D) fp32 of this rank's layers, in their order; None where keys
            are stored as they are.

    """
    found = hashlib.sha256(f"K offset {VERSION}".encode())
    for offset in offsets:
        found.update(b"-" if offset is None else offset.cpu().numpy().tobytes())
    return found.hexdigest()[:8]
