// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Softmax of a step's scores.
#pragma once

#include "common/cap_scores.cuh"
#include "common/references.cuh"
#include "decode_wgmma/layout.cuh"

namespace turbo {

// Compute tokens' weights from scores less the references, and store them.
//
// row: the address of the lane's row of matrices, in the first two blocks: see
//   store_matrices.
template <typename Plan>
__device__ __forceinline__ void weigh(float (&weights)[Plan::kScores],
                                      const float (&exponents)[Plan::kScores],
                                      uint32_t row) {
  constexpr int kBlockBytes = 16 * kStepTokens;
#pragma unroll
  for (int i = 0; i < Plan::kScores; ++i)
    weights[i] = exp2_approx(exponents[i]);
  uint32_t packed[Plan::kScores / 2];
#pragma unroll
  for (int i = 0; i < Plan::kScores / 2; ++i)
    packed[i] = as_bits(__floats2half2_rn(weights[2 * i], weights[2 * i + 1]));
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; n += 2) {
    // With an odd number of blocks, one is stored twice.
    const int first = n + 1 < Plan::kBlocks ? n : n - 1;
    const uint32_t* x = packed + 2 * first;
    store_matrices(row + first * kBlockBytes, x[0], x[1], x[2], x[3]);
  }
}

// A score for base-2 softmax.
__device__ __forceinline__ float scaled(float score, float factor,
                                        const SoftCap& soft_cap) {
  if constexpr (SOFT_CAP != 0) return soft_cap(score * factor);
  return score * factor;
}

// Mask tokens that columns do not see, raise a warpgroup's references to the
// largest scores, and rescale the running sums. The scores become exponents.
//
// token, other: the tokens of rows g and g + 8.
template <typename Plan>
__device__ __forceinline__ void raise(ColumnsShared<Plan>& shared,
                                      ColumnsAccumulator<Plan>& acc,
                                      float (&scores)[Plan::kScores], int token,
                                      int other, const SoftCap& soft_cap,
                                      const Place& own) {
  const int g = own.lane / 4, t = own.lane % 4;
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    const int pair = 4 * n + t;
    const float4 scaling = shared.scaling[own.set][pair];
    const int2 firsts =
        *reinterpret_cast<const int2*>(&shared.firsts[2 * pair]);
    const int2 limits =
        *reinterpret_cast<const int2*>(&shared.limits[2 * pair]);
    float* s = scores + 4 * n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = i < 2 ? token : other;
      const bool is_seen = n >= (i % 2 ? firsts.y : firsts.x) &&
                           n < (i % 2 ? limits.y : limits.x);
      float x = scaled(s[i], i % 2 ? scaling.y : scaling.x, soft_cap);
      if constexpr (KEY_OFFSET != 0) {
        if (i < 2 && token == 0)
          x += shared.first_gains[own.set][2 * pair + i % 2];
      }
      s[i] = is_seen ? x : -INFINITY;
    }
    float2 largest = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
    largest = {column_max(largest.x), column_max(largest.y)};
    if (g == 0) shared.across[own.set][own.warp][pair] = largest;
  }
  own.sync_set();
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    const int pair = 4 * n + t;
    const float4 scaling = shared.scaling[own.set][pair];
    const float2 reference = raised(shared, own.set, pair, scaling);
    const float rescale[2] = {exp2_approx(scaling.z - reference.x),
                              exp2_approx(scaling.w - reference.y)};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      acc.sum[2 * n + c] *= rescale[c];
#pragma unroll
      for (int m = 0; m < kOutputs; ++m) {
        acc.output[m][4 * n + c] *= rescale[c];
        acc.output[m][4 * n + 2 + c] *= rescale[c];
      }
    }
    float* s = scores + 4 * n;
    s[0] -= reference.x, s[1] -= reference.y;
    s[2] -= reference.x, s[3] -= reference.y;
  }
  own.sync_set();
  if (own.warp == 0 && g == 0) {
#pragma unroll
    for (int n = 0; n < Plan::kBlocks; ++n) {
      float4& scaling = shared.scaling[own.set][4 * n + t];
      const float2 reference = raised(shared, own.set, 4 * n + t, scaling);
      scaling.z = reference.x, scaling.w = reference.y;
    }
  }
}

// Weigh a step's tokens.
//
// parity: the index of the set's weights that are written.
template <typename Plan>
__device__ __forceinline__ void weigh_step(
    ColumnsShared<Plan>& shared, ColumnsAccumulator<Plan>& acc,
    float (&scores)[Plan::kScores], const ColumnsSegment& segment, int step,
    int parity, const SoftCap& soft_cap, const Place& own) {
  const int lane = own.lane, t = lane % 4;
  // Lane l has the address of row l % 8 of matrix l / 8. Matrices are of rows
  // from 0 or 8, and of two blocks of columns.
  const int stored = token_of_row(lane % 8) ^ lane & 8;
  const uint32_t row =
      shared_address(shared.weights[own.set][parity][lane / 16]
                                   [own.warp * TILE_TOKENS + stored]);
  float exponents[Plan::kScores], weights[Plan::kScores];
  float above = 0.0f;
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    const float4 scaling = shared.scaling[own.set][4 * n + t];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = i % 2 ? scaling.y : scaling.x;
      const float reference = i % 2 ? scaling.w : scaling.z;
      const float x =
          SOFT_CAP ? scaled(scores[4 * n + i], factor, soft_cap) - reference
                   : fmaf(scores[4 * n + i], factor, -reference);
      exponents[4 * n + i] = x;
      above = fmaxf(above, x);
    }
  }
  weigh<Plan>(weights, exponents, row);
  fence_async_proxy();
  const int first = (segment.first_tile + step * kStepTiles) * TILE_TOKENS;
  const bool is_cut =
      first + kStepTokens > segment.first_limit || first < segment.last_first;
  if (own.sync_set_or(above > kMaxScore || is_cut)) {
    const int token = first + own.warp * TILE_TOKENS + token_of_row(lane / 4);
    raise(shared, acc, scores, token, token ^ 8, soft_cap, own);
    weigh<Plan>(weights, scores, row);
    fence_async_proxy();
    own.sync_set();
  }
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    acc.sum[2 * n] += weights[4 * n] + weights[4 * n + 2];
    acc.sum[2 * n + 1] += weights[4 * n + 1] + weights[4 * n + 3];
  }
}

}  // namespace turbo
