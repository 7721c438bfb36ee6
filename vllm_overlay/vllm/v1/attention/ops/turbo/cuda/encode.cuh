// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The encoder of four-bit codes of the turbo format: see reference_codec.
//
// The nearest level is guessed and mended: the thresholds between levels are even
// enough for floor(GUESS * magnitude / scale) to be either the index of the nearest
// level or the one below, which one comparison with the threshold between them, as the
// reference makes it, decides. cuda_store_constants.py checks that.
#pragma once

#include "scales.cuh"

namespace turbo {

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t nibbles) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(nibbles));
  return result;
}

// x + (a > b), in two instructions.
__device__ __forceinline__ float add_if_greater(float x, float a, float b) {
  asm("{\n"
      ".reg .pred is_greater;\n"
      "setp.gt.f32 is_greater, %1, %2;\n"
      "@is_greater add.rn.f32 %0, %0, 0f3F800000;\n"
      "}"
      : "+f"(x)
      : "f"(a), "f"(b));
  return x;
}

__device__ __forceinline__ float saturated_square(float x) {
  float result;
  asm("mul.rn.sat.f32 %0, %1, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// What zero scales are taken for: a magnitude is zero or far above.
constexpr float ALMOST_ZERO = 7.7037198e-34f;  // 2**-110

// Indices of key levels. A key's levels and twice its thresholds are integers, which
// prmt looks up in tables of bytes by the low nibble of an index; the other three bytes
// of a result make it a float that has the integer in its lowest bits. Of a nibble of 8
// and more prmt makes 0xFF from the sign of a byte, which is the highest level.
//
// IS_TINY: whether magnitudes may exceed twice the scale.
template <bool IS_TINY>
struct KeyIndex {
  static constexpr int FIRST = KEY_INDEX_BASE;  // index 0, bits of a float
  float scale, guess, limit, threshold_unit, threshold_zero, level_unit;
  uint32_t thresholds_low, levels_low;

  KeyIndex() = default;
  // scale: normalised.
  __device__ __forceinline__ explicit KeyIndex(float normalised_scale) {
    scale = normalised_scale;
    const float not_zero = fmaxf(scale, ALMOST_ZERO);
    guess = __fmul_rn(KEY_GUESS, reciprocal(not_zero));
    limit = __fmul_rn(2.0f, not_zero);
    threshold_unit = __fmul_rn(KEY_THRESHOLD_UNIT, scale);
    threshold_zero = __fmul_rn(-KEY_THRESHOLD_ZERO, threshold_unit);
    level_unit = __fmul_rn(KEY_LEVEL_UNIT, scale);
    // The sign is zero, which keeps the compiler from moving constants again and again.
    const uint32_t sign = __float_as_uint(scale) >> 31;
    thresholds_low = KEY_THRESHOLDS_LOW + sign;
    levels_low = KEY_LEVELS_LOW + sign;
  }

  // The index, added to FIRST; if above 7 it stands for 7.
  __device__ __forceinline__ int nearest(float magnitude) const {
    const float limited = IS_TINY ? fminf(magnitude, limit) : magnitude;
    const float index = __fmaf_rd(limited, guess, KEY_INDEX_MAGIC);
    const float looked_up = as_float(
        permute(thresholds_low, KEY_THRESHOLDS_HIGH, __float_as_uint(index)));
    const float threshold = __fmaf_rn(looked_up, threshold_unit, threshold_zero);
    return __float_as_int(add_if_greater(index, magnitude, threshold));
  }

  // The level, in units of its own.
  __device__ __forceinline__ float level(int index) const {
    const float looked_up = as_float(permute(levels_low, KEY_LEVELS_HIGH, index));
    return __fsub_rn(looked_up, KEY_LEVEL_ZERO);
  }

  __device__ __forceinline__ float decoded(int index) const {
    return __fmul_rn(level(index), level_unit);
  }

  __device__ __forceinline__ float error(float magnitude) const {
    return __fmaf_rn(-level(nearest(magnitude)), level_unit, magnitude);
  }
};

// Positions, index + 1/2, of value levels, which are (VALUE_LINEAR + VALUE_QUADRATIC *
// position) * position. So are the thresholds, but for a constant. Each, times a scale,
// is an fp32 number, and so are the terms.
struct ValuePosition {
  static constexpr float LAST = NUM_LEVELS / 2 - 0.5f;
  float guess, linear, quadratic, constant;

  ValuePosition() = default;
  __device__ __forceinline__ explicit ValuePosition(float scale) {
    guess = __fmul_rn(VALUE_GUESS, reciprocal(fmaxf(scale, ALMOST_ZERO)));
    linear = __fmul_rn(VALUE_LINEAR, scale);
    quadratic = __fmul_rn(VALUE_QUADRATIC, scale);
    constant = __fmul_rn(0.25f * VALUE_QUADRATIC, scale);
  }

  __device__ __forceinline__ float nearest(float magnitude) const {
    // The threshold above level i is at i + 1.
    const float above =
        __fsub_rn(__fmaf_rd(magnitude, guess, MAGIC + 1.0f), MAGIC);
    const float threshold =
        __fmaf_rn(__fmaf_rn(above, quadratic, linear), above, constant);
    const float position = add_if_greater(__fsub_rn(above, 0.5f), magnitude, threshold);
    return fminf(position, LAST);
  }

  __device__ __forceinline__ float error(float magnitude) const {
    return error_at(nearest(magnitude), magnitude);
  }

  __device__ __forceinline__ float error_at(float position, float magnitude) const {
    return __fmaf_rn(-__fmaf_rn(position, quadratic, linear), position, magnitude);
  }

  // The nearest position, if that is `position` or the one below it.
  __device__ __forceinline__ float nearest_below(float position,
                                                 float magnitude) const {
    // The threshold in terms of the position, which is half above it.
    const float slope = __fsub_rn(linear, quadratic);
    const float threshold = __fmaf_rn(__fmaf_rn(position, quadratic, slope), position,
                                      __fmul_rn(-0.5f, slope));
    return fmaxf(add_if_greater(__fsub_rn(position, 1.0f), magnitude, threshold), 0.5f);
  }
};

template <bool IS_KEY, bool IS_TINY>
struct IndexType {
  using type = ValuePosition;
};
template <bool IS_TINY>
struct IndexType<true, IS_TINY> {
  using type = KeyIndex<IS_TINY>;
};

// Lanes that share a group, when each has N of its coordinates: coordinate e is
// number e / PARTS of lane e % PARTS.
template <int N>
constexpr int PARTS_OF = SCALE_GROUP / N;

// Code words that a lane has a part of, and where in them its code i lies. Code e is
// four bits of word e % 2, from bit 4 * (e / 2).
template <int N>
constexpr int WORDS_OF = N == SCALE_GROUP ? 2 : 1;
template <int N>
__device__ __forceinline__ constexpr int word_of(int i) {
  return N == SCALE_GROUP ? i % 2 : 0;
}
template <int N>
__device__ __forceinline__ constexpr int shift_of(int i) {
  return N == SCALE_GROUP ? i / 2 * 4 : i * 2 * PARTS_OF<N>;
}

// A squared error in units of 2**-ERROR_FRACTION_BITS: a subnormal number is an
// integer, rounded.
__device__ __forceinline__ int rounded_square(float error) {
  const float unit = as_float(1u << ERROR_FRACTION_BITS);
  return __float_as_int(__fmul_rn(saturated_square(error), unit));
}

// Errors of each candidate of a scale, over a group.
template <bool IS_KEY, bool IS_TINY, int N>
__device__ __forceinline__ int candidate_error(const float (&x)[N], int code,
                                               float normaliser) {
  const typename IndexType<IS_KEY, IS_TINY>::type index(
      __fmul_rn(scale_value(code), normaliser));
  int error = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) error += rounded_square(index.error(x[i]));
  return reduce_parts<Sum, PARTS_OF<N>>(error);
}

// Errors of the candidates of a value's scale. From one candidate to the next the
// nearest level is the same or one lower, but for the smallest scales.
__device__ __forceinline__ void value_errors(const float (&x)[SCALE_GROUP], int floor,
                                             float normaliser,
                                             int (&errors)[NUM_SCALE_CANDIDATES]) {
  float positions[SCALE_GROUP];
  const ValuePosition first(
      __fmul_rn(scale_value(scale_candidate(floor, 0)), normaliser));
  int error = 0;
#pragma unroll
  for (int i = 0; i < SCALE_GROUP; ++i) {
    positions[i] = first.nearest(x[i]);
    error += rounded_square(first.error_at(positions[i], x[i]));
  }
  errors[0] = error;
#pragma unroll 1
  for (int candidate = 1; candidate < NUM_SCALE_CANDIDATES; ++candidate) {
    const ValuePosition index(
        __fmul_rn(scale_value(scale_candidate(floor, candidate)), normaliser));
    error = 0;
#pragma unroll
    for (int i = 0; i < SCALE_GROUP; ++i) {
      positions[i] = index.nearest_below(positions[i], x[i]);
      error += rounded_square(index.error_at(positions[i], x[i]));
    }
#pragma unroll
    for (int k = 1; k < NUM_SCALE_CANDIDATES; ++k) {
      errors[k] = candidate == k ? error : errors[k];
    }
  }
}

// See reference_codec.choose_scales.
template <bool IS_KEY, bool IS_TINY, int N>
__device__ __forceinline__ void choose_scales(const float (&x)[GROUPS_A_LANE][N],
                                              const int (&floors)[GROUPS_A_LANE],
                                              float normaliser,
                                              int (&codes)[GROUPS_A_LANE]) {
  int errors[GROUPS_A_LANE][NUM_SCALE_CANDIDATES];
  if constexpr (!IS_KEY && !IS_TINY && N == SCALE_GROUP) {
#pragma unroll
    for (int j = 0; j < GROUPS_A_LANE; ++j) {
      value_errors(x[j], floors[j], normaliser, errors[j]);
    }
    scales_in_reach<PARTS_OF<N>>(floors, errors, codes);
    return;
  }
  // What few coordinates leave idle, several candidates fill.
  constexpr int UNROLLED = N == SCALE_GROUP ? 1 : NUM_SCALE_CANDIDATES;
#pragma unroll UNROLLED
  for (int candidate = 0; candidate < NUM_SCALE_CANDIDATES; ++candidate) {
#pragma unroll
    for (int j = 0; j < GROUPS_A_LANE; ++j) {
      const int error = candidate_error<IS_KEY, IS_TINY>(
          x[j], scale_candidate(floors[j], candidate), normaliser);
#pragma unroll
      for (int k = 0; k < NUM_SCALE_CANDIDATES; ++k) {
        errors[j][k] = candidate == k ? error : errors[j][k];
      }
    }
  }
  scales_in_reach<PARTS_OF<N>>(floors, errors, codes);
}

// A product of the search for a factor, as the bits of a float that has it, rounded, in
// its lowest bits.
__device__ __forceinline__ float rounded_product(float x, float decoded) {
  return __fadd_rn(__fmul_rn(__fmul_rn(x, decoded), KEY_GAIN), MAGIC);
}

// The square of a vector, as the lane's summand with MAGIC_BITS for each coordinate.
template <int N>
__device__ __forceinline__ int square_of(const float (&x)[GROUPS_A_LANE][N]) {
  int square = 0;
#pragma unroll
  for (int j = 0; j < GROUPS_A_LANE; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float product = __fmul_rn(x[j][i], x[j][i]);
      square += __float_as_int(__fmaf_rn(product, 1 << PRODUCT_FRACTION_BITS, MAGIC));
    }
  }
  return square;
}

// The search for a key's factor: see reference_codec._unbiased.
struct Unbiasing {
  float square;               // of the key
  float reciprocal;           // of the square, or 1
  float next = 1.0f;          // factor to try
  float factor = 1.0f, rest;  // the best, and what of the square is missing with it

  // square: of the vector. PARTS: lanes that share its coordinates.
  template <int PARTS>
  __device__ __forceinline__ static Unbiasing of(int square_sum) {
    constexpr uint32_t OFFSET =
        GROUPS_A_LANE * (SCALE_GROUP / PARTS) * static_cast<uint32_t>(MAGIC_BITS);
    Unbiasing result;
    result.square =
        reduce_vector<Sum, PARTS>(square_sum - static_cast<int>(OFFSET));
    result.reciprocal = __frcp_rn(fmaxf(result.square, 1.0f));
    return result;
  }

  // Take note of what is missing with the factor tried. Returns whether it is the best.
  __device__ __forceinline__ bool update(int round, float missing) {
    const bool is_best = round == 0 || fabsf(missing) < fabsf(rest);
    factor = is_best ? next : factor;
    rest = is_best ? missing : rest;
    // The quotient, correctly rounded, for the reciprocal is (Markstein's theorem).
    const float quotient = __fmul_rn(missing, reciprocal);
    const float error = __fmaf_rn(-fmaxf(square, 1.0f), quotient, missing);
    next = __fadd_rn(next, __fmaf_rn(error, reciprocal, quotient));
    next = fminf(fmaxf(next, 1.0f - UNBIAS_LIMIT), 1.0f + UNBIAS_LIMIT);
    return is_best;
  }
};

template <typename Index, int N>
__device__ __forceinline__ Unbiasing unbias(const float (&x)[GROUPS_A_LANE][N],
                                            const Index (&index)[GROUPS_A_LANE]) {
  constexpr int PARTS = PARTS_OF<N>;
  const int square = square_of(x);
  Unbiasing key = Unbiasing::of<PARTS>(square);
#pragma unroll 1
  for (int round = 0; round <= UNBIAS_ROUNDS; ++round) {
    // Products are sums with MAGIC, too, and as many.
    int rest = square;
#pragma unroll
    for (int j = 0; j < GROUPS_A_LANE; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int nearest = index[j].nearest(__fmul_rn(x[j][i], key.next));
        rest -= __float_as_int(rounded_product(x[j][i], index[j].decoded(nearest)));
      }
    }
    key.update(round, reduce_vector<Sum, PARTS>(rest));
  }
  return key;
}

// Cost of a code that is moved to another level: see reference_codec._unbiased.
__device__ __forceinline__ float cost_of_move(float x, float decoded, float moved,
                                              const Unbiasing& key) {
  const float mended = __fsub_rn(rounded_product(x, moved), rounded_product(x, decoded));
  const float rest = __fsub_rn(key.rest, mended);
  const float exact = __fmul_rn(x, 1 << PRODUCT_FRACTION_BITS);
  const float error = __fsub_rn(exact, __fmul_rn(decoded, KEY_GAIN));
  const float moved_error = __fsub_rn(exact, __fmul_rn(moved, KEY_GAIN));
  const float across =
      __fsub_rn(__fmul_rn(moved_error, moved_error), __fmul_rn(error, error));
  // Powers of two may change places.
  const float weighted =
      __fmul_rn(across, __fmul_rn(key.square, 1.0f / (1 << PRODUCT_FRACTION_BITS)));
  return __fmaf_rn(__fmul_rn(rest, rest), BIAS_WEIGHT, weighted);
}

// The magnitudes' indices of a key, four bits each, with one moved if that is worth it.
template <typename Index, int N>
__device__ __forceinline__ void key_codes(const float (&x)[GROUPS_A_LANE][N],
                                          const Index (&index)[GROUPS_A_LANE],
                                          uint32_t (&words)[GROUPS_A_LANE][WORDS_OF<N>]) {
  constexpr int PARTS = PARTS_OF<N>;
  constexpr int NONE = HEAD_SIZE;
  const Unbiasing key = unbias(x, index);
  const int outwards = key.rest > 0.0f ? 1 : -1;
  const int last = key.rest > 0.0f ? NUM_LEVELS / 2 - 1 : 0;
  float least = as_float(0x7F800000u);
  int first = NONE;
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < GROUPS_A_LANE; ++j) {
      const int nearest = index[j].nearest(__fmul_rn(x[j][i], key.factor));
      const int code = min(nearest, Index::FIRST + NUM_LEVELS / 2 - 1);
      if (i < WORDS_OF<N>) words[j][i] = 0;
      words[j][word_of<N>(i)] += static_cast<uint32_t>(code - Index::FIRST)
                                 << shift_of<N>(i);
      const float decoded = index[j].decoded(code);
      const float moved = index[j].decoded(code + outwards);
      const float cost = cost_of_move(x[j][i], decoded, moved, key);
      if (code != Index::FIRST + last && cost < least) {
        least = cost;
        first = i * PARTS * NUM_GROUPS + COLUMNS_A_WARP * j;
      }
    }
  }
  const float best = reduce_vector<Least, PARTS>(least);
  const int group = group_of_lane();
  const int here = first + part_of_lane<PARTS>() * NUM_GROUPS + group;
  const int mine = least == best && group < NUM_GROUPS ? here : NONE;
  const int chosen = reduce_vector<Least, PARTS>(mine);
  const bool worth = best < __fmul_rn(__fmul_rn(key.rest, key.rest), BIAS_WEIGHT);
  if (worth && mine == chosen) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < GROUPS_A_LANE; ++j) {
        const bool is_chosen = first == i * PARTS * NUM_GROUPS + COLUMNS_A_WARP * j;
        words[j][word_of<N>(i)] +=
            is_chosen ? static_cast<uint32_t>(outwards) << shift_of<N>(i) : 0;
      }
    }
  }
}

// The magnitudes' indices of a value, four bits each.
template <int N>
__device__ __forceinline__ void value_codes(
    const float (&x)[GROUPS_A_LANE][N], const ValuePosition (&index)[GROUPS_A_LANE],
    uint32_t (&words)[GROUPS_A_LANE][WORDS_OF<N>]) {
  // Floats between 2**22 and 2**23 are in steps of 1/2: the lowest bits are twice the
  // position, which is one more than twice the index.
  constexpr float HALVES = 6291456.0f;
#pragma unroll
  for (int j = 0; j < GROUPS_A_LANE; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float position = index[j].nearest(x[j][i]);
      const uint32_t twice = __float_as_uint(__fadd_rn(position, HALVES));
      if (i < WORDS_OF<N>) words[j][i] = 0;
      words[j][word_of<N>(i)] += (twice - __float_as_uint(HALVES)) << shift_of<N>(i);
    }
#pragma unroll
    for (int w = 0; w < WORDS_OF<N>; ++w) words[j][w] = words[j][w] >> 1 & 0x77777777u;
  }
}

// Every other code of a unit, in 16 bits as values' are stored.
__device__ __forceinline__ uint16_t half_of_unit(uint32_t codes, int parity) {
  uint32_t half = codes >> 4 * parity & 0x0F0F0F0Fu;
  half = (half | half >> 4) & 0x00FF00FFu;
  half = (half | half >> 8) & 0xFFFFu;
  return static_cast<uint16_t>(half << 2 | half >> 14);
}

// Write a unit, of group `group` (or that and NUM_GROUPS), of a token in its tile: see
// TurboFormat for the order.
template <bool IS_KEY>
__device__ __forceinline__ void store_unit(uint32_t codes, uint8_t* plane, int token,
                                           int group, int upper) {
  if constexpr (IS_KEY) {
    auto* row = reinterpret_cast<uint32_t*>(plane + token * (HEAD_SIZE / 2));
    row[group + upper * NUM_GROUPS] = codes;
  } else {
    uint8_t* place = plane + token / 8 * (4 * HEAD_SIZE) + 64 * group +
                     token % 8 / 2 * 16 + 8 * upper + token % 2 * 2;
    *reinterpret_cast<uint16_t*>(place) = half_of_unit(codes, 0);
    *reinterpret_cast<uint16_t*>(place + 4) = half_of_unit(codes, 1);
  }
}

// Write the code words of a vector.
//
// words: the lane's parts, magnitudes. signs: of the codes, in their lowest bits.
// plane: the side's codes in a tile. token: in it. is_stored: whether to write at all.
template <bool IS_KEY, int N>
__device__ __forceinline__ void store_codes(
    const uint32_t (&words)[GROUPS_A_LANE][WORDS_OF<N>],
    const uint32_t (&signs)[GROUPS_A_LANE][WORDS_OF<N>], uint8_t* plane, int token,
    bool is_stored) {
  constexpr int PARTS = PARTS_OF<N>;
  const int part = part_of_lane<PARTS>();
  // Half of the levels are negative; codes of these run the other way.
  constexpr uint32_t POSITIVE = PARTS == 4 ? 0x08080808u : 0x88888888u;
  constexpr uint32_t ALL = 15;
#pragma unroll
  for (int j = 0; j < GROUPS_A_LANE; ++j) {
    const int group = group_of_lane() + COLUMNS_A_WARP * j;
    const bool is_group = is_stored && group < NUM_GROUPS;
    uint32_t codes[WORDS_OF<N>];
#pragma unroll
    for (int w = 0; w < WORDS_OF<N>; ++w) {
      codes[w] = (words[j][w] | POSITIVE) ^ signs[j][w] * ALL;
    }
    if constexpr (PARTS == 1) {
      if (!is_group) continue;
      store_unit<IS_KEY>(codes[0], plane, token, group, 0);
      store_unit<IS_KEY>(codes[1], plane, token, group, 1);
    } else {
      if constexpr (PARTS == 4) {
        codes[0] <<= part / 2 * 4;
        codes[0] |= __shfl_xor_sync(FULL_MASK, codes[0], 2);
      }
      if (is_group && part < 2) {
        store_unit<IS_KEY>(codes[0], plane, token, group, part);
      }
    }
  }
}

// Quantise a vector, of magnitudes and signs, to four bits, and write it.
//
// codes: the side's plane. token: place in the tile. scales: the vector's, or null to
// write nothing.
template <bool IS_KEY, bool IS_TINY, int N>
__device__ __forceinline__ void encode_4_bits(
    const float (&x)[GROUPS_A_LANE][N],
    const uint32_t (&signs)[GROUPS_A_LANE][WORDS_OF<N>],
    const int (&floors)[GROUPS_A_LANE], float normaliser, uint8_t* codes, int token,
    uint8_t* scales) {
  using Index = typename IndexType<IS_KEY, IS_TINY>::type;
  int scale_codes[GROUPS_A_LANE];
  choose_scales<IS_KEY, IS_TINY>(x, floors, normaliser, scale_codes);
  uint32_t words[GROUPS_A_LANE][WORDS_OF<N>];
  Index index[GROUPS_A_LANE];
#pragma unroll
  for (int j = 0; j < GROUPS_A_LANE; ++j) {
    index[j] = Index(__fmul_rn(scale_value(scale_codes[j]), normaliser));
  }
  if constexpr (IS_KEY) {
    key_codes(x, index, words);
  } else {
    value_codes(x, index, words);
  }
  store_codes<IS_KEY, N>(words, signs, codes, token, scales != nullptr);
  store_scales<PARTS_OF<N>>(scale_codes, scales);
}

}  // namespace turbo
