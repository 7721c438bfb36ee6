# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""Trellis-coded levels of the turbo format, for the encoder.

Every scale group is a separate trellis (see ``format.TurboFormat``), so vectors come as
16 tensors [T, G] in the order of a group's codes. A state is the number
2 * b(e - 2) + b(e - 1) of two path bits. CODEBOOK is ``trellis_constants`` of a
codebook.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook, fp32
from vllm.v1.attention.ops.turbo.triton.codec import (
    scale_value,
    store_halves,
    value_pointers,
    value_rows,
)
from vllm.v1.attention.ops.turbo.triton.direction import (
    PART_UNIT,
    cost_of,
    error_of,
    load_direction,
    pull_of,
)
from vllm.v1.attention.ops.turbo.triton.scales import (
    at,
    no_errors,
    normaliser_of,
    round_to_integer,
    rounded_square,
    scale_candidates,
    scales_in_reach,
    with_error,
)

_TILE = tl.constexpr(fmt.TILE_TOKENS)
_NUM_SUBSETS = tl.constexpr(fmt.NUM_SUBSETS)
_STEPS = tl.constexpr(fmt.SCALE_GROUP)
_SMALLEST_SCALE = tl.constexpr(fmt.SMALLEST_SCALE)
_NUM_CANDIDATES = tl.constexpr(len(fmt.SCALE_OFFSETS))
_PRODUCT_UNIT = tl.constexpr(float(1 << fmt.PRODUCT_FRACTION_BITS))
_UNBIAS_ROUNDS = tl.constexpr(fmt.UNBIAS_ROUNDS)
_UNBIAS_LIMIT = tl.constexpr(fmt.UNBIAS_LIMIT)


def trellis_constants(codebook: Codebook) -> tuple:
    """Levels, thresholds, and the gain of products; 0 if the codebook is biased.

    Threshold j is between levels j and j + 4, which are neighbours in subset j % 4.
    """
    by_branch = zip(*codebook.subset_thresholds)
    thresholds = tuple(threshold for branch in by_branch for threshold in branch)
    gain = fp32(codebook.gain * (1 << fmt.PRODUCT_FRACTION_BITS))
    gain = gain if codebook.unbiased else 0.0
    return codebook.levels, thresholds, gain


@triton.jit
def _step(
    y,  # [T, G] fp32
    normaliser,  # [T, 1] fp32
    scale,  # [T, G] fp32
    reciprocal,  # [T, G] fp32
    cost,  # fp32 [T, G] for each state
    CODEBOOK: tl.constexpr,
):
    """Extend the best path to each state by one code.

    Returns:
        Costs of the new states, and int32 [T, G] whose bit s is the bit that the best
        path to state s leaves behind.

    """
    LEVELS: tl.constexpr = CODEBOOK[0]
    THRESHOLDS: tl.constexpr = CODEBOOK[1]
    z = y * reciprocal
    errors = ()
    for s in tl.static_range(_NUM_SUBSETS):
        level = tl.full(z.shape, LEVELS[s], tl.float32)
        for j in tl.static_range(s, len(THRESHOLDS), _NUM_SUBSETS):
            level = tl.where(z > THRESHOLDS[j], LEVELS[j + _NUM_SUBSETS], level)
        errors = errors + (rounded_square((y - level * scale) * normaliser),)
    extended = ()
    survivors = tl.zeros(z.shape, tl.int32)
    for state in tl.static_range(4):
        # b(e - 1) and b(e) are state // 2 and state % 2.
        zero = cost[state // 2] + errors[2 * (state % 2) + state // 2]
        one = cost[2 + state // 2] + errors[2 * (1 - state % 2) + state // 2]
        extended = extended + (tl.minimum(one, zero),)
        survivors |= (one < zero).to(tl.int32) << state
    return extended, survivors


@triton.jit
def _initial_cost(like):
    """Costs of the states before the first code, fp32: paths begin in state 0."""
    never = tl.full(like.shape, float("inf"), tl.float32)
    return tl.zeros(like.shape, tl.float32), never, never, never


@triton.jit
def reciprocal_of(scale):
    return tl.div_rn(1.0, tl.maximum(scale, _SMALLEST_SCALE))


@triton.jit
def _direction_at(direction, E: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """Elements of directions beside code e of each group, fp32 [T, G].

    A direction is fp16 pointers [T, G] to the elements beside code 0, and a mask.
    """
    return load_direction(direction[0] + E * NUM_GROUPS, direction[1])


@triton.jit
def _wanted(
    y,  # 16 of [T, G] fp32
    search,  # a factor and a part, [T, 1] fp32
    direction,  # see ``_direction_at``, or None
    E: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):
    """Elements beside code e of vectors times the factor, plus the part of u."""
    wanted = y[E] * search[0]
    if direction is not None:
        wanted += _direction_at(direction, E, NUM_GROUPS) * search[1]
    return wanted


@triton.jit
def _search(
    y,  # 16 of [T, G] fp32
    search,  # see ``_wanted``
    direction,  # see ``_direction_at``, or None
    scale,  # [T, G] fp32
    normaliser,  # [T, 1] fp32
    CODEBOOK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):
    """The path of least error, int32 [T, G]: bit e is b(e).

    It equals that of ``reference.levels.trellis``.
    """
    reciprocal = reciprocal_of(scale)
    cost = _initial_cost(scale)
    early = tl.zeros(scale.shape, tl.int32)
    late = tl.zeros(scale.shape, tl.int32)
    for e in tl.static_range(_STEPS):
        wanted = _wanted(y, search, direction, e, NUM_GROUPS)
        cost, survivors = _step(wanted, normaliser, scale, reciprocal, cost, CODEBOOK)
        if e < 8:
            early |= survivors << (4 * e)
        else:
            late |= survivors << (4 * e - 32)

    least = cost[0]
    state = tl.zeros(scale.shape, tl.int32)
    for s in tl.static_range(1, 4):
        state = tl.where(cost[s] < least, s, state)
        least = tl.minimum(cost[s], least)
    path = tl.zeros(scale.shape, tl.int32)
    for i in tl.static_range(1, _STEPS + 1):
        path |= (state & 1) << (_STEPS - i)
        survivors = late if i <= 8 else early
        # The tensor is first, because the interpreter makes the sum a constant else.
        earlier = survivors >> (state + (_STEPS - i) % 8 * 4) & 1
        state = 2 * earlier + (state >> 1)
    return path


@triton.jit
def _by_subset(
    before,  # [T, G], the lower bit of the subset
    differs,  # [T, G], the higher bit
    VALUES: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The subset's value among four values from FIRST on, fp32 [T, G]."""
    low = tl.where(before, VALUES[FIRST + 1], VALUES[FIRST])
    high = tl.where(before, VALUES[FIRST + 3], VALUES[FIRST + 2])
    return tl.where(differs, high, low)


@triton.jit
def levels_on_path(
    z,  # [T, G] fp32, coordinate e of each group over its scale
    path,  # [T, G] int32
    CODEBOOK: tl.constexpr,
    E: tl.constexpr,
):
    """The level of code e, fp32 [T, G], and its branch, int32 [T, G]."""
    LEVELS: tl.constexpr = CODEBOOK[0]
    THRESHOLDS: tl.constexpr = CODEBOOK[1]
    earlier_first = path << 2  # zeros before the first
    before = (earlier_first >> (E + 1) & 1) == 1
    differs = ((earlier_first >> (E + 2) ^ earlier_first >> E) & 1) == 1
    level = _by_subset(before, differs, LEVELS, 0)
    branch = tl.zeros(z.shape, tl.int32)
    for j in tl.static_range(0, len(THRESHOLDS), _NUM_SUBSETS):
        above = z > _by_subset(before, differs, THRESHOLDS, j)
        higher = _by_subset(before, differs, LEVELS, j + _NUM_SUBSETS)
        level = tl.where(above, higher, level)
        branch += above.to(tl.int32)
    return level, branch


@triton.jit
def _largest(y):
    """The largest magnitude of each group, [T, G]."""
    largest = tl.abs(y[0])
    for e in tl.static_range(1, _STEPS):
        largest = tl.maximum(largest, tl.abs(y[e]))
    return largest


@triton.jit
def choose_trellis_scales(
    y,  # 16 of [T, G] fp32, of magnitudes up to SCALE_MAX
    CODEBOOK: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
):
    """``reference.codec.choose_scales``: codes of scales, int32 [T, G]."""
    largest = _largest(y)
    codes = scale_candidates(largest)
    normaliser = normaliser_of(tl.max(largest, 1))[:, None]
    errors = no_errors(largest)
    for candidate in range(_NUM_CANDIDATES):
        scale = scale_value(at(codes, candidate)).to(tl.float32)
        reciprocal = reciprocal_of(scale)
        cost = _initial_cost(scale)
        for e in tl.static_range(_STEPS):
            cost, _ = _step(y[e], normaliser, scale, reciprocal, cost, CODEBOOK)
        least = tl.minimum(tl.minimum(cost[0], cost[1]), tl.minimum(cost[2], cost[3]))
        errors = with_error(errors, candidate, least)
    return scales_in_reach(codes, errors, SCALE_WORDS)


@triton.jit
def choose_path(
    y,  # 16 of [T, G] fp32, of magnitudes up to SCALE_MAX
    scale,  # [T, G] fp32
    CODEBOOK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    direction,  # see ``_direction_at``, or None
):
    """The path of each group, int32 [T, G], and what ``_wanted`` takes to make it.

    If the codebook has a gain, each vector is unbiased as by
    ``reference.unbias.unbiased``.
    """
    GAIN: tl.constexpr = CODEBOOK[2]
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    largest = tl.max(_largest(y), 1)
    normaliser = normaliser_of(largest)[:, None]
    factor = tl.full(largest.shape, 1.0, tl.float32)
    part = tl.zeros_like(factor)
    if GAIN == 0:
        search = (factor[:, None], part[:, None])
        path = _search(y, search, direction, scale, normaliser, CODEBOOK, NUM_GROUPS)
        return path, search

    square = tl.zeros_like(scale)
    for e in tl.static_range(_STEPS):
        x = y[e] * normaliser
        square += round_to_integer(x * x * _PRODUCT_UNIT)
    square = tl.sum(square, 1)
    reciprocal = reciprocal_of(scale)
    best_factor = factor
    best_part = part
    best_rest = tl.full(factor.shape, float("inf"), tl.float32)
    least = best_rest
    PART_STEP: tl.constexpr = PART_UNIT / HEAD_SIZE
    inverse = tl.div_rn(1.0, tl.max(normaliser, 1))
    best_path = tl.zeros(scale.shape, tl.int32)
    for _ in range(_UNBIAS_ROUNDS + 1):
        search = (factor[:, None], part[:, None])
        path = _search(y, search, direction, scale, normaliser, CODEBOOK, NUM_GROUPS)
        product = tl.zeros_like(scale)
        along = tl.zeros_like(scale)
        for e in tl.static_range(_STEPS):
            z = _wanted(y, search, direction, e, NUM_GROUPS) * reciprocal
            level, _ = levels_on_path(z, path, CODEBOOK, e)
            decoded = level * scale * normaliser
            x = y[e] * normaliser
            product += round_to_integer(x * decoded * GAIN)
            if direction is not None:
                u = _direction_at(direction, e, NUM_GROUPS)
                along += round_to_integer(error_of(x, decoded, CODEBOOK) * u)
        rest = square - tl.sum(product, 1)
        if direction is None:
            better = tl.abs(rest) < tl.abs(best_rest)
            best_rest = tl.where(better, rest, best_rest)
        else:
            along = tl.sum(along, 1)
            cost = cost_of(rest, along, pull_of(square, HEAD_SIZE))
            better = cost < least
            least = tl.where(better, cost, least)
            best_part = tl.where(better, part, best_part)
            # The normaliser is a power of two, so this is exact but for the product.
            part += along * PART_STEP * inverse
        best_factor = tl.where(better, factor, best_factor)
        best_path = tl.where(better[:, None], path, best_path)
        factor += tl.div_rn(rest, tl.maximum(square, 1.0))
        factor = tl.maximum(factor, 1.0 - _UNBIAS_LIMIT)
        factor = tl.minimum(factor, 1.0 + _UNBIAS_LIMIT)
    return best_path, (best_factor[:, None], best_part[:, None])


@triton.jit
def _store_key_trellis(
    branch_word,  # [T, G] int32
    path,  # [T, G] int32
    codes_ptr,  # [T, 1] uint8 pointers to K's code plane
    token,  # [T, 1] index in the tile
    token_mask,  # [T, 1]
    HEAD_SIZE: tl.constexpr,
    OWN_PATH_WORDS: tl.constexpr,
):
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    group = tl.arange(0, path.shape[1])[None, :]
    mask = token_mask & (group < NUM_GROUPS)
    row_ptr = codes_ptr + token * (HEAD_SIZE // 4)
    tl.store(row_ptr.to(tl.pointer_type(tl.int32)) + group, branch_word, mask=mask)
    row_ptr = codes_ptr + _TILE * (HEAD_SIZE // 4) + token * (HEAD_SIZE // 8)
    if OWN_PATH_WORDS:
        p_path = row_ptr.to(tl.pointer_type(tl.int16)) + group
        tl.store(p_path, path.to(tl.int16), mask=mask)
    else:
        spread = tl.zeros(path.shape, tl.int32)
        for e in tl.static_range(_STEPS):
            spread |= (path >> e & 1) << (e // 2 * 4 + e % 2)
        PAIRS: tl.constexpr = path.shape[1] // 2
        spread = spread << group % 2 * 2
        spread = tl.sum(tl.reshape(spread, [path.shape[0], PAIRS, 2]), 2)
        pair = tl.arange(0, PAIRS)[None, :]
        mask = token_mask & (pair < NUM_GROUPS // 2)
        tl.store(row_ptr.to(tl.pointer_type(tl.int32)) + pair, spread, mask=mask)


@triton.jit
def store_trellis(
    y,  # 16 of [T, G] fp32
    search,  # see ``_wanted``
    direction,  # see ``_direction_at``, or None
    scale,  # [T, G] fp32
    path,  # [T, G] int32
    tile_ptr,  # [T] uint8 pointers to tiles
    token,  # [T] index in the tile
    token_mask,  # [T]
    CODES_OFFSET: tl.constexpr,
    IS_KEY: tl.constexpr,
    CODEBOOK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    IS_LATENT: tl.constexpr = False,
):
    """Write both planes of three-bit codes.

    Latents have the planes of keys, but each group has its own word of path bits.
    """
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    word = tl.zeros(scale.shape, tl.int32)
    reciprocal = reciprocal_of(scale)
    for e in tl.static_range(_STEPS):
        wanted = _wanted(y, search, direction, e, NUM_GROUPS)
        _, branch = levels_on_path(wanted * reciprocal, path, CODEBOOK, e)
        if IS_KEY:
            word |= branch << (2 * e)
        else:
            word |= branch << (e // 2 % 2 * 16 + (e // 4 * 4 + 6 - e % 2 * 2) % 16)
    if IS_KEY:
        codes_ptr = (tile_ptr + CODES_OFFSET)[:, None]
        token_mask = token_mask[:, None]
        _store_key_trellis(
            word,
            path,
            codes_ptr,
            token[:, None],
            token_mask,
            HEAD_SIZE,
            IS_LATENT or NUM_GROUPS % 2 == 1,
        )
    else:
        group = tl.arange(0, scale.shape[1])[None, :]
        mask = token_mask[:, None] & (group < NUM_GROUPS)
        # The offsets are added at once. Added to a pointer to the plane, they would
        # have operands of two layouts, which Triton's compiler does not take.
        row_ptr = value_rows(tile_ptr, token, CODES_OFFSET, 8, HEAD_SIZE)[:, None]
        store_halves(value_pointers(row_ptr, group, 8), word, mask)
        PATHS_OFFSET: tl.constexpr = CODES_OFFSET + _TILE * (HEAD_SIZE // 4)
        row_ptr = value_rows(tile_ptr, token, PATHS_OFFSET, 4, HEAD_SIZE)[:, None]
        tl.store(value_pointers(row_ptr, group, 4), path.to(tl.int16), mask=mask)
