// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Loads of vectors in the model's dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/strides.cuh"

namespace turbo {

// Coordinates that are loaded at once.
constexpr int kVector = 4;

template <typename T>
__device__ __forceinline__ float4 load_vector(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float4*>(p);
  } else {
    const uint2 bits = *reinterpret_cast<const uint2*>(p);
    if constexpr (std::is_same_v<T, __half>) {
      const float2 low =
          __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
      const float2 high =
          __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
      return {low.x, low.y, high.x, high.y};
    } else {
      return {
          __uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u),
          __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xFFFF0000u)};
    }
  }
}

}  // namespace turbo
