// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Softmax, and the sum of a tile's values: O^T = V^T P^T, coordinates by
// queries.
#pragma once

#include "common/cap_scores.cuh"
#include "common/tile_values.cuh"
#include "decode/keys.cuh"

namespace turbo {

constexpr float kNoReference = -1e30f;

// A warp's running result of eight columns. Lane 4 * g + t has columns 2 * t
// and 2 * t + 1. It has coordinates output_coordinate(i, 0) and, in the other
// half of the numbers, (i, 1).
struct DecodeAccumulator {
  float output[kNumOutputs][4];
  float reference[2];
  float sum[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      reference[c] = kNoReference;
      sum[c] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kNumOutputs; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) output[i][c] = 0.0f;
    }
  }
};

// Raise the references to the largest scores, and rescale the running sums.
template <int kScores>
__device__ __forceinline__ void raise(DecodeAccumulator& acc,
                                      const float (&scores)[kScores]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float largest = acc.reference[c];
#pragma unroll
    for (int i = c; i < kScores; i += 2) largest = fmaxf(largest, scores[i]);
    largest = column_max(largest);
    const float rescale = exp2_approx(acc.reference[c] - largest);
    acc.reference[c] = largest;
    acc.sum[c] *= rescale;
#pragma unroll
    for (int i = 0; i < kNumOutputs; ++i) {
      acc.output[i][c] *= rescale;
      acc.output[i][2 + c] *= rescale;
    }
  }
}

// Tokens that a column sees, relative to the end of the segment's tokens: from
// first to last (exclusive). last is zero or less. With KEY_OFFSET first is
// a token of the sequence.
struct TokenLimits {
  int first, last;
};

// The visible tokens of tiles. There are num_tokens, and a column does not see
// the last few, at most most_hidden. Nor does it see tokens before its sliding
// window. A column has no reference until it sees a token, and so its limits
// are checked until then in any case.
struct Visible {
  int num_tokens;
  int most_hidden;
  const TokenLimits* limits;  // per column
  // With KEY_OFFSET: by how much a column's score of its first token lacks more
  // than those of the token's tile.
  const float* gains;

  __device__ __forceinline__ Visible of_columns(int first) const {
    return {num_tokens, most_hidden, limits + first, gains + first};
  }
};

// Weights of tiles' tokens as B fragments. A lane has tokens 2 * t and
// 2 * t + 1, and those eight later, of column lane / 4. Tokens that are not
// visible have weight zero.
//
// soft_cap: the cap of scores, with SOFT_CAP.
template <int kQueries, int kTiles>
__device__ __forceinline__ void weigh(uint32_t (&weights)[kTiles][2],
                                      DecodeAccumulator& acc,
                                      const float (&scores)[kTiles][4],
                                      const Query<kQueries>& query,
                                      const Visible& visible,
                                      const SoftCap& soft_cap, int lane) {
  const int g = lane / 4, t = lane % 4;
  constexpr int kTileScores = kPaired<kQueries> ? 2 : 4;
  constexpr int kScores = kTiles * kTileScores;
  float own[kScores];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kTileScores; ++i) {
      float& x = own[tile * kTileScores + i];
      if constexpr (kPaired<kQueries>) {
        // Lanes 0 and 1 of four keep tokens 0 to 7, the others 8 to 15.
        x = scores[tile][i] + __shfl_xor_sync(~0u, scores[tile][2 + i], 2);
      } else {
        x = scores[tile][i];
      }
    }
  }
  float factor[2] = {query.factor[0], query.factor[1]};
  if constexpr (SOFT_CAP != 0) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) own[i] = soft_cap(own[i] * factor[i % 2]);
    factor[0] = factor[1] = 1.0f;
  }
  float exponent[kScores];
  float above = 0.0f;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    exponent[i] = fmaf(own[i], factor[i % 2], -acc.reference[i % 2]);
    above = fmaxf(above, exponent[i]);
  }
  const bool ends =
      visible.num_tokens < kTiles * TILE_TOKENS + visible.most_hidden;
  if (__any_sync(~0u, above > kMaxExponent || ends)) {
    const TokenLimits limits[2] = {visible.limits[2 * t],
                                   visible.limits[2 * t + 1]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = kPaired<kQueries> ? t / 2 : i / 2 % 2;
      const int token =
          TILE_TOKENS * (i / kTileScores) + 8 * half + g - visible.num_tokens;
      const bool is_seen =
          token >= limits[i % 2].first && token < limits[i % 2].last;
      float score = own[i] * factor[i % 2];
      // No later number is of a pair's first token.
      if constexpr (KEY_OFFSET != 0) {
        if (i < 2 && token == limits[i % 2].first)
          score += visible.gains[2 * t + i];
      }
      own[i] = is_seen ? score : -INFINITY;
    }
    raise(acc, own);
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      exponent[i] = own[i] - acc.reference[i % 2];
  }
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    const float weight[2] = {exp2_approx(exponent[2 * i]),
                             exp2_approx(exponent[2 * i + 1])};
    acc.sum[0] += weight[0];
    acc.sum[1] += weight[1];
    const uint32_t packed =
        transposed(as_bits(__floats2half2_rn(weight[0], weight[1])));
    if constexpr (kPaired<kQueries>) {
      weights[i][0] = g < 4 ? packed : 0;
      weights[i][1] = g < 4 ? 0 : packed;
    } else {
      weights[i / 2][i % 2] = packed;
    }
  }
}

// Add V^T P^T of a tile, with eight columns per accumulator.
template <int kColumnTiles>
__device__ __forceinline__ void add_values(
    DecodeAccumulator (&acc)[kColumnTiles], const uint8_t* tile,
    const uint32_t (&weights)[kColumnTiles][2], int lane) {
  decode_tile_values(tile, lane, [&](int i, const uint32_t (&x)[4]) {
#pragma unroll
    for (int m = 0; m < kColumnTiles; ++m) {
      mma_f16(acc[m].output[i], x[0], x[1], x[2], x[3], weights[m][0],
              weights[m][1]);
    }
  });
}

}  // namespace turbo
