// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Softmax of a step's scores, row by row.
#pragma once

#include "common/cap_scores.cuh"
#include "common/numbers.cuh"

namespace turbo {

constexpr float kNoRowReference = -1e30f;
// If a lane's weights of a row in a step have a larger sum, the reference is
// raised. Weights then are finite in fp16.
constexpr float kMaxWeights = 8192.0f;
// A lane's scores of a tile, in both rows.
constexpr int kTileScores = 8;

// A lane's part of a running result, in rows g and g + 8 of its warp. Numbers
// 4 * n and 4 * n + 1 are in row g, and in columns 8 * n + 2 * t and the next.
// Numbers 4 * n + 2 and 4 * n + 3 are in row g + 8.
struct RowsAccumulator {
  float output[HEAD_SIZE / 2];
  float reference[2];
  float sum[2];      // over the lane's columns
  float factor[2];   // of scores
  float missing[2];  // q.m, which scores lack: see common/offset.cuh

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 2; ++i) output[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference[r] = kNoRowReference;
      sum[r] = missing[r] = 0.0f;
    }
  }
};

// The maximum, or the sum, over the four lanes that have a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Tokens that a row sees, relative to a step's first: from first to last
// (exclusive).
struct RowLimits {
  int first, last;
};

// Mask tokens that are not seen, raise the references to the largest scores,
// and rescale the running sums.
template <int kScores>
__device__ __forceinline__ void raise_rows(RowsAccumulator& acc,
                                           float (&scores)[kScores],
                                           const RowLimits (&limits)[2],
                                           int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = acc.reference[r];
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = scores[4 * n + 2 * r + c];
        const int token = 8 * n + 2 * t + c;
        const bool is_seen = token >= limits[r].first && token < limits[r].last;
        x = is_seen ? x : -INFINITY;
        largest = fmaxf(largest, x);
      }
    }
    largest = row_max(largest);
    const float rescale = exp2_approx(acc.reference[r] - largest);
    acc.reference[r] = largest;
    acc.sum[r] *= rescale;
#pragma unroll
    for (int n = 0; n < HEAD_SIZE / 8; ++n) {
      acc.output[4 * n + 2 * r] *= rescale;
      acc.output[4 * n + 2 * r + 1] *= rescale;
    }
  }
}

// Weights of a step's tokens as A fragments, with the references as they are.
// Words 2 * n and 2 * n + 1 are in columns from 8 * n on. Returns whether all
// of the warp's weights are small enough.
//
// sum: the sum of a row's weights, written.
// factors: the factors of the step's tiles.
template <int kScores>
__device__ __forceinline__ bool weigh_rows(uint32_t (&weights)[kScores / 2],
                                           float (&sum)[2],
                                           const RowsAccumulator& acc,
                                           const float (&scores)[kScores],
                                           const float* factors,
                                           const SoftCap& soft_cap) {
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    const int r = i / 2 % 2;
    const float factor = factors[i / kTileScores] * acc.factor[r];
    float weight[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (SOFT_CAP != 0) {
        weight[c] =
            exp2_approx(soft_cap(scores[i + c] * factor) - acc.reference[r]);
      } else {
        weight[c] = exp2_approx(fmaf(scores[i + c], factor, -acc.reference[r]));
      }
    }
    sum[r] += weight[0] + weight[1];
    weights[i / 2] = as_bits(__floats2half2_rn(weight[0], weight[1]));
  }
  // The comparison is negated so that NaN counts as too large.
  return !__any_sync(~0u, !(fmaxf(sum[0], sum[1]) <= kMaxWeights));
}

// Weigh again where some tokens are not seen, or where weights are too large.
//
// gains: with KEY_OFFSET: what is added to the score of the step's first token.
template <int kScores>
__device__ __forceinline__ void weigh_anew(
    uint32_t (&weights)[kScores / 2], float (&sum)[2], RowsAccumulator& acc,
    float (&scores)[kScores], const float* factors,
    const RowLimits (&limits)[2], const float (&gains)[2],
    const SoftCap& soft_cap, int lane) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    scores[i] *= factors[i / kTileScores] * acc.factor[i / 2 % 2];
    if constexpr (SOFT_CAP != 0) scores[i] = soft_cap(scores[i]);
  }
  if constexpr (KEY_OFFSET != 0) scores[0] += gains[0], scores[2] += gains[1];
  raise_rows(acc, scores, limits, lane);
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    const int r = i / 2 % 2;
    const float weight[2] = {exp2_approx(scores[i] - acc.reference[r]),
                             exp2_approx(scores[i + 1] - acc.reference[r])};
    sum[r] += weight[0] + weight[1];
    weights[i / 2] = as_bits(__floats2half2_rn(weight[0], weight[1]));
  }
}

}  // namespace turbo
