// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Levels of values from 4-bit codes, in registers.
#pragma once

#include "common/numbers.cuh"

namespace turbo {

// Positions v = (code - 15 / 2) / 4 of two tokens' codes, in bits 2 to 5 of
// both halves. The bit below a code is set, so the mantissa is a multiple of
// 2 * code + 1. The subtraction of its centre is then exact.
__device__ __forceinline__ __half2 low_positions(uint32_t codes) {
  const __half2 shifted = as_half2(and_or(codes, 0x003C003Cu, 0x54025402u));
  return __hadd2(shifted, as_half2(0xD420D420u));  // 64 + code / 4 + 1 / 8 - 66
}

// The positions of codes in bits 6 to 9.
__device__ __forceinline__ __half2 high_positions(uint32_t codes) {
  const __half2 shifted = as_half2(and_or(codes, 0x03C003C0u, 0x44204420u));
  return __hadd2(shifted, as_half2(0xC600C600u));  // 4 + code / 4 + 1 / 8 - 6
}

// Value coordinates v * (a + b * abs(v)), with the scale in (a, b).
__device__ __forceinline__ uint32_t value_coordinates(__half2 v, __half2 a,
                                                      __half2 b) {
  return as_bits(__hmul2(v, __hfma2(__habs2(v), b, a)));
}

}  // namespace turbo
