// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decoding of the turbo format in registers. The constants come from
// turbo_constants.h, which constants.py makes of format.py.
#pragma once

#include "common/numbers.cuh"
#include "turbo_constants.h"

namespace turbo {

// The byte table KEY_NEGATIVE or KEY_POSITIVE, by four 4-bit codes.
//
// prmt takes a nibble below 8 as an index; of a nibble from 8 it gives the sign
// of the byte. Negative levels (codes below 8) are looked up by the codes, the
// others by their complements. The sum of both bytes is KEY_LEVEL_UNIT * level:
// the sign byte is -1 in the first table, whose counterpart is one too large,
// and 0 in the second. The tensor core adds their products, so nothing has to
// join the two.
__device__ __forceinline__ uint32_t negative_levels(uint32_t codes) {
  return permute(KEY_NEGATIVE_LOW, KEY_NEGATIVE_HIGH, codes);
}

__device__ __forceinline__ uint32_t positive_levels(uint32_t complements) {
  return permute(KEY_POSITIVE_LOW, KEY_POSITIVE_HIGH, complements);
}

// Positions v = (code - 15 / 2) / 4 of two tokens' codes in bits 2 to 5 of both
// halves. With the bit below set the mantissa is a multiple of 2 * code + 1, so
// the subtraction of its centre is exact.
__device__ __forceinline__ __half2 low_positions(uint32_t codes) {
  const __half2 shifted = as_half2(and_or(codes, 0x003C003Cu, 0x54025402u));
  return __hadd2(shifted, as_half2(0xD420D420u));  // 64 + code / 4 + 1 / 8 - 66
}

// The same of codes in bits 6 to 9.
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
