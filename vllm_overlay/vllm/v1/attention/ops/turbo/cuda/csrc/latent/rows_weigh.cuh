// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Softmax of a step's scores by the consumer that has them.
#pragma once

#include "latent/rows_layout.cuh"

namespace turbo {

// Scores of a lane: rows g and g + 8, and tokens 8 * j + 2 * t and the next.
constexpr int kRowScores = kStepTokens / 2;
// Weights of a lane, in pairs, as the A operands of four steps of the depth.
using RowWeights = uint32_t[kStepTokens / 4];

// The largest of a lane's scores of its r-th row.
__device__ __forceinline__ float largest_of(const float (&scores)[kRowScores],
                                            int r) {
  float largest = scores[2 * r];
#pragma unroll
  for (int j = 0; j < kStepTokens / 8; ++j) {
    const float* s = scores + 4 * j + 2 * r;
    largest = fmaxf(largest, fmaxf(s[0], s[1]));
  }
  return largest;
}

// Raise the references to the largest scores that are seen, and rescale the
// running result. Scores of tokens that rows do not see become -inf.
__device__ __forceinline__ void raise_rows(RowsShared& shared,
                                           RowsAccumulator& acc,
                                           float (&scores)[kRowScores],
                                           int first_token,
                                           const RowsPlace& own) {
  const int t = own.lane % 4, row = own.first_row();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int limit = shared.limits[row + 8 * r] - first_token - 2 * t;
#pragma unroll
    for (int j = 0; j < kStepTokens / 8; ++j) {
      float* s = scores + 4 * j + 2 * r;
      if (8 * j >= limit) s[0] = -INFINITY;
      if (8 * j + 1 >= limit) s[1] = -INFINITY;
    }
    float largest = largest_of(scores, r) * acc.factor[r];
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    acc.change(r, fmaxf(largest, acc.reference[r]));
    if (t == 0) reference_of(shared, row + 8 * r) = acc.reference[r];
  }
}

// Weigh a step's tokens, and write their weights for the other consumer. The
// consumer's products that read the weights before have ended.
//
// limit: tokens that all rows see.
__device__ __forceinline__ void weigh_rows(
    RowsShared& shared, RowsAccumulator& acc, RowWeights& weights,
    float (&scores)[kRowScores], int step, int limit, const RowsPlace& own) {
  bool is_above = (step + 1) * kStepTokens > limit;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Factors are positive.
    const float x =
        fmaf(largest_of(scores, r), acc.factor[r], -acc.reference[r]);
    is_above |= x > kMaxScore;
  }
  const bool raises = own.sync_group_or(is_above);
  if (raises) raise_rows(shared, acc, scores, step * kStepTokens, own);
  if (own.warp == 0 && own.lane == 0) shared.is_raised[own.group] = raises;
#pragma unroll
  for (int j = 0; j < kStepTokens / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* s = scores + 4 * j + 2 * r;
      const float x = exp2_approx(fmaf(s[0], acc.factor[r], -acc.reference[r]));
      const float y = exp2_approx(fmaf(s[1], acc.factor[r], -acc.reference[r]));
      weights[2 * j + r] = as_bits(__floats2half2_rn(x, y));
      acc.sum[r] += x + y;
    }
  }
  const uint32_t target = shared_address(shared.weights);
  WarpRows(target + 16 * own.warp * kPlaceBytes).store(0, weights);
  fence_async_proxy();
  own.give_weights(own.group);
}

// Follow the references that the other consumer has raised, if it has.
__device__ __forceinline__ void follow_references(RowsShared& shared,
                                                  RowsAccumulator& acc,
                                                  int stage,
                                                  const RowsPlace& own) {
  if (!uniform(shared.is_raised[stage])) return;
  wgmma_wait<0>();
  hold(acc.output);
#pragma unroll
  for (int r = 0; r < 2; ++r)
    acc.change(r, reference_of(shared, own.first_row() + 8 * r));
}

}  // namespace turbo
