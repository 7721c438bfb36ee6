// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The partial result of a segment, from all teams.
#pragma once

#include "latent/slices_weigh.cuh"

namespace turbo {

// Write the references and sums of a team's columns to shared memory.
template <typename Plan>
__device__ __forceinline__ void share_sums(SliceShared<Plan>& shared,
                                           SliceAccumulator<Plan>& acc,
                                           const SlicePlace& own) {
  for_own_planes<Plan>(own, [&](int i, int plane) {
    float2 sum = acc.sum[i];
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, mask);
      sum.y += __shfl_xor_sync(~0u, sum.y, mask);
    }
    if (own.lane < 4) shared.across[own.team][plane][own.lane] = sum;
  });
  own.sync();
  const int column = 32 * own.warp + own.lane;
  if (column >= Plan::kColumns) return;
  const int n = column / 8, pair = column % 8 / 2;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * Plan::kTiles; ++i) {
    const float2 x =
        shared.across[own.team][2 * (i / 2 * Plan::kBlocks + n) + i % 2][pair];
    sum += column % 2 ? x.y : x.x;
  }
  const float4 scaling = shared.scaling[own.team][column / 2];
  shared.sums[own.team][column] = {column % 2 ? scaling.w : scaling.z, sum};
}

// The reference and the sum of a column, over all teams.
template <typename Plan>
__device__ __forceinline__ float2 joined_sum(const SliceShared<Plan>& shared,
                                             int column) {
  float reference = kNoReference, total = 0.0f;
#pragma unroll
  for (int team = 0; team < Plan::kTeams; ++team)
    reference = fmaxf(reference, shared.sums[team][column].x);
#pragma unroll
  for (int team = 0; team < Plan::kTeams; ++team) {
    const float2 x = shared.sums[team][column];
    total += exp2_approx(x.x - reference) * x.y;
  }
  return {reference, total};
}

// The index, in a column of `joined`, of a place in step s of a slice.
__device__ __forceinline__ int joined_place(int warp, int s, int place) {
  return warp * kSlicePitch + s / 2 * kPairPitch + s % 2 * 16 + place;
}

// Write a block of columns, whose results are in shared memory for all teams.
//
// target: the address for its first column.
// left: columns that are rows.
template <typename Plan>
__device__ __forceinline__ void write_joined(const SliceShared<Plan>& shared,
                                             float* target, int left) {
  constexpr int kChunks = LATENT_RANK / 4;
  for (int i = threadIdx.x; i < 8 * kChunks; i += kTeamThreads * Plan::kTeams) {
    const int column = i / kChunks, coordinate = i % kChunks * 4;
    if (column >= left) break;
    const DepthPlace at = place_of_latent(coordinate);
    const int place =
        joined_place(at.step / kOwnSteps, at.step % kOwnSteps, at.place);
    float4 sum = {};
#pragma unroll
    for (int team = 0; team < Plan::kTeams; ++team) {
      const float* x = shared.joined[team][column] + place;
      const float2 low = *reinterpret_cast<const float2*>(x);
      const float2 high = *reinterpret_cast<const float2*>(x + 8);
      sum.x += low.x, sum.y += low.y, sum.z += high.x, sum.w += high.y;
    }
    *reinterpret_cast<float4*>(target + int64_t(column) * LATENT_RANK +
                               coordinate) = sum;
  }
}

// Join all teams' results and write them.
template <typename Plan>
__device__ __forceinline__ void write_slices(SliceShared<Plan>& shared,
                                             SliceAccumulator<Plan>& acc,
                                             const LatentParams& p,
                                             const LatentSegment& segment,
                                             const SlicePlace& own) {
  const int g = own.lane / 4, t = own.lane % 4;
  share_sums(shared, acc, own);
  __syncthreads();
  const int num_rows = p.most_rows();
  const int64_t first_row =
      (int64_t(segment.seq) * p.num_splits + segment.split) * num_rows +
      segment.first_row;
  const int left = segment.num_rows - segment.first_row;
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    if (n > 0 && 8 * n < left)
      __syncthreads();  // until the block before has been read
    if (8 * n >= left) break;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = 2 * t + c;
      const float2 joined = joined_sum(shared, 8 * n + column);
      const float weight =
          exp2_approx(shared.sums[own.team][8 * n + column].x - joined.x);
      const float factor =
          joined.y != 0.0f ? weight * LATENT_GAIN / joined.y : 0.0f;
      float* to = shared.joined[own.team][column];
#pragma unroll
      for (int s = 0; s < kOwnSteps; ++s) {
        to[joined_place(own.warp, s, g)] = acc.output[s][n][c] * factor;
        to[joined_place(own.warp, s, g + 8)] = acc.output[s][n][2 + c] * factor;
      }
    }
    __syncthreads();
    write_joined(shared, p.partial + (first_row + 8 * n) * LATENT_RANK,
                 left - 8 * n);
  }
  const int column = threadIdx.x;
  if (column < Plan::kColumns && column < left) {
    const float2 joined = joined_sum(shared, column);
    float* lse = p.partial_lse + first_row + column;
    lse[0] = joined.x + log2f(joined.y);  // -inf if no token is seen
    if (segment.ends) {
      for (int s = segment.split + 1; s < p.num_splits; ++s)
        lse[int64_t(s - segment.split) * num_rows] = -INFINITY;
    }
  }
  // The next tiles are copied over the results.
  if constexpr (Plan::kBulk) fence_async_proxy();
  __syncthreads();
}

}  // namespace turbo
