# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format of the turbo KV cache dtypes with multi-head latent attention.

MLA caches one vector a token, which is K and, without its rotary part, V: the
compressed latent, and the rotary key that all heads share. The latent is stored as
``turbo.format`` has vectors, rotated, with scales of groups of 16 and codes of four or
three bits, but by one codebook for both roles: the levels of values, which a kernel
decodes once to 16 bits for both products, chosen by the unbiased encoder of keys. The
gain that goes with that is part of the decoded coordinate, for it cannot go into the
softmax scale alone. The rotary part is int8 and not rotated: rotary embeddings come
after the projection that a rotation would be folded into.

The constants that the two share are in ``format``; those of latents alone are here. The
module imports nothing but the standard library. The format is as frozen as that one.
"""

from dataclasses import dataclass, replace

from vllm.v1.attention.ops.turbo.format import (
    SCALE_BYTE_COORDINATES,
    SCALE_GROUP,
    TILE_TOKENS,
    VALUE_CODEBOOKS,
    Codebook,
    ScaleWords,
    scale_words,
)

# cache dtype -> bits of a code of the latent
LATENT_PRESETS: dict[str, int] = {"turbo4": 4, "turbo3": 3}
# (latent rank, rotary coordinates) by the head size that vLLM has of both together.
LATENT_SIZES = {
    576: (512, 64),
    512: (512, 0),
    320: (256, 64),
    256: (256, 0),
}
# Coordinates of a word of four-bit codes.
WORD_CODES = 8
# The largest magnitude of a rotary coordinate's code.
ROPE_CODE_MAX = 127

# Factors of coordinates with which ``E[decode(x) * x] = E[x * x]`` on Gaussian
# vectors. Tests measure them again.
LATENT_GAINS = {4: 1.0053, 3: 1.0185}
LATENT_CODEBOOKS = {
    bits: replace(VALUE_CODEBOOKS[bits], gain=gain, unbiased=True)
    for bits, gain in LATENT_GAINS.items()
}


@dataclass(frozen=True)
class LatentFormat:
    """Layout of one turbo cache dtype at one size of latent and of rotary part.

    The tokens' bytes of a block are one contiguous region: a sequence of tiles of 16
    tokens, each of ``tile_bytes`` bytes. With L the rank, R the rotary coordinates and
    n the token's index in its tile, a tile is these planes, one after the other, each
    with a token's bytes in a row:

    ==================  =====================  ==========================
    plane               bytes                  address within the plane
    ==================  =====================  ==========================
    latent codes        16 * L * bits / 8      see below
    rope                16 * R                 n * R, coordinate r at + r
    latent scales       16 * L / 32            n * L / 32, see ScaleWords
    rope scales         16 * R / 16            n * R / 16, group s at + s
    ==================  =====================  ==========================

    Group g of a rotated latent is its coordinates 16 * g to 16 * g + 15. A coordinate
    is scale * gain * level, with the scale of its group (``format.ScaleWords``), and
    the levels and the gain of ``codebook``.

    * 4 bits: the 32-bit word at ``n * L / 2 + 4 * w`` has coordinates 8 * w to
      8 * w + 7: that of 8 * w + 2 * k + h is bits ``4 * (k + 4 * h)`` to
      ``4 * (k + 4 * h) + 3``: the index of its level.
    * 3 bits: the trellis of ``format.TurboFormat``, from state zero in each group, in
      the order of coordinates. There are two planes, one after the other. Of
      branches, L / 4 bytes a token: group g has the 32-bit word at
      ``n * L / 4 + 4 * g``, that of coordinate 16 * g + e in bits ``2 * e`` and
      ``2 * e + 1``. Of path bits, L / 8: group g has the 16-bit word at
      ``n * L / 8 + 2 * g``, that of 16 * g + e in bit ``e``.

    Words are little-endian. A rotary coordinate is its int8, -127 to 127, times the
    scale of its group of 16, coordinates 16 * s to 16 * s + 15: an E5M3 code, the
    smallest of which 127 times the scale holds the group's largest magnitude.

    Every byte belongs to one token, so tokens of a page are written independently.
    Bytes a token, of 2 * (L + R) in bf16:

    ======  ====  ======  ======
    latent  rope  turbo4  turbo3
    ======  ====  ======  ======
       512    64     340     276
       512     0     272     208
       256    64     204     172
       256     0     136     104
    ======  ====  ======  ======

    Attributes:
        name: The ``--kv-cache-dtype`` value.
        bits: Bits a code of the latent.
        rank: L, coordinates of the latent (``kv_lora_rank``).
        rope: R, rotary coordinates (``qk_rope_head_dim``).

    """

    name: str
    bits: int
    rank: int
    rope: int

    @staticmethod
    def from_cache_dtype(cache_dtype: str, head_size: int) -> "LatentFormat":
        """The layout of a preset.

        Args:
            cache_dtype: The ``--kv-cache-dtype`` value.
            head_size: L + R.

        Raises:
            ValueError: If the dtype is none of MLA, or there is no such layout.

        """
        if cache_dtype not in LATENT_PRESETS:
            raise ValueError(
                f"--kv-cache-dtype {cache_dtype} does not support MLA, where K and V "
                f"are one vector. Use --kv-cache-dtype "
                f"{' or '.join(LATENT_PRESETS)} for this model."
            )
        if head_size not in LATENT_SIZES:
            sizes = ", ".join(
                f"{rank} + {rope}" if rope else f"{rank}"
                for rank, rope in LATENT_SIZES.values()
            )
            raise ValueError(
                f"--kv-cache-dtype {cache_dtype} supports MLA with latent + rotary "
                f"coordinates of {sizes}, not {head_size} in all. "
                f"Use --kv-cache-dtype fp8 for this model."
            )
        rank, rope = LATENT_SIZES[head_size]
        return LatentFormat(cache_dtype, LATENT_PRESETS[cache_dtype], rank, rope)

    @property
    def codebook(self) -> Codebook:
        """Levels, gain and encoder of the latent."""
        return LATENT_CODEBOOKS[self.bits]

    @property
    def head_size(self) -> int:
        """L + R."""
        return self.rank + self.rope

    @property
    def num_groups(self) -> int:
        """Scale groups of the latent."""
        return self.rank // SCALE_GROUP

    @property
    def scale_words(self) -> ScaleWords:
        """How the scales of the latent are stored."""
        return scale_words(self.rank)

    @property
    def code_bytes(self) -> int:
        """Bytes of a latent's codes."""
        return self.rank * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a latent's scales."""
        return self.rank // SCALE_BYTE_COORDINATES

    @property
    def rope_scale_bytes(self) -> int:
        """Bytes of a rotary part's scales."""
        return self.rope // SCALE_GROUP

    @property
    def slot_size(self) -> int:
        """Bytes a token: C of the page shape [B, N, C]."""
        return self.code_bytes + self.rope + self.scale_bytes + self.rope_scale_bytes

    @property
    def tile_bytes(self) -> int:
        return TILE_TOKENS * self.slot_size

    @property
    def path_bits_offset(self) -> int:
        """Byte offset of the path bits of three-bit codes in a tile."""
        return TILE_TOKENS * (self.rank // 4)

    @property
    def rope_offset(self) -> int:
        """Byte offset of the rotary coordinates in a tile."""
        return TILE_TOKENS * self.code_bytes

    @property
    def scales_offset(self) -> int:
        """Byte offset of the latent's scales in a tile."""
        return self.rope_offset + TILE_TOKENS * self.rope

    @property
    def rope_scales_offset(self) -> int:
        """Byte offset of the rotary part's scales in a tile."""
        return self.scales_offset + TILE_TOKENS * self.scale_bytes
