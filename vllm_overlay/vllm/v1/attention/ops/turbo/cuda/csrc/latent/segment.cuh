// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention of a block to a segment of a sequence's latents.
//
// Tokens are the rows of the tensor core's products and query rows, heads times
// query tokens, their columns: S^T = K q^T, O^T = V^T P^T. Two warpgroups take
// steps of 64 tokens in turn, each on its own; one's decoding then overlaps the
// other's products. A latent is decoded once: its registers are an operand of
// S^T, and are stored for O^T, which is summed over tokens, while the step
// after is decoded. Softmax is in base 2.
#pragma once

#include "latent/multiply.cuh"
#include "latent/partial.cuh"
#include "latent/queries.cuh"
#include "latent/weigh.cuh"

namespace turbo {

template <typename Plan>
__device__ __forceinline__ void attend_segment(LatentShared<Plan>& shared,
                                               TileQueue<Plan::kStages>& queue,
                                               const LatentParams& p,
                                               const LatentSegment& segment,
                                               int group, int warp) {
  const int lane = threadIdx.x % 32;
  queue.begin(segment, group);
#pragma unroll
  for (int stage = 0; stage < Plan::kStages; ++stage) queue.issue(lane, 0);
  load_queries(shared, p, segment);
  LatentAccumulator<Plan> acc;
#pragma unroll
  for (int m = 0; m < kOutputs; ++m) {
#pragma unroll
    for (int i = 0; i < Plan::kScores; ++i) acc.output[m][i] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < Plan::kScores / 2; ++i) acc.sum[i] = 0.0f;
  fence_async_proxy();
  __syncthreads();
  int step = segment.first_step + group;
  if (step < segment.last_step) {
    LaneTile taken;
    Fragments fragments[2];
    float scores[Plan::kScores];
    take_tile(shared, taken, queue, segment, step, group, warp);
    if constexpr (Plan::kEarly) queue.issue(lane, taken.any_bits());
    decode_first(fragments, taken);
    multiply_tile<false>(shared, acc, scores, fragments, taken, group, warp);
#pragma unroll 1
    while (true) {
      const bool goes_on = step + kGroups < segment.last_step;
      if constexpr (Plan::kEarly) {
        if (goes_on)
          take_tile(shared, taken, queue, segment, step + kGroups, group, warp);
      } else {
        queue.issue(lane, 0);  // what was loaded has been decoded
      }
      weigh_step(shared, acc, scores, segment, step, group, warp);
      if (!goes_on) break;
      step += kGroups;
      if constexpr (Plan::kEarly) {
        queue.issue(lane, taken.any_bits());
      } else {
        take_tile(shared, taken, queue, segment, step, group, warp);
      }
      decode_first(fragments, taken);
      multiply_tile<true>(shared, acc, scores, fragments, taken, group, warp);
    }
    const ValueOperands operands(shared, group);
#pragma unroll
    for (int block = 0; block < kOutputs; ++block)
      add_block(acc, operands, block);
    wgmma_wait<0>();
    acc.hold_outputs();
  }
  __syncthreads();
  write_partial(shared, acc, p, segment, group, warp);
}

}  // namespace turbo
