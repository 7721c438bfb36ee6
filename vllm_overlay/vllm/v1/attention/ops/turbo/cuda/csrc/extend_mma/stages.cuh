// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A ring of stages in shared memory, which some warps fill and others empty.
#pragma once

#include "common/barriers.cuh"

namespace turbo {

// A place in the ring, and the parity of its use.
template <int kStages>
struct Stage {
  int index = 0;
  int parity = 0;

  // The place among twice as many stages.
  __device__ __forceinline__ int of_both() const {
    return kStages * parity + index;
  }
  __device__ __forceinline__ void advance() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// Arrive at a barrier after a warp's writes, or reads. All lanes call it.
__device__ __forceinline__ void arrive_warp(uint64_t& barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive_barrier(shared_address(&barrier));
}

__device__ __forceinline__ void wait_for(uint64_t& barrier, int parity) {
  wait_barrier(shared_address(&barrier), parity);
}

// Release steps that are decoded for other consumers.
//
// Shared: has the barriers of keys and of values. Stages of the two are filled
//   and emptied separately.
// on_step: is called with each step, which is decoded.
template <typename Shared, int kStages, typename OnStep>
__device__ __forceinline__ void pass_steps(Shared& shared,
                                           Stage<kStages>& stage, int num_steps,
                                           int lane, const OnStep& on_step) {
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    wait_for(shared.full_keys[stage.index], stage.parity);
    on_step(step);
    arrive_warp(shared.empty_keys[stage.index], lane);
    wait_for(shared.full_values[stage.index], stage.parity);
    arrive_warp(shared.empty_values[stage.index], lane);
    stage.advance();
  }
}

}  // namespace turbo
