// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention of sequences' last tokens, with many queries at once, to pages of
// the turbo format. The GPU needs products of warpgroups (sm_90a).
#pragma once

#include <type_traits>

#include "extend_wgmma/consume.cuh"
#include "extend_wgmma/produce.cuh"

namespace turbo {

template <typename Plan>
__device__ __forceinline__ void init_rows(RowsShared<Plan>& shared) {
#pragma unroll
  for (int i = 0; i < Plan::kStages; ++i) {
    init_barrier(shared_address(&shared.full_keys[i]), 4);
    init_barrier(shared_address(&shared.full_values[i]), 4);
    init_barrier(shared_address(&shared.empty_keys[i]), Plan::kConsumerWarps);
    init_barrier(shared_address(&shared.empty_values[i]), Plan::kConsumerWarps);
  }
  if constexpr (Plan::kEndsInOutputs)
    init_ring(shared.ring, Plan::kConsumerWarps);
  shared.offsets.init(4 * Plan::kProducers, Plan::kConsumerWarps);
  fence_barrier_init();
}

// Params: AttentionParams for partial results that another kernel merges, or
//   OutputParams.
template <typename Plan, typename Params>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kBlocks)
    extend_wgmma_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<RowsShared<Plan>*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  using Cut = typename Plan::Cut;
  static_assert(kWithOutputs<Params> == Plan::kEndsInOutputs);
  if (threadIdx.x == 0) init_rows(shared);
  // extend_mma.cuh says why the wait and the start are in this order.
  if (p.lens_are_new) wait_for_previous_kernel();
  start_next_kernel();
  if (warp == 0) {
    const Ranges cut = Cut::ranges(p, lane);
    if (lane == 0) shared.ranges = cut;
  }
  __syncthreads();
  const Ranges ranges = shared.ranges;
  wait_for_previous_kernel();
  const auto for_each_segment = [&](const auto& attend) {
#pragma unroll 1
    for (int i = blockIdx.x; i < ranges.count; i += int(gridDim.x))
      Cut::for_each_segment(p, ranges, i, attend);
  };
  Stage<Plan::kStages> stage;
  OffsetSteps offsets = {};
  if (warp < Plan::kConsumerWarps) {
    take_registers<Plan::kConsumerRegisters>();
    const int group = warp / 4;
    if constexpr (kWithOutputs<Params>) {
      consume_ring(shared, stage, offsets, p, group, lane);
      write_empty<32 * Plan::kConsumerWarps>(p, threadIdx.x);
    } else {
      for_each_segment([&](const PassSegment& segment) {
        consume_segment(shared, stage, offsets, p, segment, group, lane, [] {});
      });
      skip_empty<Plan::kConsumerWarps>(p, warp, lane);
    }
  } else {
    give_registers<Plan::kProducerRegisters>();
    const int producer = warp - Plan::kConsumerWarps;
    [[maybe_unused]] SegmentPlace place;
    for_each_segment([&](const PassSegment& segment) {
      if constexpr (kWithOutputs<Params>) {
        if (producer == 0) announce(shared.ring, place, p, segment, lane);
      }
      produce_segment(shared, stage, offsets, p, segment, producer, lane);
    });
    if constexpr (kWithOutputs<Params>) {
      if (producer == 0) announce_end(shared.ring, place, lane);
    }
  }
}

}  // namespace turbo
