// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The partial result of a segment.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

// The reference and sum of a column for the tokens of the other warpgroup.
template <typename Plan>
__device__ __forceinline__ float2 other_sum(const LatentShared<Plan>& shared,
                                            int set, int column) {
  if constexpr (Plan::kShares) return {kNoReference, 0.0f};
  return shared.sums[Plan::kSets - 1 - set][column];
}

// Join both warpgroups' results, which are of different tokens or of different
// coordinates, and write them.
template <typename Plan>
__device__ __forceinline__ void write_partial(LatentShared<Plan>& shared,
                                              LatentAccumulator<Plan>& acc,
                                              const LatentParams& p,
                                              const LatentSegment& segment,
                                              const Place<Plan>& own) {
  constexpr int kColumns = Plan::kColumns, kOutputs = Plan::kOutputs;
  const int g = own.lane / 4, t = own.lane % 4, set = own.set();
#pragma unroll
  for (int c = 0; c < 2 * Plan::kOwn; ++c) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2)
      acc.sum[c] += __shfl_xor_sync(~0u, acc.sum[c], mask);
  }
  if (g == 0) {
#pragma unroll
    for (int n = 0; n < Plan::kOwn; ++n)
      shared.across[set][own.warp][4 * (own.first_block() + n) + t] = {
          acc.sum[2 * n], acc.sum[2 * n + 1]};
  }
  __syncthreads();
  const int thread = own.thread();
  if (thread < kColumns && own.part() == 0) {
    const float* x = reinterpret_cast<const float*>(shared.across[set][0]);
    const float sum = x[thread] + x[kColumns + thread] +
                      x[2 * kColumns + thread] + x[3 * kColumns + thread];
    const float reference = reinterpret_cast<const float*>(
        &shared.scaling[set][thread / 2])[2 + thread % 2];
    shared.sums[set][thread] = {reference, sum};
  }
  __syncthreads();
  // Two warpgroups with the same coordinates give each other half of them, with
  // weights.
  float4* given = reinterpret_cast<float4*>(shared.values[own.group]) + thread;
  constexpr int kKept = kOutputs / Plan::kSets;
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float2 one = shared.sums[set][8 * n + 2 * t + c];
      const float2 other = other_sum(shared, set, 8 * n + 2 * t + c);
      const float reference = fmaxf(one.x, other.x);
      const float weight = exp2_approx(one.x - reference);
      const float total =
          weight * one.y + exp2_approx(other.x - reference) * other.y;
      factor[c] = total != 0.0f ? weight * LATENT_GAIN / total : 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) {
      float* x = acc.output[m] + 4 * n;
      x[0] *= factor[0], x[1] *= factor[1];
      x[2] *= factor[0], x[3] *= factor[1];
      if (m / kKept != set)
        given[(m % kKept * Plan::kBlocks + n) * kGroupThreads] = {x[0], x[1],
                                                                  x[2], x[3]};
    }
  }
  if constexpr (!Plan::kShares) __syncthreads();
  const float4* taken =
      reinterpret_cast<const float4*>(shared.values[1 - own.group]) + thread;
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
      if (m / kKept != set) continue;
      float4 other = {};
      if constexpr (!Plan::kShares)
        other = taken[(m % kKept * Plan::kBlocks + n) * kGroupThreads];
      const float* x = acc.output[m] + 4 * n;
      float* to =
          target + output_coordinate(own.part() * kOutputs + m, own.warp, g, 0);
      if (left > 0) to[0] = x[0] + other.x, to[2] = x[2] + other.z;
      if (left > 1) {
        to[LATENT_RANK] = x[1] + other.y;
        to[LATENT_RANK + 2] = x[3] + other.w;
      }
    }
  }
  const int column = threadIdx.x;
  if (column < kColumns && segment.first_row + column < segment.num_rows) {
    const float2 a = shared.sums[0][column], b = other_sum(shared, 0, column);
    const float reference = fmaxf(a.x, b.x);
    const float total =
        exp2_approx(a.x - reference) * a.y + exp2_approx(b.x - reference) * b.y;
    float* lse = p.partial_lse + first_row + column;
    lse[0] = reference + log2f(total);  // -inf if no token is seen
    if (segment.ends) {
      for (int s = segment.split + 1; s < p.num_splits; ++s)
        lse[int64_t(s - segment.split) * num_rows] = -INFINITY;
    }
  }
  __syncthreads();  // before the memory that was read is written again
}

}  // namespace turbo
