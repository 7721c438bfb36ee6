# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format of the turbo KV cache dtypes with multi-head latent attention.

MLA caches one vector for each token: the compressed latent, and the rotary key that all
heads share. The vector is K, and without its rotary part it is V. The latent is stored
like the vectors of ``format``: rotated, with scales of groups of 16 and codes of four
or three bits. One codebook serves both roles. It has the levels of values, so that a
kernel decodes once to 16 bits for both products, and the unbiased encoder of keys
chooses among them. The gain that belongs to this encoder is part of the decoded
coordinate, because it cannot be part of the softmax scale alone. The rotary part is
int8 and not rotated, because rotary embeddings come after the projection that would
include a rotation.

``format`` has the constants that both formats share, and this module those of latents
alone. It imports nothing but the standard library. The format is equally frozen.
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

# Bits of a code of the latent, by cache dtype.
LATENT_PRESETS: dict[str, int] = {"turbo4": 4, "turbo3": 3}
# (latent rank, rotary coordinates) by vLLM's head size, which is their sum.
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

# The factors of coordinates with which ``E[decode(x) * x] = E[x * x]`` on Gaussian
# vectors. Tests measure them again.
LATENT_GAINS = {4: 1.0053, 3: 1.0185}
LATENT_CODEBOOKS = {
    bits: replace(VALUE_CODEBOOKS[bits], gain=gain, unbiased=True)
    for bits, gain in LATENT_GAINS.items()
}


@dataclass(frozen=True)
class LatentFormat:
    """The layout of one turbo cache dtype at one size of latent and of rotary part.

    The bytes of a block are one contiguous region: a sequence of tiles of 16 tokens,
    with ``tile_bytes`` bytes each. With L the rank, R the rotary coordinates and n the
    token's index in its tile, a tile is these planes, one after the other. A token's
    bytes in a plane are contiguous:

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
      8 * w + 7. The index of the level of coordinate 8 * w + 2 * k + h is bits
      ``4 * (k + 4 * h)`` to ``4 * (k + 4 * h) + 3``.
    * 3 bits: the trellis of ``format.TurboFormat``, from state zero in each group, in
      the order of coordinates. There are two planes, one after the other. Branches take
      L / 4 bytes of a token: group g has the 32-bit word at ``n * L / 4 + 4 * g``, and
      coordinate 16 * g + e its bits ``2 * e`` and ``2 * e + 1``. Path bits take L / 8
      bytes: group g has the 16-bit word at ``n * L / 8 + 2 * g``, and coordinate
      16 * g + e its bit ``e``.

    Words are little-endian. A rotary coordinate is its int8, -127 to 127, times the
    scale of its group of 16, coordinates 16 * s to 16 * s + 15. The scale is the
    smallest E5M3 number that holds the group's largest magnitude when multiplied by
    127.

    Every byte belongs to one token, so tokens of a page are written independently.
    Bytes of a token, which are 2 * (L + R) in bf16:

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
        bits: Bits of a code of the latent.
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
            ValueError: If the dtype does not support MLA, or has no such layout.

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
        """The codebook of the latent: its levels, gain and encoder."""
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
        """The storage of the latent's scales."""
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
        """Bytes of a token: C of the page shape [B, N, C]."""
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
