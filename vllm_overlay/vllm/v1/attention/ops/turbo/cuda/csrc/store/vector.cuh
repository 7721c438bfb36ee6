// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The tables of the encoder of K and V.
#pragma once

#include "store/params.cuh"
#include "store/quantize.cuh"

namespace turbo {

struct Tables {
  SideTables<true> key;
  SideTables<false> value;
};

__device__ __forceinline__ void load_tables(const KernelParams& params,
                                            Tables& tables) {
  static_assert(sizeof(Tables) % sizeof(uint4) == 0);
  // The first warp loads the tables, because other warps may have returned.
  constexpr int kNumRows = sizeof(Tables) / sizeof(uint4);
#pragma unroll
  for (int i = threadIdx.x; i < kNumRows && threadIdx.x < 32; i += 32) {
    reinterpret_cast<uint4*>(&tables)[i] = __ldg(params.tables + i);
  }
  __syncthreads();
}

}  // namespace turbo
