// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Softmax of a step's scores, row by row.
#pragma once

#include "common/cap_scores.cuh"
#include "common/tile.cuh"
#include "extend_rows/layout.cuh"

namespace turbo {

constexpr float kNoRowReference = -1e30f;

// A lane's part of a warpgroup's running result: of rows g and g + 8 of its
// warp's. Numbers 4 * n and 4 * n + 1 are of the first and columns 8 * n + 2 *
// t and the next, those two later of the second.
struct RowsAccumulator {
  float output[HEAD_SIZE / 2];
  float reference[2];
  float sum[2];      // of the lane's columns
  float factor[2];   // of scores
  float missing[2];  // what the scores that the references are of lack

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

// Over the four lanes that have a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Tokens that a row sees, relative to a step's first: up to last, exclusive.
struct RowLimits {
  int first, last;
};

// Leave out what is not seen, raise the references to the largest scores, and
// rescale what is summed so far.
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

// Weights of a step's tokens as A fragments: numbers 2 * n and 2 * n + 1 of
// columns 8 * n. Scores become what is left of them.
//
// factors: of the step's tokens. ends: whether some are not seen.
template <int kScores>
__device__ __forceinline__ void weigh_rows(uint32_t (&weights)[kScores / 2],
                                           RowsAccumulator& acc,
                                           float (&scores)[kScores],
                                           const float* factors, bool ends,
                                           const RowLimits (&limits)[2],
                                           const SoftCap& soft_cap, int lane) {
  const int t = lane % 4;
  float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n) {
    const float2 factor =
        *reinterpret_cast<const float2*>(factors + 8 * n + 2 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = scores[4 * n + i];
      x *= i % 2 == 0 ? factor.x : factor.y;
      if constexpr (SOFT_CAP != 0) x = soft_cap(x * acc.factor[i / 2]);
      largest[i / 2] = fmaxf(largest[i / 2], x);
    }
  }
  float factor[2] = {acc.factor[0], acc.factor[1]};
  if constexpr (SOFT_CAP != 0) factor[0] = factor[1] = 1.0f;
  const float above = fmaxf(fmaf(largest[0], factor[0], -acc.reference[0]),
                            fmaf(largest[1], factor[1], -acc.reference[1]));
  if (__any_sync(~0u, above > kMaxExponent || ends)) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= factor[i / 2 % 2];
    factor[0] = factor[1] = 1.0f;
    raise_rows(acc, scores, limits, lane);
  }
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* x = scores + 4 * n + 2 * r;
      const float weight[2] = {
          exp2_approx(fmaf(x[0], factor[r], -acc.reference[r])),
          exp2_approx(fmaf(x[1], factor[r], -acc.reference[r]))};
      acc.sum[r] += weight[0] + weight[1];
      weights[2 * n + r] = as_bits(__floats2half2_rn(weight[0], weight[1]));
    }
  }
}

}  // namespace turbo
