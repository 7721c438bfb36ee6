// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention of sequences' last few dozen tokens to pages of the turbo format:
// the segments of each block.
#pragma once

#include "extend_mma/consume.cuh"
#include "extend_mma/produce.cuh"

namespace turbo {

template <typename Plan>
__device__ __forceinline__ void init_stages(ExtendShared<Plan>& shared) {
#pragma unroll
  for (int i = 0; i < Plan::kStages; ++i) {
    init_barrier(shared_address(&shared.full_keys[i]), Plan::kTiles);
    init_barrier(shared_address(&shared.full_values[i]), Plan::kTiles);
    init_barrier(shared_address(&shared.empty_keys[i]), Plan::kConsumers);
    init_barrier(shared_address(&shared.empty_values[i]), Plan::kConsumers);
  }
  shared.offsets.init(Plan::kProducers, Plan::kConsumers);
}

// Call `attend` with all segments of a block.
template <typename Plan, typename F>
__device__ __forceinline__ void for_each_segment(const AttentionParams& p,
                                                 const Ranges& ranges,
                                                 const F& attend) {
#pragma unroll 1
  for (int index = blockIdx.x; index < ranges.count; index += int(gridDim.x))
    Plan::Cut::for_each_segment(p, ranges, index, attend);
}

template <typename TilePart, typename Plan>
__device__ __forceinline__ void produce(ExtendShared<Plan>& shared,
                                        const AttentionParams& p,
                                        const Ranges& ranges, int index,
                                        int lane) {
  Stage<Plan::kStages> stage;
  OffsetSteps offsets = {};
  for_each_segment<Plan>(p, ranges, [&](const PassSegment& segment) {
    produce_segment<TilePart>(shared, stage, offsets, p, segment, index, lane);
  });
}

template <typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kBlocks)
    extend_mma_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<ExtendShared<Plan>*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) init_stages(shared);
  // The previous kernel stores the queries. Lengths are known before it has
  // ended, unless it writes them. It then also writes data that the next kernel
  // reads without waiting.
  if (p.lens_are_new) wait_for_previous_kernel();
  start_next_kernel();
  if (warp == 0) {
    const Ranges cut = Plan::Cut::ranges(p, lane);
    if (lane == 0) shared.ranges = cut;
  }
  __syncthreads();
  const Ranges ranges = shared.ranges;
  wait_for_previous_kernel();
  if (warp < Plan::kConsumers) {
    Stage<Plan::kStages> stage;
    OffsetSteps offsets = {};
    for_each_segment<Plan>(p, ranges, [&](const PassSegment& segment) {
      consume_segment(shared, stage, offsets, p, segment, warp, lane);
    });
    skip_empty<Plan::kConsumers>(p, warp, lane);
  } else {
    const int producer = warp - Plan::kConsumers;
    if constexpr (!Plan::kSplits) {
      produce<WholeTile>(shared, p, ranges, producer, lane);
    } else if (producer < Plan::kTiles) {
      produce<KeyPlanes>(shared, p, ranges, producer, lane);
    } else {
      produce<ValuePlanes>(shared, p, ranges, producer - Plan::kTiles, lane);
    }
  }
}

}  // namespace turbo
