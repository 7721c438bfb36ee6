// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The encoder of four-bit codes of the turbo format: see reference.codec.
#pragma once

#include "store/moves.cuh"

namespace turbo {

// Errors of each candidate of a scale, over the lane's part of a group.
template <bool kIsKey, bool kIsTiny, int kElements>
__device__ __forceinline__ void candidate_errors(
    const float (&x)[kElements], int floor, float normaliser,
    const FoldTables& tables, int (&errors)[NUM_SCALE_CANDIDATES]) {
  // Candidates that share rows. Subnormal scales are too far apart for it. The
  // loop is not unrolled, although the last turn computes one candidate too
  // many. Instructions are fetched more slowly than they run.
  constexpr int kSharing = kIsTiny ? 1 : 2;
#pragma unroll 1
  for (int first = 0; first < NUM_SCALE_CANDIDATES; first += kSharing) {
    float scales[kSharing];
    int sums[kSharing];
#pragma unroll
    for (int c = 0; c < kSharing; ++c) {
      const int code = scale_candidate(floor, first + c);
      scales[c] = __fmul_rn(scale_value(code), normaliser);
      sums[c] = 0;
    }
    const FoldRows<kIsKey, kIsTiny> rows(scales[0], tables);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float2 fold = load_shared_2(rows.of(x[i]));
#pragma unroll
      for (int c = 0; c < kSharing; ++c) {
        sums[c] += rounded_square(fold_error(x[i], fold, scales[c]));
      }
    }
#pragma unroll
    for (int k = 0; k < NUM_SCALE_CANDIDATES; ++k) {
#pragma unroll
      for (int c = 0; c < kSharing; ++c) {
        errors[k] = first + c == k ? sums[c] : errors[k];
      }
    }
  }
}

// Choose the scales of groups: see reference.codec.choose_scales.
template <bool kIsKey, bool kIsTiny, int kGroups, int kElements>
__device__ __forceinline__ void choose_scales(
    const float (&x)[kGroups][kElements], const int (&floors)[kGroups],
    float normaliser, const FoldTables& tables, int (&codes)[kGroups]) {
  int errors[kGroups][NUM_SCALE_CANDIDATES];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    candidate_errors<kIsKey, kIsTiny>(x[j], floors[j], normaliser, tables,
                                      errors[j]);
#pragma unroll
    for (int k = 0; k < NUM_SCALE_CANDIDATES; ++k) {
      errors[j][k] = reduce_parts<Sum, kPartsOf<kElements>>(errors[j][k]);
    }
  }
  scales_in_reach<kPartsOf<kElements>>(floors, errors, codes);
}

// The factor of a key. No factor moves a coordinate past more than one
// threshold, so products are computed only once, for the two levels around it.
template <bool kIsTiny, int kGroups, int kElements>
__device__ __forceinline__ Unbiasing
unbias(const float (&x)[kGroups][kElements], const float (&scales)[kGroups],
       const FoldRows<true, kIsTiny> (&rows)[kGroups]) {
  constexpr int kParts = kPartsOf<kElements>;
  const int square = square_of(x);
  Unbiasing key = Unbiasing::of<kParts>(square);
  float thresholds[kGroups][kElements];
  int steps[kGroups][kElements];
  int rest_below = square;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float2 fold = load_shared_2(rows[j].of(x[j][i]));
      const float threshold = __fmul_rn(fold.x, scales[j]);
      const float half_gap = __fmul_rn(fold.y, scales[j]);
      // Products have kMagic added, as often as the square has.
      const int below = __float_as_int(
          rounded_product(x[j][i], __fsub_rn(threshold, half_gap)));
      const int above = __float_as_int(
          rounded_product(x[j][i], __fadd_rn(threshold, half_gap)));
      thresholds[j][i] = threshold;
      steps[j][i] = above - below;
      rest_below -= below;
    }
  }
#pragma unroll 1
  for (int round = 0; round <= UNBIAS_ROUNDS; ++round) {
    int rest = rest_below;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        rest = subtract_if_greater(rest, __fmul_rn(x[j][i], key.next),
                                   thresholds[j][i], steps[j][i]);
      }
    }
    key.update(round, reduce_vector<Sum, kParts>(rest, round));
  }
  return key;
}

// The indices of a key's magnitudes, four bits each. One is moved if that
// lowers the cost.
template <bool kIsTiny, int kGroups, int kElements>
__device__ __forceinline__ void key_codes(
    const float (&x)[kGroups][kElements], const float (&scales)[kGroups],
    const FoldTables& tables, uint32_t (&words)[kGroups][kWordsOf<kElements>]) {
  constexpr int kParts = kPartsOf<kElements>;
  constexpr int kNone = HEAD_SIZE;
  // Distances in a group between a lane's coordinates, and between the first
  // coordinates of two parts.
  constexpr int kStep = kIsLatent ? 1 : kParts;
  constexpr int kPartStep = kIsLatent ? kElements : 1;
  FoldRows<true, kIsTiny> rows[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    rows[j] = FoldRows<true, kIsTiny>(scales[j], tables);
  }
  const Unbiasing key = unbias(x, scales, rows);
  const int outwards = key.rest > 0.0f ? 1 : -1;
  const uint32_t moves = shared_address(tables.moves[key.rest > 0.0f]);
  float least = INFINITY;
  int first = kNone;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int index = rows[j].nearest(x[j][i], key.factor, scales[j]);
      put_code<kElements>(words[j], i, index);
      // A level that cannot be moved has infinity as its other level. The cost
      // is then infinite or NaN.
      const float2 levels = load_shared_2(moves + index * kFoldBytes);
      const float cost = cost_of_move(x[j][i], __fmul_rn(levels.x, scales[j]),
                                      __fmul_rn(levels.y, scales[j]), key);
      if (cost < least) {
        least = cost;
        first = i * kStep * NUM_GROUPS + kWarpColumns * j;
      }
    }
  }
  const float best = reduce_vector<Least, kParts>(least, 0);
  const int group = group_of_lane<kParts>(0);
  const int here =
      first + part_of_lane<kParts>() * kPartStep * NUM_GROUPS + group;
  const int mine = least == best && group < NUM_GROUPS ? here : kNone;
  const int chosen = reduce_vector<Least, kParts>(mine, 1);
  const bool worth =
      best < __fmul_rn(__fmul_rn(key.rest, key.rest), BIAS_WEIGHT);
  if (worth && mine == chosen) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const bool is_chosen =
            first == i * kStep * NUM_GROUPS + kWarpColumns * j;
        words[j][word_of<kElements>(i)] += is_chosen
                                               ? static_cast<uint32_t>(outwards)
                                                     << shift_of<kElements>(i)
                                               : 0;
      }
    }
  }
}

// The same with a direction, for which several indices may be moved.
template <bool kIsTiny, int kGroups, int kElements>
__device__ __forceinline__ void directed_codes(
    const float (&x)[kGroups][kElements], const float (&scales)[kGroups],
    const Direction<kGroups, kElements>& direction, const FoldTables& tables,
    uint32_t (&words)[kGroups][kWordsOf<kElements>]) {
  constexpr int kParts = kPartsOf<kElements>;
  FoldRows<true, kIsTiny> rows[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    rows[j] = FoldRows<true, kIsTiny>(scales[j], tables);
  }
  const Unbiasing key = unbias(x, scales, rows);
  const uint32_t moves = shared_address(tables.moves);
  int along = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int index = rows[j].nearest(x[j][i], key.factor, scales[j]);
      put_code<kElements>(words[j], i, index);
      const float level = load_shared_2(moves + index * kFoldBytes).x;
      along +=
          along_of(x[j][i], __fmul_rn(level, scales[j]), direction.at(j, i));
    }
  }
  const float sum = reduce_vector<Sum, kParts>(along, 0);
  move_codes(x, scales, direction, tables, key, sum, words);
}

// The indices of a value's magnitudes, four bits each.
template <bool kIsTiny, int kGroups, int kElements>
__device__ __forceinline__ void value_codes(
    const float (&x)[kGroups][kElements], const float (&scales)[kGroups],
    const FoldTables& tables, uint32_t (&words)[kGroups][kWordsOf<kElements>]) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const FoldRows<false, kIsTiny> rows(scales[j], tables);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int index = rows.nearest(x[j][i], 1.0f, scales[j]);
      put_code<kElements>(words[j], i, index);
    }
  }
}

// Quantise a vector, given as magnitudes and signs, to four bits, and write it.
//
// direction: that of a key, relative to the signs, or NoDirection.
// codes: the place of codes of K or V.
// scales: the place of the vector's scales, or null to write nothing.
template <bool kIsKey, bool kIsTiny, int kGroups, int kElements,
          typename OwnDirection>
__device__ __forceinline__ void encode_4_bits(
    const float (&x)[kGroups][kElements],
    const uint32_t (&signs)[kGroups][kWordsOf<kElements>],
    const int (&floors)[kGroups], float normaliser,
    const OwnDirection& direction, const FoldTables& tables,
    const CodePlace& codes, uint8_t* scales) {
  int scale_codes[kGroups];
  choose_scales<kIsKey, kIsTiny>(x, floors, normaliser, tables, scale_codes);
  uint32_t words[kGroups][kWordsOf<kElements>];
  float chosen[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    chosen[j] = __fmul_rn(scale_value(scale_codes[j]), normaliser);
  }
  if constexpr (kHasDirection<OwnDirection>) {
    directed_codes<kIsTiny>(x, chosen, direction, tables, words);
  } else if constexpr (kIsKey) {
    key_codes<kIsTiny>(x, chosen, tables, words);
  } else {
    value_codes<kIsTiny>(x, chosen, tables, words);
  }
  store_codes<kIsKey, kElements>(words, signs, codes, scales != nullptr);
  store_scales<kPartsOf<kElements>>(scale_codes, scales);
}

}  // namespace turbo
