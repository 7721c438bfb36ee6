// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Queries and the scores of a tile's keys: S^T = K q^T, tokens by queries.
//
// A query is one of a query head and query token. kQueries of a KV head attend
// at once: 4, 8 or 16. With four (kPaired), columns 4 to 7 of K q^T hold the
// products of the other half of the scale groups, and those of O^T the tokens 8
// to 15. With 16 a fragment of keys or values is multiplied by two of queries.
#pragma once

#include "common/tile.cuh"
#include "decode/share.cuh"

namespace turbo {

template <int kQueries>
constexpr bool kPaired = kQueries < kColumns;
// The tensor core's results for a tile's tokens.
template <int kQueries>
constexpr int kColumnTiles = kPaired<kQueries> ? 1 : kQueries / kColumns;
template <int kQueries>
constexpr int kAllColumns = kColumns * kColumnTiles<kQueries>;

// A scale code in a float's exponent and first bits is 2^-112 times the scale.
constexpr int kScaleShift = 20;
constexpr float kScaleUnit = 0x1p112f;

// The queries of eight columns.
template <int kQueries>
struct Query {
  // B fragments: [word of a lane][half][codes 0-3, 4-7], the other half of the
  // scale groups where the columns are not shared.
  static constexpr int kGroupHalves = kPaired<kQueries> ? 1 : 2;
  uint32_t codes[kLaneUnits][kGroupHalves][2];
  float factor[2];  // of the scores, for this lane's two columns

  // Codes are kept in shared memory, to leave registers to the values.
  static constexpr int kVectors = kGroupHalves * kLaneUnits / 2;
  using Kept = uint4[kVectors][32];

  __device__ __forceinline__ void keep(Kept& kept, int lane) const {
    const auto words = &codes[0][0][0];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      kept[i][lane] = {words[4 * i], words[4 * i + 1], words[4 * i + 2],
                       words[4 * i + 3]};
    }
  }
  // Vector i; of columns that are not shared it has a word's codes.
  __device__ __forceinline__ void recall(const Kept& kept, int lane, int i) {
    const auto words = &codes[0][0][0];
    const uint4 x = kept[i][lane];
    words[4 * i] = x.x, words[4 * i + 1] = x.y;
    words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
  }
  __device__ __forceinline__ void recall(const Kept& kept, int lane) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) recall(kept, lane, i);
  }
};

// Those of all columns of a pass, as they are kept.
template <int kQueries>
using KeptQueries = typename Query<kQueries>::Kept[kColumnTiles<kQueries>];

// Quantise eight columns' queries to int8, one factor each.
//
// rows: their places in p_queries and p_scales; -1 for a column without one.
// shared: what warps that share tiles tell each other by.
template <int kQueries>
__device__ __forceinline__ void load_query(Query<kQueries>& query,
                                           const __half* p_queries,
                                           const float* p_scales,
                                           const int* rows,
                                           SharedScores& shared, int lane) {
  const int column = lane / 4, t = lane % 4;
  const int row = rows[column];
  const bool inside = row >= 0;
  __half2 q[8][kLaneUnits / 2];
  __half2 most = __float2half2_rn(0.0f);
  const __half* p_query =
      p_queries + row * HEAD_SIZE + kLaneUnits * key_place(lane);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < kLaneUnits / 2; ++j) {
      q[i][j] = __float2half2_rn(0.0f);
      if (inside) {
        q[i][j] = reinterpret_cast<const __half2*>(p_query + i * NUM_UNITS)[j];
      }
      most = __hmax2_nan(most, __habs2(q[i][j]));
    }
  }
#pragma unroll
  for (int mask = 1; mask <= 2; mask *= 2) {
    most = __hmax2_nan(most, __shfl_xor_sync(~0u, most, mask));
  }
  float largest = __half2float(__hmax_nan(most.x, most.y));
  if constexpr (kTileWarps > 1)
    largest = largest_of_shares(largest, shared, lane);
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  const float scale = inside ? p_scales[row] : 0.0f;
  const float factor =
      largest * (scale / (127.0f * KEY_LEVEL_UNIT)) * kScaleUnit;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    query.factor[c] = __shfl_sync(~0u, factor, 4 * (2 * t + c));
  }
#pragma unroll
  for (int j = 0; j < kLaneUnits; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The last byte of a number near kMagic is its integer part's.
      uint32_t bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __half2 pair = q[4 * half + i][j / 2];
        const float x = __half2float(j % 2 == 0 ? pair.x : pair.y);
        bits[i] = __float_as_uint(fmaf(x, inverse, kMagic));
      }
      const uint32_t word =
          __byte_perm(__byte_perm(bits[0], bits[1], 0x0040),
                      __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
#pragma unroll
      for (int group_half = 0; group_half < Query<kQueries>::kGroupHalves;
           ++group_half) {
        const bool mine =
            t / 2 == (kPaired<kQueries> ? column / 4 : group_half);
        query.codes[j][group_half][half] = mine ? word : 0;
      }
    }
  }
}

// Halves of a share's groups that have one scale word.
constexpr int kHalvesAWord = kLaneUnits <= 4 ? 2 : 1;

// A token's scale word of K for each half of the groups; lanes of kPaired need
// one.
struct KeyScales {
  uint32_t base, deltas;

  __device__ __forceinline__ KeyScales() {}
  __device__ __forceinline__ KeyScales(const uint8_t* row, int group_half) {
    const auto* words = reinterpret_cast<const uint32_t*>(row);
    if constexpr (HEAD_SIZE < 128) {
      deltas = *reinterpret_cast<const uint16_t*>(row);
    } else if constexpr (kHalvesAWord == 2) {
      deltas = words[share_of_warp()];
    } else {
      deltas = words[2 * share_of_warp() + group_half];
    }
    base = (deltas & 0xFF) << kScaleShift;
    if (kHalvesAWord == 2)
      deltas >>= group_half * (kLaneUnits * SCALE_DELTA_BITS);
  }

  // 2^-112 times the scale of the half's group j.
  __device__ __forceinline__ float operator[](int j) const {
    const int place = 8 + SCALE_DELTA_BITS * j;
    const int shift = kScaleShift + SCALE_DELTA_STEP - 1 - place;
    const uint32_t mask = (1u << SCALE_DELTA_BITS) - 1;
    if (shift < 0) {
      return __uint_as_float(base -
                             (deltas >> -shift & mask << (place + shift)));
    }
    const uint32_t delta = deltas & mask << place;
    return __uint_as_float(mad_lo(delta, 0u - (1u << shift), base));
  }
};

// Scores of a tile, without the queries' factors: of eight columns, score c is
// of token g and column 2 * t + c, score 2 + c of token g + 8.
//
// queries: with 16, their codes are recalled here, word by word.
template <int kQueries>
__device__ __forceinline__ void key_scores(
    float (&scores)[kColumnTiles<kQueries>][4], const uint8_t* tile,
    Query<kQueries> (&queries)[kColumnTiles<kQueries>],
    const KeptQueries<kQueries>& kept, int lane) {
  constexpr int kGroupHalves = Query<kQueries>::kGroupHalves;
  constexpr int kAcross = kColumnTiles<kQueries>;
  const int g = lane / 4, t = lane % 4;
  uint32_t words[2][kLaneUnits];
  KeyScales scales[2][kGroupHalves];
  float total[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    load_key_words(words[n], tile, g + 8 * n, lane);
#pragma unroll
    for (int group_half = 0; group_half < kGroupHalves; ++group_half) {
      scales[n][group_half] =
          KeyScales(tile + KEY_SCALES_OFFSET + (g + 8 * n) * SCALE_BYTES,
                    kPaired<kQueries> ? t / 2 : group_half);
    }
  }
#pragma unroll
  for (int m = 0; m < kAcross; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[m][i] = 0.0f;
  }
#pragma unroll
  for (int j = 0; j < kLaneUnits; ++j) {
    uint32_t a[4], b[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t word = words[n][j], complement = ~word;
      a[n] = negative_levels(word);
      a[n + 2] = negative_levels(word >> 16);
      b[n] = positive_levels(complement);
      b[n + 2] = positive_levels(complement >> 16);
    }
#pragma unroll
    for (int group_half = 0; group_half < kGroupHalves; ++group_half) {
      const float scale[2] = {scales[0][group_half][j],
                              scales[1][group_half][j]};
      total[0] += scale[0], total[1] += scale[1];
#pragma unroll
      for (int m = 0; m < kAcross; ++m) {
        if (kAcross > 1 && group_half == 0) queries[m].recall(kept[m], lane, j);
        const uint32_t (&q)[2] = queries[m].codes[j][group_half];
        int products[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
        mma_s8(products, a[0], a[1], a[2], a[3], q[0], q[1]);
        mma_s8(products, b[0], b[1], b[2], b[3], q[0], q[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scores[m][i] += __int_as_float(products[i]) * scale[i / 2];
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kAcross; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[m][i] -= kMagic * total[i / 2];
  }
}

}  // namespace turbo
