// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// References of columns: exponents of scores are relative to them.
#pragma once

#include <cuda_runtime.h>

namespace turbo {

// The references of a pair of columns, raised to the largest scores of four
// warps.
//
// shared: has the largest of each warp in across[set].
// scaling: the factors of the pair's scores, then the references.
template <typename Shared>
__device__ __forceinline__ float2 raised(const Shared& shared, int set,
                                         int pair, const float4& scaling) {
  float2 reference = {scaling.z, scaling.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 x = shared.across[set][w][pair];
    reference.x = fmaxf(reference.x, x.x);
    reference.y = fmaxf(reference.y, x.y);
  }
  return reference;
}

}  // namespace turbo
