// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention of a block to a segment of a sequence's latents.
//
// Query rows, heads times query tokens, are the columns of the tensor core's
// products: S^T = K q^T, O^T = V^T P^T. A latent is decoded once. Its registers
// are an operand of S^T, and are stored for O^T, which is summed over tokens
// while the next step is decoded. Two warpgroups take steps of 64 tokens in
// turn, each on its own, so that the softmax of one overlaps the products of
// the other. For many columns they share steps instead. Softmax is in base 2.
#pragma once

#include "latent/exchange.cuh"
#include "latent/multiply.cuh"
#include "latent/partial.cuh"
#include "latent/queries.cuh"
#include "latent/weigh.cuh"

namespace turbo {

// Weigh the step whose products were issued last, and take the tile of the next
// step, if there is one.
template <typename Plan>
__device__ __forceinline__ void weigh_and_take(
    LatentShared<Plan>& shared, LatentAccumulator<Plan>& acc,
    float (&scores)[Plan::kScores], LaneTile<Plan>& taken,
    TileQueue<Plan>& queue, const LatentSegment& segment, int step,
    const Place<Plan>& own) {
  const int next = step + Plan::kSets;
  const bool goes_on = next < segment.last_step;
  if constexpr (Plan::kShares) {
    give_scores(shared, scores, own);
    if (goes_on) take_tile(shared, taken, queue, segment, next, own);
    __syncthreads();
    queue.issue(own.lane, 0);  // both have loaded
    float sums[4 * Plan::kOwn];
    take_scores(shared, sums, scores, own);
    weigh_step(shared, acc, sums, segment, step, own);
  } else if constexpr (Plan::kEarly) {
    if (goes_on) take_tile(shared, taken, queue, segment, next, own);
    weigh_step(shared, acc, scores, segment, step, own);
    if (goes_on) queue.issue(own.lane, taken.any_bits());
  } else {
    queue.issue(own.lane, 0);  // the loaded codes have been decoded
    weigh_step(shared, acc, scores, segment, step, own);
    if (goes_on) take_tile(shared, taken, queue, segment, next, own);
  }
}

template <typename Plan>
__device__ __forceinline__ void attend_segment(LatentShared<Plan>& shared,
                                               TileQueue<Plan>& queue,
                                               const LatentParams& p,
                                               const LatentSegment& segment,
                                               const Place<Plan>& own) {
  queue.begin(segment, own);
#pragma unroll
  for (int stage = 0; stage < Plan::kStages; ++stage) queue.issue(own.lane, 0);
  load_queries(shared, p, segment);
  LatentAccumulator<Plan> acc;
#pragma unroll
  for (int m = 0; m < Plan::kOutputs; ++m) {
#pragma unroll
    for (int i = 0; i < Plan::kScores; ++i) acc.output[m][i] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 2 * Plan::kOwn; ++i) acc.sum[i] = 0.0f;
  fence_async_proxy();
  __syncthreads();
  int step = segment.first_step + own.set();
  if (step < segment.last_step) {
    LaneTile<Plan> taken;
    Fragments fragments[2];
    float scores[Plan::kScores];
    take_tile(shared, taken, queue, segment, step, own);
    if constexpr (Plan::kShares) __syncthreads();  // both have loaded
    if constexpr (Plan::kEarly) queue.issue(own.lane, taken.any_bits());
    decode_first(fragments, taken);
    multiply_tile<false>(shared, acc, scores, fragments, taken, own);
#pragma unroll 1
    while (true) {
      weigh_and_take(shared, acc, scores, taken, queue, segment, step, own);
      step += Plan::kSets;
      if (step >= segment.last_step) break;
      decode_first(fragments, taken);
      multiply_tile<true>(shared, acc, scores, fragments, taken, own);
    }
    const ValueOperands operands(shared, own);
#pragma unroll
    for (int block = 0; block < Plan::kOutputs; ++block)
      add_block(acc, operands, block);
    wgmma_wait<0>();
    acc.hold_outputs();
  }
  __syncthreads();
  write_partial(shared, acc, p, segment, own);
}

// The kernel of a block that uses products of warpgroups.
template <typename P>
struct LatentKernel {
  using Plan = P;
  using Shared = LatentShared<Plan>;
  static constexpr bool kHasRoles = false;
  static constexpr int kColumns = Plan::kColumns;
  static constexpr int kThreads = kBlockThreads;

  Shared& shared;
  Place<Plan> own;
  TileQueue<Plan> queue;

  __device__ __forceinline__ LatentKernel(uint8_t* bytes, const LatentParams& p,
                                          int block_warp, int lane)
      : shared(*reinterpret_cast<Shared*>(bytes)),
        own{block_warp / 4, block_warp % 4, lane},
        queue{p, shared_address(shared.tiles[4 * own.set() + own.warp]),
              shared_address(shared.copied[4 * own.set() + own.warp])} {
    if (own.part() == 0 && lane == 0) {
#pragma unroll
      for (int i = 0; i < Plan::kStages; ++i)
        init_barrier(queue.barriers + 8 * i, 1);
      fence_barrier_init();
    }
    if constexpr (Plan::kShares)
      __syncthreads();
    else
      __syncwarp();
  }
  __device__ __forceinline__ void attend(const LatentParams& p,
                                         const LatentSegment& s) {
    attend_segment(shared, queue, p, s, own);
  }
};

}  // namespace turbo
