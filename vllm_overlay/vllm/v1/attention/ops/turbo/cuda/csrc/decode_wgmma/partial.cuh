// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The partial result of a segment.
#pragma once

#include "decode_wgmma/layout.cuh"

namespace turbo {

// Write a warpgroup's result over its tiles, and its references and sums.
template <typename Plan>
__device__ __forceinline__ void leave_result(ColumnsShared<Plan>& shared,
                                             ColumnsAccumulator<Plan>& acc,
                                             const ValuePlace& place,
                                             const Place& own) {
  constexpr int kColumns = Plan::kColumns;
  constexpr int kStride = ColumnsShared<Plan>::kResultStride;
  const int g = own.lane / 4, t = own.lane % 4, set = own.set;
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    const float2 sum = {column_sum(acc.sum[2 * n]),
                        column_sum(acc.sum[2 * n + 1])};
    if (g == 0) shared.across[set][own.warp][4 * n + t] = sum;
  }
  own.sync_set();  // after it, no thread reads tiles either
  if (const int i = own.thread(); i < kColumns) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      sum += reinterpret_cast<const float*>(shared.across[set][w])[i];
    }
    float reference =
        reinterpret_cast<const float*>(&shared.scaling[set][i / 2])[2 + i % 2];
    if constexpr (KEY_OFFSET != 0) {
      if (reference != kNoReference) reference += shared.missing[set][i];
    }
    shared.sums[set][i] = {reference, sum};
  }
  float* result = reinterpret_cast<float*>(shared.tiles[set]);
#pragma unroll
  for (int m = 0; m < kOutputs; ++m) {
#pragma unroll
    for (int i = 0; i < Plan::kScores; ++i) {
      const int column = i / 4 * 8 + 2 * t + i % 2;
      result[column * kStride + place.coordinate(m, i / 2 % 2)] =
          acc.output[m][i];
    }
  }
}

// Join the warpgroups' results, which are of different tokens, and write them.
template <typename Plan>
__device__ __forceinline__ void write_partial(ColumnsShared<Plan>& shared,
                                              const AttentionParams& p,
                                              const ColumnsSegment& segment) {
  constexpr int kColumns = Plan::kColumns, kSets = Plan::kSets;
  constexpr int kStride = ColumnsShared<Plan>::kResultStride;
  const int num_queries = p.num_queries();
  const int64_t first_row =
      (int64_t(segment.seq) * p.num_splits + segment.split) * num_queries;
  __syncthreads();
  if (const int i = threadIdx.x; i < kColumns) {
    float largest = kNoReference, total = 0.0f;
#pragma unroll
    for (int set = 0; set < kSets; ++set)
      largest = fmaxf(largest, shared.sums[set][i].x);
    float weights[kSets];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const float2 one = shared.sums[set][i];
      weights[set] = exp2_approx(one.x - largest);
      total += weights[set] * one.y;
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set)
      shared.sums[set][i].y = total != 0.0f ? weights[set] / total : 0.0f;
    if (const int row = shared.rows[i]; row >= 0) {
      float* lse = p.partial_lse + first_row + row;
      *lse = largest + log2f(total);  // -inf if no token is seen
      if (segment.ends) {
#pragma unroll 1
        for (int s = segment.split + 1; s < p.num_splits; ++s)
          lse[int64_t(s - segment.split) * num_queries] = -INFINITY;
      }
    }
  }
  __syncthreads();
  const auto* results = reinterpret_cast<const float*>(shared.tiles[0]);
#pragma unroll 2
  for (int i = threadIdx.x; i < kColumns * HEAD_SIZE; i += Plan::kThreads) {
    const int column = i / HEAD_SIZE, coordinate = i % HEAD_SIZE;
    const int row = shared.rows[column];
    if (row < 0) continue;
    float sum = 0.0f;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      sum += shared.sums[set][column].y *
             results[set * (sizeof(shared.tiles[0]) / 4) + column * kStride +
                     coordinate];
    }
    p.partial[(first_row + row) * HEAD_SIZE + coordinate] = sum;
  }
  // The next copies go over the results that were read.
  fence_async_proxy();
  __syncthreads();
}

}  // namespace turbo
