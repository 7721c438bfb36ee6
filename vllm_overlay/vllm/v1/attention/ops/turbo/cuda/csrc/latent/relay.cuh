// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention to latents by warpgroups that decode and one that sums.
#pragma once

#include "latent/decode.cuh"
#include "latent/relay_consume.cuh"
#include "latent/relay_produce.cuh"

namespace turbo {

template <typename Kernel>
__device__ __forceinline__ void attend_ranges(Kernel& kernel,
                                              const LatentParams& p, int lane) {
  constexpr int kColumns = Kernel::kColumns;
  const int num_passes = (p.most_rows() + kColumns - 1) / kColumns;
  const LatentPartition cut(p, num_passes, gridDim.x, lane);
#pragma unroll 1
  for (int index = blockIdx.x; index < cut.num_ranges; index += gridDim.x)
    attend_range(kernel, p, cut, num_passes, index);
}

template <typename P>
struct RelayKernel {
  using Plan = P;
  using Shared = RelayShared<Plan>;
  static constexpr int kColumns = Plan::kColumns;
  static constexpr int kThreads = Plan::kThreads;
};

template <typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    relay_decode_kernel(const __grid_constant__ LatentParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<RelayShared<Plan>*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < Plan::kValues; ++i) {
      init_barrier(shared_address(&shared.referred[i]), 4);
      init_barrier(shared_address(&shared.full[i]), 4);
    }
#pragma unroll
    for (int i = 0; i < Plan::kSummed; ++i)
      init_barrier(shared_address(&shared.summed[i]), 4);
    fence_barrier_init();
  }
  __syncthreads();
  start_next_kernel();
  wait_for_previous_kernel();
  if (warp < Plan::kProducerWarps) {
    if constexpr (Plan::kProducerRegisters > Plan::kConsumerRegisters)
      take_registers<Plan::kProducerRegisters>();
    else if constexpr (Plan::kProducerRegisters < Plan::kConsumerRegisters)
      give_registers<Plan::kProducerRegisters>();
    RelayProducer<Plan> producer(shared, warp, lane);
    attend_ranges(producer, p, lane);
  } else {
    if constexpr (Plan::kProducerRegisters > Plan::kConsumerRegisters)
      give_registers<Plan::kConsumerRegisters>();
    else if constexpr (Plan::kProducerRegisters < Plan::kConsumerRegisters)
      take_registers<Plan::kConsumerRegisters>();
    RelayConsumer<Plan> consumer(shared, warp - Plan::kProducerWarps, lane);
    attend_ranges(consumer, p, lane);
  }
  skip_empty(p, Plan::kThreads);
}

}  // namespace turbo
