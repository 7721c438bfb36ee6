# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Bytes of the levels and scales of rotated vectors in PyTorch.

It is the executable form of ``format``'s words. Shapes: D the head size, G = D / 16
scale groups, S bytes of a vector's scales.
"""

from functools import cache

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import ScaleWords
from vllm.v1.attention.ops.turbo.reference.levels import by_group, from_groups


def pack_scales(scale_codes: torch.Tensor, words: ScaleWords) -> torch.Tensor:
    """The bytes of a vector's scales: (..., G) to (..., S), both uint8."""
    codes = scale_codes.long().unflatten(-1, (words.num_words, words.word_groups))
    base = codes.amax(-1)
    deltas = (base[..., None] - codes) // words.delta_step
    shifts = 8 + words.delta_bits * torch.arange(words.word_groups)
    word = base + (deltas << shifts.to(codes.device)).sum(-1)
    return to_bytes(word, words.word_bytes)


def unpack_scales(packed: torch.Tensor, words: ScaleWords) -> torch.Tensor:
    """Inverse of ``pack_scales``."""
    word = from_bytes(packed, words.word_bytes)[..., None]
    shifts = 8 + words.delta_bits * torch.arange(words.word_groups)
    deltas = word >> shifts.to(packed.device) & words.max_delta
    codes = (word & 0xFF) - deltas * words.delta_step
    return codes.flatten(-2).to(torch.uint8)


def to_bytes(word: torch.Tensor, word_bytes: int) -> torch.Tensor:
    """Little-endian bytes of int64 words: (..., n) to (..., n * word_bytes)."""
    shifts = 8 * torch.arange(word_bytes, device=word.device)
    return (word[..., None] >> shifts & 0xFF).flatten(-2).to(torch.uint8)


def from_bytes(packed: torch.Tensor, word_bytes: int) -> torch.Tensor:
    """Inverse of ``to_bytes``."""
    shifts = 8 * torch.arange(word_bytes, device=packed.device)
    return (packed.long().unflatten(-1, (-1, word_bytes)) << shifts).sum(-1)


def path_bits(index: torch.Tensor) -> torch.Tensor:
    """The path bits of a trellis's levels, both (..., G, 16) int64."""
    bits: list[torch.Tensor] = []
    for e in range(fmt.SCALE_GROUP):
        bit = index[..., e] >> 1 & 1
        bits.append(bit ^ bits[e - 2] if e >= 2 else bit)
    return torch.stack(bits, -1)


@cache
def _unit_shifts(device: torch.device) -> torch.Tensor:
    """The lowest bits of a unit's four-bit codes in its word: int64 (8,)."""
    return 4 * torch.arange(fmt.UNIT_CODES, device="cpu").to(device)


@cache
def _branch_shifts(is_value: bool, device: torch.device) -> torch.Tensor:
    """The lowest bits of a group's branches in its word: int64 (16,)."""
    e = torch.arange(fmt.SCALE_GROUP, device="cpu")
    if not is_value:
        return (2 * e).to(device)
    code, unit = e // 2, e % 2
    return (16 * (code % 2) + (4 * (code // 2) + 6 - 2 * unit) % 16).to(device)


@cache
def group_shifts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The shifts of ``pack_trellis`` for groups that do not share words.

    Branches and path bits are in the order of codes.
    """
    return _branch_shifts(False, device), _path_shifts(1, False, device)


@cache
def _path_shifts(num_groups: int, is_value: bool, device: torch.device) -> torch.Tensor:
    """The index of each path bit in its word: int64 (groups of a word, 16)."""
    place = torch.arange(fmt.SCALE_GROUP, device="cpu")
    if is_value or num_groups % 2 == 1:
        return place[None].to(device)
    of_group = 2 * torch.arange(2, device="cpu")[:, None]
    return (place // 2 * 4 + of_group + place % 2).to(device)


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    """16-bit words, as int64, rotated left."""
    return word << bits & 0xFFFF | word >> 16 - bits


def pack_trellis(
    grouped: torch.Tensor, branch_shifts: torch.Tensor, path_shifts: torch.Tensor
) -> torch.Tensor:
    """The bytes of a trellis's levels: (..., G, 16) int64 to uint8 (..., 6 * G).

    All branches, with a word for each group, come before the words of path bits.

    Args:
        grouped: (..., G, 16) int64, indices of the levels.
        branch_shifts: (16,) int64, the lowest bits of a group's branches in its word.
        path_shifts: (groups of a word, 16) int64, indices of path bits in their word.

    """
    branches = (grouped >> 2 << branch_shifts).sum(-1)
    path = path_bits(grouped).unflatten(-2, (-1, len(path_shifts)))
    path = (path << path_shifts).sum((-2, -1))
    return torch.cat([to_bytes(branches, 4), to_bytes(path, 2 * len(path_shifts))], -1)


def unpack_trellis(
    packed: torch.Tensor, branch_shifts: torch.Tensor, path_shifts: torch.Tensor
) -> torch.Tensor:
    """Inverse of ``pack_trellis``: int64 (..., G, 16)."""
    num_groups = packed.shape[-1] // 6
    branches, path = packed.split([4 * num_groups, 2 * num_groups], -1)
    branch = from_bytes(branches, 4)[..., None] >> branch_shifts & 3
    bit = from_bytes(path, 2 * len(path_shifts))[..., None, None] >> path_shifts & 1
    bit = torch.nn.functional.pad(bit.flatten(-3, -2), (2, 0))
    return 4 * branch + 2 * (bit[..., 2:] ^ bit[..., :-2]) + bit[..., 1:-1]


def pack_codes(index: torch.Tensor, bits: int, is_value: bool) -> torch.Tensor:
    """The bytes of a vector's codes: (..., D) to uint8 (..., D * bits / 8).

    Four-bit codes are in the order of units. Three-bit codes are in the order of
    groups, with all branches before the path bits. The lower half of 32 bits of a value
    has the even codes.
    """
    if bits == 4:
        units = index.long().unflatten(-1, (fmt.UNIT_CODES, -1)).transpose(-1, -2)
        shifts = _unit_shifts(index.device)
        if not is_value:
            return to_bytes((units << shifts).sum(-1), 4)
        halves = units.unflatten(-1, (-1, 2)).transpose(-1, -2) << shifts[:4]
        return to_bytes(_rotated(halves.sum(-1), 2).flatten(-2), 2)
    grouped = by_group(index.long())
    path_shifts = _path_shifts(grouped.shape[-2], is_value, index.device)
    return pack_trellis(grouped, _branch_shifts(is_value, index.device), path_shifts)


def unpack_codes(packed: torch.Tensor, bits: int, is_value: bool) -> torch.Tensor:
    """Inverse of ``pack_codes``: uint8 (..., D)."""
    if bits == 4:
        shifts = _unit_shifts(packed.device)
        if is_value:
            halves = _rotated(from_bytes(packed, 2), 14).unflatten(-1, (-1, 2))
            units = (halves[..., None, :] >> shifts[:4, None] & 0xF).flatten(-2)
        else:
            units = from_bytes(packed, 4)[..., None] >> shifts & 0xF
        return units.transpose(-1, -2).flatten(-2).to(torch.uint8)
    path_shifts = _path_shifts(packed.shape[-1] // 6, is_value, packed.device)
    shifts = _branch_shifts(is_value, packed.device)
    return from_groups(unpack_trellis(packed, shifts, path_shifts)).to(torch.uint8)
