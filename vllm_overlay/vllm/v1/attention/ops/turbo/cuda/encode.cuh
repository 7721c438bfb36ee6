// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The encoder of four-bit codes of the turbo format: see reference_codec.
#pragma once

#include "levels.cuh"
#include "planes.cuh"
#include "unbias.cuh"

namespace turbo {

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

// Errors of the candidates of a value's scale. From one candidate to the next
// the nearest level is the same or one lower, but for the smallest scales.
__device__ __forceinline__ void value_errors(
    const float (&x)[SCALE_GROUP], int floor, float normaliser,
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
__device__ __forceinline__ void choose_scales(
    const float (&x)[GROUPS_A_LANE][N], const int (&floors)[GROUPS_A_LANE],
    float normaliser, int (&codes)[GROUPS_A_LANE]) {
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

template <typename Index, int N>
__device__ __forceinline__ Unbiasing unbias(
    const float (&x)[GROUPS_A_LANE][N], const Index (&index)[GROUPS_A_LANE]) {
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
        rest -=
            __float_as_int(rounded_product(x[j][i], index[j].decoded(nearest)));
      }
    }
    key.update(round, reduce_vector<Sum, PARTS>(rest));
  }
  return key;
}

// Cost of a code that is moved to another level: see reference_codec._unbiased.
__device__ __forceinline__ float cost_of_move(float x, float decoded,
                                              float moved,
                                              const Unbiasing& key) {
  const float mended =
      __fsub_rn(rounded_product(x, moved), rounded_product(x, decoded));
  const float rest = __fsub_rn(key.rest, mended);
  const float exact = __fmul_rn(x, 1 << PRODUCT_FRACTION_BITS);
  const float error = __fsub_rn(exact, __fmul_rn(decoded, KEY_GAIN));
  const float moved_error = __fsub_rn(exact, __fmul_rn(moved, KEY_GAIN));
  const float across =
      __fsub_rn(__fmul_rn(moved_error, moved_error), __fmul_rn(error, error));
  // Powers of two may change places.
  const float weighted = __fmul_rn(
      across, __fmul_rn(key.square, 1.0f / (1 << PRODUCT_FRACTION_BITS)));
  return __fmaf_rn(__fmul_rn(rest, rest), BIAS_WEIGHT, weighted);
}

// The magnitudes' indices of a key, four bits each, with one moved if that is
// worth it.
template <typename Index, int N>
__device__ __forceinline__ void key_codes(
    const float (&x)[GROUPS_A_LANE][N], const Index (&index)[GROUPS_A_LANE],
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
  const bool worth =
      best < __fmul_rn(__fmul_rn(key.rest, key.rest), BIAS_WEIGHT);
  if (worth && mine == chosen) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < GROUPS_A_LANE; ++j) {
        const bool is_chosen =
            first == i * PARTS * NUM_GROUPS + COLUMNS_A_WARP * j;
        words[j][word_of<N>(i)] +=
            is_chosen ? static_cast<uint32_t>(outwards) << shift_of<N>(i) : 0;
      }
    }
  }
}

// The magnitudes' indices of a value, four bits each.
template <int N>
__device__ __forceinline__ void value_codes(
    const float (&x)[GROUPS_A_LANE][N],
    const ValuePosition (&index)[GROUPS_A_LANE],
    uint32_t (&words)[GROUPS_A_LANE][WORDS_OF<N>]) {
  // Floats between 2**22 and 2**23 are in steps of 1/2: the lowest bits are
  // twice the position, which is one more than twice the index.
  constexpr float HALVES = 6291456.0f;
#pragma unroll
  for (int j = 0; j < GROUPS_A_LANE; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float position = index[j].nearest(x[j][i]);
      const uint32_t twice = __float_as_uint(__fadd_rn(position, HALVES));
      if (i < WORDS_OF<N>) words[j][i] = 0;
      words[j][word_of<N>(i)] += (twice - __float_as_uint(HALVES))
                                 << shift_of<N>(i);
    }
#pragma unroll
    for (int w = 0; w < WORDS_OF<N>; ++w)
      words[j][w] = words[j][w] >> 1 & 0x77777777u;
  }
}

// Quantise a vector, of magnitudes and signs, to four bits, and write it.
//
// codes: the side's plane. token: place in the tile. scales: the vector's, or
// null to write nothing.
template <bool IS_KEY, bool IS_TINY, int N>
__device__ __forceinline__ void encode_4_bits(
    const float (&x)[GROUPS_A_LANE][N],
    const uint32_t (&signs)[GROUPS_A_LANE][WORDS_OF<N>],
    const int (&floors)[GROUPS_A_LANE], float normaliser, uint8_t* codes,
    int token, uint8_t* scales) {
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
