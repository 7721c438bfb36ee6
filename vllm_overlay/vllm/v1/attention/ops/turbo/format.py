# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format of the turbo KV cache dtypes.

Every constant of the format is defined here and nowhere else. The module
imports nothing but the standard library, so configuration code can use it.

The method is TurboQuant (Zandieh et al., arXiv:2504.19874), its MSE variant:
rotate a vector at random, then quantise each coordinate with a fixed scalar
codebook. Three things differ from the paper. There is no vector norm; instead
each group of 16 rotated coordinates has a scale, which costs the same bytes and
follows the local energy. Three-bit codes are trellis-coded (Marcellin and Fischer,
doi:10.1109/26.46532): each chooses among half of 16 levels, and which half follows
from the codes before it. And there is no QJL residual: its unbiased
estimate has a variance that the softmax amplifies.

The format is an ABI, for pages may outlive the process that wrote them. It is frozen,
the order of bytes within a plane, too: any change is a new dtype name.
``LAYOUT_VERSION`` goes along with pages that are kept or exchanged: those that a build
with another one has written are not taken.
"""

import math
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

# The version of all of this. Frozen: another is another format under the same name.
LAYOUT_VERSION = 2

# Tokens a tile. A page is a whole number of tiles.
TILE_TOKENS = 16
# Rotated coordinates that share a scale and, with three bits, a trellis.
SCALE_GROUP = 16
# Rotated coordinates to a byte of scales.
SCALE_BYTE_COORDINATES = 32
# Codes a unit: the unit of packing, see TurboFormat.
UNIT_CODES = 8
# Levels of a codebook, and the subsets that a trellis divides them into: level l is
# in subset l % 4.
NUM_LEVELS = 16
NUM_SUBSETS = 4

# Scales are unsigned E5M3: byte << 7 is the bit pattern of the fp16 number of
# that value. 0xF8 and above would be Inf and NaN and are never written.
SCALE_SHIFT = 7
SCALE_CODE_MAX = 0xF7
SCALE_MAX = 61440.0
SMALLEST_SCALE = 2.0**-17

# A vector is rotated as integers: it is scaled by the power of two that brings
# its largest magnitude to [2**10, 2**11) and rounded, so every product is +-1
# times an integer that fp16 holds and every sum is exact in fp32, whatever the
# order. The encoder's bytes are then the same on every device. The rounding is
# 1/2048 of the largest input at most, below bf16's own.
ROTATION_EXPONENT = 10
# Below this exponent a vector is rounded to zero (its scales would be zero).
MIN_INPUT_EXPONENT = -100

# Squared errors of the scale search, relative to the vector's largest magnitude,
# are rounded to this many fractional bits and to at most ERROR_MAX: their sums over a
# word's groups then are exact in fp32 and do not depend on the order either.
ERROR_FRACTION_BITS = 16
ERROR_MAX = 1.0
ERROR_MAX_EXPONENT = 20

# Keys' codes are chosen such that a decoded key's product with the key itself is the
# key's square: the error along the key is what attention feels most. Rounds of the
# search for a factor that does it, how far it may go from 1, and the fractional bits
# that the products' terms are rounded to, so that their sums, too, are exact. What is
# left may be mended by moving one code to the next level: how much a squared error
# along the key weighs there against one across it.
UNBIAS_ROUNDS = 3
UNBIAS_LIMIT = 0.0625
PRODUCT_FRACTION_BITS = 12
BIAS_WEIGHT = 16.0

# Candidates of the scale search: steps on the E5M3 grid from the group's largest
# magnitude, rounded down. The base of a word is tried at the largest of the groups'
# best scales, and steps below it: then more of the smaller ones are in reach.
SCALE_OFFSETS = (-1, 0, 1, 2, 3)
BASE_OFFSETS = (0, -1, -2)

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 512)


def fp32(value: float) -> float:
    """The nearest fp32 number."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


@dataclass(frozen=True)
class Codebook:
    """Codebook of one side (K or V) at one width.

    Level l, of 16, lies at the signed half-integer position ``u = l - 15 / 2`` and is
    odd in it. The largest is about 1; a coordinate is ``scale * level``. A code of
    four bits is l. A code of three bits, with the two before it, is (see
    ``TurboFormat``).

    Attributes:
        bits: Bits a code.
        magnitudes: Levels of the upper half, ascending.
        coefficients: fp16 numbers (a, b) that kernels evaluate levels with, at
            v = u / 4, less than 2. Of a value codebook the level is
            ``v * (a + b * abs(v))``. Of a key codebook ``v * (a + b * v**2)`` is within
            1/2 of ``KEY_LEVEL_UNIT * level``, also when evaluated in fp16, so rounding
            it gives that exactly. In v neither coefficient, times a scale, overflows
            fp16, nor is it subnormal before the coordinate is.
        gain: The factor of decoded coordinates with which
            ``E[decode(x) * x] = E[x * x]`` on Gaussian vectors. Keys apply it
            through the softmax scale; values do not (least squares).
        unbiased: Whether the encoder makes that hold for each vector.

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


# Fitted by tests/kernels/turbo/fit_codebooks.py to Gaussian vectors, with the scale
# search, to both widths at once. Key levels are integers over KEY_LEVEL_UNIT, so that a
# code becomes an int8 operand as well as an fp16 one; the largest leaves room for one
# more, for kernels that have upper levels as a sum with -1.
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

# cache dtype -> (key bits, value bits)
TURBO_PRESETS: dict[str, tuple[int, int]] = {
    "turbo4": (4, 4),
    "k4v3": (4, 3),
    "turbo3": (3, 3),
}


def is_turbo_cache_dtype(cache_dtype: str | None) -> bool:
    """Whether ``cache_dtype`` is stored in this format."""
    return cache_dtype in TURBO_PRESETS


class ScaleWords(NamedTuple):
    """How the scales of a vector are stored: ``num_words`` little-endian words.

    A word holds the scales of ``word_groups`` groups: scale group g is place
    ``g % word_groups`` of word ``g // word_groups``. The low byte is a base, a
    scale code; above it lie ``delta_bits`` bits a place, the first lowest. The
    code of a group is ``base - delta_step * delta``, never negative. Spare bits
    are zero.

    Attributes:
        num_words: Words a vector.
        word_bytes: Bytes a word.
        word_groups: Groups a word.
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
        """Scale groups a vector."""
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
    """Scale words of vectors of ``head_size``: ceil(D / 32) bytes.

    A word serves up to 128 coordinates. Eight deltas of 3 bits fill 32 bits; shorter
    words may leave 2 bits, which then count by two, for scales of a vector differ by
    more than three.
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
    """Layout of one turbo cache dtype at one head size.

    For one (block, KV head) the tokens' bytes are one contiguous region: a
    sequence of tiles of 16 tokens, each of ``tile_bytes`` bytes, so a cut at a
    multiple of 16 tokens is a cut in bytes. With D the head size, S =
    ceil(D / 32) bytes of scales a vector and n the token's index in its tile, a tile is

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
    * 3 bits: a branch of two bits and a path bit. With the codes of a group in the
      order ``e = 2 * i + p`` of codes i of units g + p * G, branch c(e) and path bit
      b(e), zero before the first, the index of the level is
      ``4 * c(e) + 2 * (b(e) ^ b(e - 2)) + b(e - 1)``: Ungerboeck's trellis of four
      states, from state zero in each group, where neighbouring codes' levels are in
      subsets that the path bits allow. There are two planes, one after the other: of
      branches, D / 4 bytes a token, and of path bits, D / 8.
    * 3 bits, K: group g of token n has its branches in the 32-bit word at
      ``n * D / 4 + 4 * g``, those of e = 2 * i + p in bits 4 * i + 2 * p and above it.
      If G is even, groups g = 2 * q + a share the 32-bit word of path bits at
      ``n * D / 8 + 4 * q``, in bits ``4 * i + 2 * a + p``; else a group has the 16-bit
      word at ``n * D / 8 + 2 * g``, with bits ``2 * i + p``.

    Codes of V are in 16-bit words, two tokens' interleaved, as the tensor core wants
    them. With token n = 8 * h + 2 * t + j, unit g + p * G and code i = 2 * k + c:

    * 4 bits: codes of one c are the word at
      ``4 * D * h + 64 * g + 16 * t + 8 * p + 4 * c + 2 * j``; code k of it is bits
      ``4 * k`` to ``4 * k + 3`` of the word rotated right by two bits.
    * 3 bits: branches of one c, of both p, are the word at
      ``2 * D * h + 32 * g + 8 * t + 4 * c + 2 * j``; that of k and p is bits
      ``4 * k + 2 * (1 - p)`` and the next of the word rotated right by four bits. Path
      bits are the word at ``D * h + 16 * g + 4 * t + 2 * j``, bit e that of e.

    Every byte belongs to one token, so tokens of a page are written independently.
    Bytes a token and KV head, of 4 * D in bf16:

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

    Attributes:
        name: The ``--kv-cache-dtype`` value.
        key_bits: Bits a key code.
        value_bits: Bits a value code.
        head_size: Size of a K and of a V vector.

    """

    name: str
    key_bits: int
    value_bits: int
    head_size: int

    @staticmethod
    def from_cache_dtype(cache_dtype: str, head_size: int) -> "TurboFormat":
        """The layout of a preset.

        Raises:
            ValueError: If the dtype is no turbo preset or the head size has
                no rotation.

        """
        if cache_dtype not in TURBO_PRESETS:
            raise ValueError(
                f"Unknown turbo cache dtype {cache_dtype!r}; the presets are "
                f"{', '.join(TURBO_PRESETS)}."
            )
        if head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            raise ValueError(
                f"--kv-cache-dtype {cache_dtype} supports head sizes {sizes}, "
                f"not {head_size}. Use --kv-cache-dtype fp8 for this model."
            )
        key_bits, value_bits = TURBO_PRESETS[cache_dtype]
        return TurboFormat(cache_dtype, key_bits, value_bits, head_size)

    @property
    def key_codebook(self) -> Codebook:
        return KEY_CODEBOOKS[self.key_bits]

    @property
    def value_codebook(self) -> Codebook:
        return VALUE_CODEBOOKS[self.value_bits]

    @property
    def num_units(self) -> int:
        """Units (groups of eight codes) a vector."""
        return self.head_size // UNIT_CODES

    @property
    def num_groups(self) -> int:
        """Scale groups a vector."""
        return self.head_size // SCALE_GROUP

    @property
    def scale_words(self) -> ScaleWords:
        """How the scales of a vector are stored."""
        return scale_words(self.head_size)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a vector's scales."""
        return math.ceil(self.head_size / SCALE_BYTE_COORDINATES)

    @property
    def key_code_bytes(self) -> int:
        """Bytes of a key's codes."""
        return self.head_size * self.key_bits // 8

    @property
    def value_code_bytes(self) -> int:
        """Bytes of a value's codes."""
        return self.head_size * self.value_bits // 8

    @property
    def key_packed_size(self) -> int:
        """Bytes of a key, scales included."""
        return self.key_code_bytes + self.scale_bytes

    @property
    def value_packed_size(self) -> int:
        """Bytes of a value, scales included."""
        return self.value_code_bytes + self.scale_bytes

    @property
    def slot_size(self) -> int:
        """Bytes a token and KV head: C of the page shape [B, H, N, C]."""
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
        return self.key_scales_offset + TILE_TOKENS * self.scale_bytes
