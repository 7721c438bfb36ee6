// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The kernel of decode attention to latents for many query rows.
//
// Query rows, heads times query tokens, are the rows of the tensor core's
// products: S = q K^T, O = P V. A product then has so many columns that the
// tensor core is busy. Producers decode each latent once, to shared memory,
// where it is an operand of both products.
#pragma once

#include "latent/decode.cuh"
#include "latent/rows_consume.cuh"
#include "latent/rows_produce.cuh"

namespace turbo {

struct RowsKernel {
  using Shared = RowsShared;
  static constexpr bool kHasRoles = true;
  static constexpr int kColumns = kRowsOfBlock;
  static constexpr int kThreads = kConsumerThreads + 32 * kProducerWarps;

  Shared& shared;
  const LatentParams& p;
  int warp;

  __device__ __forceinline__ RowsKernel(uint8_t* bytes, const LatentParams& p,
                                        int block_warp, int)
      : shared(*reinterpret_cast<Shared*>(bytes)), p(p), warp(block_warp) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (uint64_t& barrier : shared.begun)
        init_barrier(shared_address(&barrier), kProducerWarps);
    }
    shared.begin(kProducerWarps, kConsumerWarps);
  }

  // Do the warp's part of the block's ranges.
  __device__ __forceinline__ void attend_ranges(int lane) {
    if (warp < kConsumerWarps) {
      take_registers<kConsumerRegisters>();
      RowsConsumer consumer(shared, warp / 4, warp % 4);
      consumer.attend_all(p);
    } else {
      give_registers<kProducerRegisters>();
      RowsProducer producer(shared, warp - kConsumerWarps, p);
      turbo::attend_ranges(producer, p, lane);
      producer.announcer.end(producer.warp);
    }
  }
};

}  // namespace turbo
