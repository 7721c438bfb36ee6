# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format of the turbo KV cache dtypes.

Every constant of the format is defined here and nowhere else. The module
imports nothing but the standard library, so configuration code can use it.

The method is the MSE variant of TurboQuant (Zandieh et al., arXiv:2504.19874): rotate a
vector at random, then quantise each coordinate with a fixed scalar codebook. Three
things differ from the paper. There is no vector norm. Instead each group of 16 rotated
coordinates has a scale, which costs the same bytes and follows the local energy.
Three-bit codes are trellis-coded (Marcellin and Fischer, doi:10.1109/26.46532): each
chooses among half of 16 levels, and the codes before it determine the half. And there
is no QJL residual, because its unbiased estimate has a variance that the softmax
amplifies.

The format is an ABI, because pages may outlive the process that wrote them. It is
frozen, including the order of bytes within a plane: any change is a new dtype name.
Pages that are kept or exchanged carry ``LAYOUT_VERSION``, and pages with another
version are not taken.
"""

import math
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

# The version of this format. Frozen: another version would be another format under the
# same name.
LAYOUT_VERSION = 2

# Tokens of a tile. A page is a whole number of tiles.
TILE_TOKENS = 16
# Rotated coordinates that share a scale and, with three bits, a trellis.
SCALE_GROUP = 16
# Rotated coordinates to a byte of scales.
SCALE_BYTE_COORDINATES = 32
# Codes of a unit, the unit of packing: see TurboFormat.
UNIT_CODES = 8
# Levels of a codebook, and the subsets that a trellis divides them into: level l is
# in subset l % 4.
NUM_LEVELS = 16
NUM_SUBSETS = 4

# Scales are unsigned E5M3: byte << 7 is the bit pattern of the fp16 number with the
# same value. 0xF8 and above would be Inf and NaN and are never written.
SCALE_SHIFT = 7
SCALE_CODE_MAX = 0xF7
SCALE_MAX = 61440.0
SMALLEST_SCALE = 2.0**-17

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
# With a direction in which queries look, DIRECTED_MOVES codes may move, and a squared
# error along the direction weighs DIRECTION_WEIGHT times as much as one across it. With
# three bits the search finds a part of the direction as well. A direction is as long as
# the square root of the head size. Terms of an error's product with it have
# DIRECTION_FRACTION_BITS fractional bits.
DIRECTED_MOVES = 3
DIRECTION_WEIGHT = 64.0
DIRECTION_FRACTION_BITS = 10

# Candidates of the scale search: steps on the E5M3 grid from the group's largest
# magnitude, rounded down. The base of a word is tried at the largest of the groups'
# best scales, and at steps below it, from which more of the smaller ones are in reach.
SCALE_OFFSETS = (-1, 0, 1, 2, 3)
BASE_OFFSETS = (0, -1, -2)

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 512)


def fp32(value: float) -> float:
    """The nearest fp32 number."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def half2_bits(value: float) -> str:
    """A number twice in fp16, as a 32-bit hexadecimal literal of C++ and PTX."""
    bits = struct.unpack("<H", struct.pack("<e", value))[0]
    return f"0x{bits:04X}{bits:04X}"


def direction_pull(head_size: int) -> float:
    """The weight of an error's squared product with a direction, in the encoder's cost.

    It is beside 1 for a squared error, for a vector whose square is 1. Products are in
    units of 2**-DIRECTION_FRACTION_BITS, and the square and errors in units of
    2**-PRODUCT_FRACTION_BITS.
    """
    exponent = PRODUCT_FRACTION_BITS - 2 * DIRECTION_FRACTION_BITS
    return fp32(DIRECTION_WEIGHT * 2.0**exponent / head_size)


@dataclass(frozen=True)
class Codebook:
    """The codebook of K or V at one number of bits.

    Level l, of 16, is at the signed half-integer position ``u = l - 15 / 2``, and is an
    odd function of it. The largest is about 1. A coordinate is ``scale * level``. A
    code of four bits is l. A code of three bits gives l together with the two codes
    before it (see ``TurboFormat``).

    Attributes:
        bits: Bits of a code.
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

    bits: int
    magnitudes: tuple[float, ...]
    coefficients: tuple[float, float]
    gain: float = 1.0
    unbiased: bool = False

    @property
    def trellis(self) -> bool:
        """Whether codes are trellis-coded."""
        return self.bits == 3

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """All 16 levels, ascending."""
        return tuple(-m for m in reversed(self.magnitudes)) + self.magnitudes

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """Decision thresholds between neighbouring magnitudes."""
        return _midpoints(self.magnitudes)

    @cached_property
    def subset_thresholds(self) -> tuple[tuple[float, ...], ...]:
        """Decision thresholds between neighbouring levels of each subset."""
        return tuple(
            _midpoints(self.levels[s::NUM_SUBSETS]) for s in range(NUM_SUBSETS)
        )


def _midpoints(levels: tuple[float, ...]) -> tuple[float, ...]:
    return tuple((low + high) / 2 for low, high in zip(levels, levels[1:]))


# Fitted by tests/kernels/turbo/formats/fit_codebooks.py to Gaussian vectors, with the
# scale search, for three and four bits at once. Key levels are integers over
# KEY_LEVEL_UNIT, so that a code becomes an int8 operand as well as an fp16 one. The
# largest leaves room for one more, for kernels that store upper levels plus 1 and add
# -1.
KEY_LEVEL_UNIT = 128
KEY_LEVELS = (6, 18, 31, 45, 61, 79, 101, 126)
KEY_COEFFICIENTS = (46.84375, 5.73828125)
KEY_GAINS = {4: 1.00543, 3: 1.01853}
VALUE_COEFFICIENTS = (0.291259765625, 0.1263427734375)


def _value_levels(a: float, b: float) -> tuple[float, ...]:
    positions = [(u + 0.5) / 4 for u in range(NUM_LEVELS // 2)]
    return tuple(v * (a + b * v) for v in positions)


KEY_CODEBOOKS = {
    bits: Codebook(
        bits,
        tuple(m / KEY_LEVEL_UNIT for m in KEY_LEVELS),
        KEY_COEFFICIENTS,
        gain,
        unbiased=True,
    )
    for bits, gain in KEY_GAINS.items()
}
VALUE_CODEBOOKS = {
    bits: Codebook(bits, _value_levels(*VALUE_COEFFICIENTS), VALUE_COEFFICIENTS)
    for bits in (4, 3)
}

# (key bits, value bits) by cache dtype.
TURBO_PRESETS: dict[str, tuple[int, int]] = {
    "turbo4": (4, 4),
    "k4v3": (4, 3),
    "turbo3": (3, 3),
}


def is_turbo_cache_dtype(cache_dtype: str | None) -> bool:
    """Whether ``cache_dtype`` is stored in this format."""
    return cache_dtype in TURBO_PRESETS


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

    @property
    def num_groups(self) -> int:
        """Scale groups of a vector."""
        return self.num_words * self.word_groups

    @property
    def num_bytes(self) -> int:
        """Bytes of a vector's scales."""
        return self.num_words * self.word_bytes

    @property
    def max_delta(self) -> int:
        return (1 << self.delta_bits) - 1


@cache
def scale_words(head_size: int) -> ScaleWords:
    """The scale words of vectors of ``head_size``: ceil(D / 32) bytes.

    A word serves up to 128 coordinates. Eight deltas of 3 bits fill 32 bits. Shorter
    words may have 2 bits for a delta, which then counts by two, because the scales of a
    vector differ by more than three steps.
    """
    num_bytes = math.ceil(head_size / SCALE_BYTE_COORDINATES)
    word_bytes = num_bytes
    if num_bytes > 4:
        word_bytes = 4 if num_bytes % 4 == 0 else 2
    num_words = num_bytes // word_bytes
    word_groups = head_size // SCALE_GROUP // num_words
    delta_bits = min(3, 8 * (word_bytes - 1) // word_groups)
    return ScaleWords(
        num_words, word_bytes, word_groups, delta_bits, 1 if delta_bits == 3 else 2
    )


@dataclass(frozen=True)
class TurboFormat:
    """The layout of one turbo cache dtype at one head size, or one of K and one of V.

    The bytes of one (block, KV head) are one contiguous region: a sequence of tiles of
    16 tokens, with ``tile_bytes`` bytes each. So a cut at a multiple of 16 tokens is a
    cut in bytes. D is the head size of a plane's vectors, which are K or V, and
    S = ceil(D / 32) the bytes of a vector's scales. K and V may differ in D. With n the
    token's index in its tile, a tile is

    ==================  =========================  ==========================
    plane               bytes                      address within the plane
    ==================  =========================  ==========================
    K codes             16 * D * key_bits / 8      see below
    V codes             16 * D * value_bits / 8    see below
    K scales            16 * S                     n * S, see ScaleWords
    V scales            16 * S                     n * S, see ScaleWords
    ==================  =========================  ==========================

    Coordinate r of a rotated vector is code ``r // U`` of unit ``r % U``, with
    U = D / 8 units of eight codes. Group g, of G = D / 16, has units g and g + G: 16
    coordinates with one scale. The coordinates are rotated, so any assignment to
    groups is as good as another.

    * 4 bits, K: unit u of token n is the little-endian 32-bit word at
      ``n * D / 2 + 4 * u``; code i is its bits ``4 * i`` to ``4 * i + 3``: the index of
      a level.
    * 3 bits: a code is a branch of two bits and a path bit. The codes i of units
      g + p * G have the order ``e = 2 * i + p`` in their group. Code e has the branch
      c(e) and the path bit b(e), which is zero before the first code. The index of its
      level is ``4 * c(e) + 2 * (b(e) ^ b(e - 2)) + b(e - 1)``. This is Ungerboeck's
      trellis of four states, from state zero in each group: the levels of neighbouring
      codes are in subsets that the path bits allow. There are two planes, one after the
      other: branches, D / 4 bytes of a token, and path bits, D / 8 bytes.
    * 3 bits, K: group g of token n has its branches in the 32-bit word at
      ``n * D / 4 + 4 * g``. The branch of e = 2 * i + p is bits 4 * i + 2 * p and
      4 * i + 2 * p + 1. If G is even, groups g = 2 * q + a share the 32-bit word of
      path bits at ``n * D / 8 + 4 * q``, in bits ``4 * i + 2 * a + p``. If G is odd, a
      group has the 16-bit word at ``n * D / 8 + 2 * g``, with bits ``2 * i + p``.

    Codes of V are in 16-bit words, with the words of two tokens interleaved, for the
    tensor core. With token n = 8 * h + 2 * t + j, unit g + p * G and code
    i = 2 * k + c:

    * 4 bits: the four codes with the same c are the word at
      ``4 * D * h + 64 * g + 16 * t + 8 * p + 4 * c + 2 * j``. Code k is bits ``4 * k``
      to ``4 * k + 3`` of the word rotated right by two bits.
    * 3 bits: the eight branches with the same c are the word at
      ``2 * D * h + 32 * g + 8 * t + 4 * c + 2 * j``. The branch of k and p is bits
      ``4 * k + 2 * (1 - p)`` and ``4 * k + 2 * (1 - p) + 1`` of the word rotated right
      by four bits. Path bits are the word at ``D * h + 16 * g + 4 * t + 2 * j``, with
      b(e) in bit e.

    Every byte belongs to one token, so tokens of a page are written independently.
    Bytes of a token and KV head, which are 4 * D in bf16 if K and V have the same D:

    =========  ======  ======  ======
    head size  turbo4    k4v3  turbo3
    =========  ======  ======  ======
           64      68      60      52
           80      86      76      66
           96     102      90      78
          112     120     106      92
          128     136     120     104
          192     204     180     156
          256     272     240     208
          512     544     480     416
    =========  ======  ======  ======

    K and V have half of these bytes each with ``turbo4`` and ``turbo3``, so those of
    two sizes are the sum of two halves. ``turbo4`` with K of 192 and V of 128 has
    102 + 68 = 170.

    Attributes:
        name: The ``--kv-cache-dtype`` value.
        key_bits: Bits of a key code.
        value_bits: Bits of a value code.
        head_size: Coordinates of a K vector.
        head_size_v: Coordinates of a V vector.

    """

    name: str
    key_bits: int
    value_bits: int
    head_size: int
    head_size_v: int

    @staticmethod
    def from_cache_dtype(
        cache_dtype: str, head_size: int, head_size_v: int | None = None
    ) -> "TurboFormat":
        """The layout of a preset.

        Args:
            cache_dtype: A key of ``TURBO_PRESETS``.
            head_size: Coordinates of a K vector.
            head_size_v: Coordinates of a V vector; None for ``head_size``.

        Raises:
            ValueError: If the dtype is not a turbo preset, or a head size has no
                rotation.

        """
        if cache_dtype not in TURBO_PRESETS:
            raise ValueError(
                f"Unknown turbo cache dtype {cache_dtype!r}; the presets are "
                f"{', '.join(TURBO_PRESETS)}."
            )
        if head_size_v is None:
            head_size_v = head_size
        for size in (head_size, head_size_v):
            if size not in HEAD_SIZES:
                sizes = ", ".join(map(str, HEAD_SIZES))
                raise ValueError(
                    f"--kv-cache-dtype {cache_dtype} supports head sizes {sizes}, "
                    f"not {size}. Use --kv-cache-dtype fp8 for this model."
                )
        bits = TURBO_PRESETS[cache_dtype]
        return TurboFormat(cache_dtype, *bits, head_size, head_size_v)

    @property
    def is_even(self) -> bool:
        """Whether K and V have the same head size."""
        return self.head_size == self.head_size_v

    @property
    def key_codebook(self) -> Codebook:
        return KEY_CODEBOOKS[self.key_bits]

    @property
    def value_codebook(self) -> Codebook:
        return VALUE_CODEBOOKS[self.value_bits]

    @property
    def num_units(self) -> int:
        """Units (groups of eight codes) of a key."""
        return self.head_size // UNIT_CODES

    @property
    def num_units_v(self) -> int:
        """Units of a value."""
        return self.head_size_v // UNIT_CODES

    @property
    def num_groups(self) -> int:
        """Scale groups of a key."""
        return self.head_size // SCALE_GROUP

    @property
    def num_groups_v(self) -> int:
        """Scale groups of a value."""
        return self.head_size_v // SCALE_GROUP

    @property
    def scale_words(self) -> ScaleWords:
        """The storage of a key's scales."""
        return scale_words(self.head_size)

    @property
    def scale_words_v(self) -> ScaleWords:
        """The storage of a value's scales."""
        return scale_words(self.head_size_v)

    @property
    def key_code_bytes(self) -> int:
        """Bytes of a key's codes."""
        return self.head_size * self.key_bits // 8

    @property
    def value_code_bytes(self) -> int:
        """Bytes of a value's codes."""
        return self.head_size_v * self.value_bits // 8

    @property
    def key_packed_size(self) -> int:
        """Bytes of a key, scales included."""
        return self.key_code_bytes + self.scale_words.num_bytes

    @property
    def value_packed_size(self) -> int:
        """Bytes of a value, scales included."""
        return self.value_code_bytes + self.scale_words_v.num_bytes

    @property
    def slot_size(self) -> int:
        """Bytes of a token and KV head: C of the page shape [B, H, N, C]."""
        return self.key_packed_size + self.value_packed_size

    @property
    def tile_bytes(self) -> int:
        return TILE_TOKENS * self.slot_size

    @property
    def value_codes_offset(self) -> int:
        """Byte offset of the V codes in a tile."""
        return TILE_TOKENS * self.key_code_bytes

    @property
    def key_scales_offset(self) -> int:
        """Byte offset of the K scales in a tile."""
        return self.value_codes_offset + TILE_TOKENS * self.value_code_bytes

    @property
    def value_scales_offset(self) -> int:
        """Byte offset of the V scales in a tile."""
        return self.key_scales_offset + TILE_TOKENS * self.scale_words.num_bytes
