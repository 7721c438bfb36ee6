# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format of ``--kv-cache-dtype turbo4``.

Every constant of the format is defined here and nowhere else. The module
imports nothing but the standard library, so configuration code can use it.

The method is the MSE variant of TurboQuant (Zandieh et al., arXiv:2504.19874): rotate a
vector at random, then quantise each coordinate with a fixed scalar codebook. Two things
differ from the paper. There is no vector norm. Instead each group of 16 rotated
coordinates has a scale, which costs the same bytes and follows the local energy. And
there is no QJL residual, because its unbiased estimate has a variance that the softmax
amplifies.

The format is an ABI, because pages may outlive the process that wrote them. It is
frozen, including the order of bytes within a plane: any change is a new dtype name.
"""

import struct
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

# Tokens of a tile. A page is a whole number of tiles.
TILE_TOKENS = 16
# Rotated coordinates that share a scale.
SCALE_GROUP = 16
# Rotated coordinates to a byte of scales.
SCALE_BYTE_COORDINATES = 32
# Codes of a unit, the unit of packing: see TurboFormat.
UNIT_CODES = 8
# Levels of a codebook, and bits of a code.
NUM_LEVELS = 16
CODE_BITS = 4

# Scales are unsigned E5M3: byte << 7 is the bit pattern of the fp16 number with the
# same value. 0xF8 and above would be Inf and NaN and are never written.
SCALE_SHIFT = 7
SCALE_CODE_MAX = 0xF7
SCALE_MAX = 61440.0

# A vector is rotated as integers. It is scaled by the power of two that brings its
# largest magnitude to [2**10, 2**11), and rounded. So every product is +-1 times an
# integer that fp16 holds, and every sum is exact in fp32, whatever the order. The
# encoder's bytes are then the same on every device. The rounding is at most 1/2048 of
# the largest input, which is below bf16's own rounding.
ROTATION_EXPONENT = 10
# Below this exponent a vector is rounded to zero (its scales would be zero).
MIN_INPUT_EXPONENT = -100

# Squared errors of the scale search are relative to the vector's largest magnitude.
# They are rounded to this many fractional bits, and are at most ERROR_MAX. Their sums
# over a word's groups then are exact in fp32, and do not depend on the order either.
ERROR_FRACTION_BITS = 16
ERROR_MAX = 1.0
ERROR_MAX_EXPONENT = 20

# Keys' codes are chosen such that a decoded key's product with the key itself is the
# key's square, because attention is most sensitive to the error along the key. A search
# finds a factor for this, in UNBIAS_ROUNDS rounds, at most UNBIAS_LIMIT from 1. Terms
# of products have PRODUCT_FRACTION_BITS fractional bits, so that their sums are exact.
# Moving one code to the next level may correct the rest. There a squared error along
# the key weighs BIAS_WEIGHT times as much as one across it.
UNBIAS_ROUNDS = 3
UNBIAS_LIMIT = 0.0625
PRODUCT_FRACTION_BITS = 12
BIAS_WEIGHT = 16.0

# Candidates of the scale search: steps on the E5M3 grid from the group's largest
# magnitude, rounded down. The base of a word is tried at the largest of the groups'
# best scales, and at steps below it, from which more of the smaller ones are in reach.
SCALE_OFFSETS = (-1, 0, 1, 2, 3)
BASE_OFFSETS = (0, -1, -2)

# Powers of two, up to FlashAttention's largest.
HEAD_SIZES = (64, 128, 256)


def fp32(value: float) -> float:
    """The nearest fp32 number."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


@dataclass(frozen=True)
class Codebook:
    """The codebook of K or V.

    Level l, of 16, is at the signed half-integer position ``u = l - 15 / 2``, and is an
    odd function of it. The largest is about 1. A coordinate is ``scale * level``.

    Attributes:
        magnitudes: Levels of the upper half, ascending.
        coefficients: fp16 numbers (a, b) from which kernels evaluate levels, at
            v = u / 4, less than 2. A value's level is ``v * (a + b * abs(v))``. For a
            key, ``v * (a + b * v**2)`` is within 1/2 of ``KEY_LEVEL_UNIT * level``,
            also when evaluated in fp16, so rounding gives that exactly. With v as the
            argument, neither coefficient times a scale overflows fp16, nor is it
            subnormal before the coordinate is.
        gain: The factor of decoded coordinates with which
            ``E[decode(x) * x] = E[x * x]`` on Gaussian vectors. Keys apply it
            through the softmax scale; values do not (least squares).
        unbiased: Whether the encoder makes this equation hold for each vector.

    """

    magnitudes: tuple[float, ...]
    coefficients: tuple[float, float]
    gain: float = 1.0
    unbiased: bool = False

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """Decision thresholds between neighbouring magnitudes."""
        return tuple((m + n) / 2 for m, n in zip(self.magnitudes, self.magnitudes[1:]))


# Fitted to Gaussian vectors with the scale search. Key levels are integers over
# KEY_LEVEL_UNIT, so that a code becomes an int8 operand as well as an fp16 one.
KEY_LEVEL_UNIT = 128
KEY_LEVELS = (6, 18, 31, 45, 61, 79, 101, 126)
KEY_COEFFICIENTS = (46.84375, 5.73828125)
KEY_GAIN = 1.00543
VALUE_COEFFICIENTS = (0.291259765625, 0.1263427734375)


def _value_levels(a: float, b: float) -> tuple[float, ...]:
    positions = [(u + 0.5) / 4 for u in range(NUM_LEVELS // 2)]
    return tuple(v * (a + b * v) for v in positions)


KEY_CODEBOOK = Codebook(
    tuple(m / KEY_LEVEL_UNIT for m in KEY_LEVELS),
    KEY_COEFFICIENTS,
    KEY_GAIN,
    unbiased=True,
)
VALUE_CODEBOOK = Codebook(_value_levels(*VALUE_COEFFICIENTS), VALUE_COEFFICIENTS)


class ScaleWords(NamedTuple):
    """The storage of a vector's scales: ``num_words`` little-endian words.

    A word holds the scales of ``word_groups`` groups: scale group g is place
    ``g % word_groups`` of word ``g // word_groups``. The low byte is a base, which is a
    scale code. Above it each place has ``delta_bits`` bits, the first place lowest. The
    code of a group is ``base - delta_step * delta``, never negative. Spare bits are
    zero.

    Attributes:
        num_words: Words of a vector.
        word_bytes: Bytes of a word.
        word_groups: Groups of a word.
        delta_bits: Bits of a delta.
        delta_step: Steps of the scale grid to a unit of delta.

    """

    num_words: int
    word_bytes: int
    word_groups: int
    delta_bits: int
    delta_step: int


@cache
def scale_words(head_size: int) -> ScaleWords:
    """The scale words of vectors of ``head_size``: D / 32 bytes.

    A word serves up to 128 coordinates. Eight deltas of 3 bits fill 32 bits. A shorter
    word has 2 bits for a delta, which then counts by two, because the scales of a
    vector differ by more than three steps.
    """
    num_bytes = head_size // SCALE_BYTE_COORDINATES
    word_bytes = min(num_bytes, 4)
    num_words = num_bytes // word_bytes
    word_groups = head_size // SCALE_GROUP // num_words
    delta_bits = 8 * (word_bytes - 1) // word_groups
    return ScaleWords(
        num_words, word_bytes, word_groups, delta_bits, 1 if delta_bits == 3 else 2
    )


@dataclass(frozen=True)
class TurboFormat:
    """The layout of ``turbo4`` at one head size.

    The bytes of one (block, KV head) are one contiguous region: a sequence of tiles of
    16 tokens, with ``tile_bytes`` bytes each. So a cut at a multiple of 16 tokens is a
    cut in bytes. With D the head size, S = D / 32 the bytes of a vector's scales
    and n the token's index in its tile, a tile is

    ==================  ============  ==========================
    plane               bytes         address within the plane
    ==================  ============  ==========================
    K codes             16 * D / 2    see below
    V codes             16 * D / 2    see below
    K scales            16 * S        n * S, see ScaleWords
    V scales            16 * S        n * S, see ScaleWords
    ==================  ============  ==========================

    Coordinate r of a rotated vector is code ``r // U`` of unit ``r % U``, with
    U = D / 8 units of eight codes. Group g, of G = D / 16, has units g and g + G: 16
    coordinates with one scale. The coordinates are rotated, so any assignment to
    groups is as good as another.

    * K: unit u of token n is the little-endian 32-bit word at ``n * D / 2 + 4 * u``;
      code i is its bits ``4 * i`` to ``4 * i + 3``: the index of a level.
    * V: codes are in 16-bit words, with the words of two tokens interleaved, for the
      tensor core. With token n = 8 * h + 2 * t + j, unit g + p * G and code
      i = 2 * k + c, the four codes with the same c are the word at
      ``4 * D * h + 64 * g + 16 * t + 8 * p + 4 * c + 2 * j``. Code k is bits ``4 * k``
      to ``4 * k + 3`` of the word rotated right by two bits.

    Every byte belongs to one token, so tokens of a page are written independently. A
    token and KV head of 128 takes 136 bytes, of 512 in bf16.

    Attributes:
        head_size: Coordinates of a K vector and of a V vector.

    """

    head_size: int

    @property
    def name(self) -> str:
        """The ``--kv-cache-dtype`` value."""
        return "turbo4"

    @property
    def num_units(self) -> int:
        """Units (groups of eight codes) of a vector."""
        return self.head_size // UNIT_CODES

    @property
    def num_groups(self) -> int:
        """Scale groups of a vector."""
        return self.head_size // SCALE_GROUP

    @property
    def scale_words(self) -> ScaleWords:
        """The storage of a vector's scales."""
        return scale_words(self.head_size)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a vector's scales."""
        return self.head_size // SCALE_BYTE_COORDINATES

    @property
    def code_bytes(self) -> int:
        """Bytes of a vector's codes."""
        return self.head_size * CODE_BITS // 8

    @property
    def slot_size(self) -> int:
        """Bytes of a token and KV head: C of the page shape [B, H, N, C]."""
        return 2 * (self.code_bytes + self.scale_bytes)

    @property
    def tile_bytes(self) -> int:
        return TILE_TOKENS * self.slot_size

    @property
    def value_codes_offset(self) -> int:
        """Byte offset of the V codes in a tile."""
        return TILE_TOKENS * self.code_bytes

    @property
    def key_scales_offset(self) -> int:
        """Byte offset of the K scales in a tile."""
        return self.value_codes_offset + TILE_TOKENS * self.code_bytes

    @property
    def value_scales_offset(self) -> int:
        """Byte offset of the V scales in a tile."""
        return self.key_scales_offset + TILE_TOKENS * self.scale_bytes
