// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The partial result of a segment.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

// Join both warpgroups' results and write them.
template <typename Plan>
__device__ __forceinline__ void write_partial(LatentShared<Plan>& shared,
                                              LatentAccumulator<Plan>& acc,
                                              const LatentParams& p,
                                              const LatentSegment& segment,
                                              int group, int warp) {
  constexpr int kColumns = Plan::kColumns;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int c = 0; c < Plan::kScores / 2; ++c) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2)
      acc.sum[c] += __shfl_xor_sync(~0u, acc.sum[c], mask);
  }
  if (g == 0) {
#pragma unroll
    for (int n = 0; n < Plan::kBlocks; ++n)
      shared.across[group][warp][4 * n + t] = {acc.sum[2 * n],
                                               acc.sum[2 * n + 1]};
  }
  __syncthreads();
  const int thread = threadIdx.x % kGroupThreads;
  if (thread < kColumns) {
    const float* own = reinterpret_cast<const float*>(shared.across[group][0]);
    const float sum = own[thread] + own[kColumns + thread] +
                      own[2 * kColumns + thread] + own[3 * kColumns + thread];
    const float reference = reinterpret_cast<const float*>(
        &shared.scaling[group][thread / 2])[2 + thread % 2];
    shared.sums[group][thread] = {reference, sum};
  }
  __syncthreads();
  // Each gives the other half of its coordinates, with weights.
  float4* given = reinterpret_cast<float4*>(shared.values[group]) + thread;
  constexpr int kHalf = kOutputs / 2;
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float2 own = shared.sums[group][8 * n + 2 * t + c];
      const float2 other = shared.sums[1 - group][8 * n + 2 * t + c];
      const float reference = fmaxf(own.x, other.x);
      const float weight = exp2_approx(own.x - reference);
      const float total =
          weight * own.y + exp2_approx(other.x - reference) * other.y;
      factor[c] = total != 0.0f ? weight * LATENT_GAIN / total : 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) {
      float* x = acc.output[m] + 4 * n;
      x[0] *= factor[0], x[1] *= factor[1];
      x[2] *= factor[0], x[3] *= factor[1];
      if (m / kHalf != group)
        given[(m % kHalf * (Plan::kBlocks) + n) * kGroupThreads] = {x[0], x[1],
                                                                    x[2], x[3]};
    }
  }
  __syncthreads();
  const float4* taken =
      reinterpret_cast<const float4*>(shared.values[1 - group]) + thread;
  const int num_rows = p.most_rows();
  const int64_t first_row =
      (int64_t(segment.seq) * p.num_splits + segment.split) * num_rows +
      segment.first_row;
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    const int column = 8 * n + 2 * t;
    const int left = segment.num_rows - segment.first_row - column;
    float* target = p.partial + (first_row + column) * LATENT_RANK;
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) {
      if (m / kHalf != group) continue;
      const float4 other =
          taken[(m % kHalf * (Plan::kBlocks) + n) * kGroupThreads];
      const float* x = acc.output[m] + 4 * n;
      float* to = target + output_coordinate(m, warp, g, 0);
      if (left > 0) to[0] = x[0] + other.x, to[2] = x[2] + other.z;
      if (left > 1) {
        to[LATENT_RANK] = x[1] + other.y;
        to[LATENT_RANK + 2] = x[3] + other.w;
      }
    }
  }
  const int column = threadIdx.x;
  if (column < kColumns && segment.first_row + column < segment.num_rows) {
    const float2 a = shared.sums[0][column], b = shared.sums[1][column];
    const float reference = fmaxf(a.x, b.x);
    const float total =
        exp2_approx(a.x - reference) * a.y + exp2_approx(b.x - reference) * b.y;
    float* lse = p.partial_lse + first_row + column;
    lse[0] = reference + log2f(total);  // -inf where nothing is seen
    if (segment.ends) {
      for (int s = segment.split + 1; s < p.num_splits; ++s)
        lse[int64_t(s - segment.split) * num_rows] = -INFINITY;
    }
  }
  __syncthreads();  // before what was read is written again
}

}  // namespace turbo
