// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Queries and the scores of a tile's keys: S^T = K q^T, tokens by queries.
//
// A query belongs to a query head and a query token. kQueries of a KV head
// attend at once: 4, 8 or 16. With four (kPaired), columns 4 to 7 of K q^T hold
// the products of the other half of the scale groups. Columns 4 to 7 of O^T
// then hold those of tokens 8 to 15. With 16 a fragment of keys or values is
// multiplied by two of queries.
#pragma once

#include "common/tile.cuh"
#include "decode/key_codes.cuh"
#include "decode/key_scales.cuh"
#include "decode/share.cuh"

namespace turbo {

template <int kQueries>
constexpr bool kPaired = kQueries < kColumns;
// Results of the tensor core for a tile's tokens, each with eight columns.
template <int kQueries>
constexpr int kColumnTiles = kPaired<kQueries> ? 1 : kQueries / kColumns;
template <int kQueries>
constexpr int kAllColumns = kColumns * kColumnTiles<kQueries>;

// The queries of eight columns.
template <int kQueries>
struct Query {
  // B fragments: [word of a lane][half of the scale groups][codes 0-3, 4-7].
  // With kPaired a column has only one half.
  static constexpr int kGroupHalves = kPaired<kQueries> ? 1 : 2;
  uint32_t codes[kLaneUnits][kGroupHalves][2];
  float factor[2];  // of scores, for this lane's two columns

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
  // Load vector i. Without kPaired it has the codes of a word.
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

// The kept queries of all columns of a pass.
template <int kQueries>
using KeptQueries = typename Query<kQueries>::Kept[kColumnTiles<kQueries>];

// Quantise the queries of eight columns to int8, with a factor each. Every
// other unit has the opposite sign: see key_scores.
//
// rows: the queries' places in p_queries and p_scales; -1 for a column without
//   a query.
// shared: scratch of warps that share tiles.
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
    const float to_code = j % 2 == 0 ? inverse : -inverse;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The lowest byte of a number near kMagic is that of its integer part.
      uint32_t bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __half2 pair = q[4 * half + i][j / 2];
        const float x = __half2float(j % 2 == 0 ? pair.x : pair.y);
        bits[i] = __float_as_uint(fmaf(x, to_code, kMagic));
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

// Products of a tile's keys, plus kMagic: [unit of a lane][half of the scale
// groups, one with kPaired][eight columns][numbers of a lane].
template <int kQueries>
using KeyProducts =
    int[kLaneUnits][Query<kQueries>::kGroupHalves][kColumnTiles<kQueries>][4];

// The token of a tile that a lane has in row g (n = 0) or g + 8 (n = 1) of
// products. With kPaired the two change places in columns 4 to 7.
template <int kQueries>
__device__ __forceinline__ int token_of_row(int n, int lane) {
  return lane / 4 + 8 * (kPaired<kQueries> ? n ^ lane % 4 / 2 : n);
}

template <int kQueries>
__device__ __forceinline__ void multiply_keys(
    KeyProducts<kQueries>& products, const uint8_t* tile, const KeyCodes& codes,
    Query<kQueries> (&queries)[kColumnTiles<kQueries>],
    const KeptQueries<kQueries>& kept, int lane) {
  constexpr int kGroupHalves = Query<kQueries>::kGroupHalves;
  constexpr int kAcross = kColumnTiles<kQueries>;
  // Unit by unit if a unit has several products: those of one table then do not
  // wait for those of the other. Otherwise table by table, if registers have
  // room.
  constexpr bool kByUnit = !kPaired<kQueries> || HEAD_SIZE > 128;
  uint32_t words[2][kLaneUnits];
#pragma unroll
  for (int n = 0; n < 2; ++n)
    codes.load(words[n], tile, token_of_row<kQueries>(n, lane), lane);
#pragma unroll
  for (int i = 0; i < 2 * kLaneUnits; ++i) {
    const int j = kByUnit ? i / 2 : i % kLaneUnits;
    const int table = kByUnit ? i % 2 : i / kLaneUnits;
    uint32_t a[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t word = words[n][j], complement = ~word;
      a[n] = table ? codes.second(complement) : codes.first(word);
      a[n + 2] =
          table ? codes.second(complement >> 16) : codes.first(word >> 16);
    }
#pragma unroll
    for (int half = 0; half < kGroupHalves; ++half) {
#pragma unroll
      for (int m = 0; m < kAcross; ++m) {
        if (kAcross > 1 && half == 0 && table == 0)
          queries[m].recall(kept[m], lane, j);
        const uint32_t (&q)[2] = queries[m].codes[j][half];
        int (&d)[4] = products[j][half][m];
        if (table == 0) {
          mma_s8(d, a[0], a[1], a[2], a[3], q[0], q[1], kMagicBits);
        } else {
          mma_s8(d, a[0], a[1], a[2], a[3], q[0], q[1]);
        }
      }
    }
  }
}

// Scores of a tile, without the queries' factors. In each eight columns, score
// c is that of the token of row g and column 2 * t + c. Score 2 + c is that of
// the token of row g + 8.
//
// tiles, scales: those of two tiles. This tile's tokens begin at first_token.
template <int kQueries>
__device__ __forceinline__ void key_scores(
    float (&scores)[kColumnTiles<kQueries>][4],
    const KeyProducts<kQueries>& products, const uint8_t* tiles,
    const KeyScales<kPaired<kQueries>>& scales, int first_token, int lane) {
  constexpr int kGroupHalves = Query<kQueries>::kGroupHalves;
  const int lane_half = kPaired<kQueries> ? lane % 4 / 2 : 0;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int token = first_token + token_of_row<kQueries>(n, lane);
    float scale[kGroupHalves * kLaneUnits];
    const float start = scales.load(scale, tiles, token, lane_half);
#pragma unroll
    for (int m = 0; m < kColumnTiles<kQueries>; ++m) {
#pragma unroll
      for (int c = 2 * n; c < 2 * n + 2; ++c) {
        scores[m][c] = start;
#pragma unroll
        for (int j = 0; j < kLaneUnits; ++j) {
#pragma unroll
          for (int half = 0; half < kGroupHalves; ++half) {
            const float x = scale[half * kLaneUnits + j];
            const float product = __int_as_float(products[j][half][m][c]);
            scores[m][c] += product * (j % 2 == 0 ? x : -x);
          }
        }
      }
    }
  }
}

}  // namespace turbo
