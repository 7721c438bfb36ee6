// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A vector in the lanes of a warp, and its inverse rotation.
//
// The rotation is H (s * x) / sqrt(D), with a Sylvester matrix H and signs s.
// Its inverse is a fast Walsh-Hadamard transform of coordinates in registers
// and lanes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/numbers.cuh"
#include "common/vectors.cuh"
#include "turbo_constants.h"

namespace turbo {

// A lane has kVector coordinates of each chunk of 128. With 64 coordinates a
// warp has two vectors side by side.
constexpr int kChunks = HEAD_SIZE < 128 ? 1 : HEAD_SIZE / 128;
constexpr int kLanes = HEAD_SIZE < 128 ? HEAD_SIZE / kVector : 32;
constexpr int kSideBySide = 32 / kLanes;

using Coordinates = float[kChunks][kVector];

template <typename T>
__device__ __forceinline__ void store_vector(T* p, const float (&x)[kVector]) {
  if constexpr (sizeof(T) == 4) {
    __stcg(reinterpret_cast<float4*>(p), make_float4(x[0], x[1], x[2], x[3]));
  } else {
    using Pair =
        std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair pairs[2];
    if constexpr (std::is_same_v<T, __half>) {
      pairs[0] = __floats2half2_rn(x[0], x[1]);
      pairs[1] = __floats2half2_rn(x[2], x[3]);
    } else {
      pairs[0] = __floats2bfloat162_rn(x[0], x[1]);
      pairs[1] = __floats2bfloat162_rn(x[2], x[3]);
    }
    const auto* words = reinterpret_cast<const uint32_t*>(pairs);
    __stcg(reinterpret_cast<uint2*>(p), make_uint2(words[0], words[1]));
  }
}

// The sum over kWidth neighbouring lanes; each lane gets it.
template <int kWidth>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = kWidth / 2; mask > 0; mask /= 2) {
    x += __shfl_xor_sync(~0u, x, mask);
  }
  return x;
}

// The largest number of a warp. NaN is above infinity.
__device__ __forceinline__ float warp_max(float x) {
  const int bits = ordered_bits(__float_as_int(x));
  return __int_as_float(ordered_bits(__reduce_max_sync(~0u, bits)));
}

// H x, unnormalised.
__device__ __forceinline__ void hadamard(Coordinates& x, int lane) {
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
#pragma unroll
    for (int width = 1; width < kVector; width *= 2) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i & width) continue;
        const float difference = x[j][i] - x[j][i | width];
        x[j][i] += x[j][i | width];
        x[j][i | width] = difference;
      }
    }
  }
#pragma unroll
  for (int width = 1; width < kLanes; width *= 2) {
    const float sign = lane & width ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        x[j][i] = fmaf(x[j][i], sign, __shfl_xor_sync(~0u, x[j][i], width));
      }
    }
  }
#pragma unroll
  for (int width = 1; width < kChunks; width *= 2) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (j & width) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float difference = x[j][i] - x[j | width][i];
        x[j][i] += x[j | width][i];
        x[j | width][i] = difference;
      }
    }
  }
}

__constant__ const uint32_t kRotationSigns[] = {ROTATION_SIGNS};

// The signs of a lane's coordinates, as bits to flip.
struct Signs {
  uint32_t bits[kChunks];

  __device__ __forceinline__ explicit Signs(int lane) {
    constexpr int kWordLanes = 32 / kVector, kChunkWords = 128 / 32;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int word = kChunkWords * j + lane % kLanes / kWordLanes;
      bits[j] = kRotationSigns[word] >> (lane % kWordLanes * kVector);
    }
  }
  __device__ __forceinline__ float apply(float x, int j, int i) const {
    const uint32_t sign = bits[j] << (31 - i) & 0x80000000u;
    return __uint_as_float(__float_as_uint(x) ^ sign);
  }
};

}  // namespace turbo
