// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Exact decoding of keys to fp16, by tables of bytes.
#pragma once

#include "common/tile.cuh"

namespace turbo {

// The stored scales of keys, each twice for a pair of numbers. If a token has a
// scale above kLargest, its scales are read as 2^-4 of their values, and its
// score is multiplied by kFactor. A product with KEY_BYTE_OFFSET is then
// finite.
struct StoredKeyScales {
  static constexpr uint32_t kPair = 0x00010001u << SCALE_SHIFT;
  static constexpr uint32_t kLargest = 218;  // the code of 5120
  static constexpr uint32_t kReduction = 32;
  static constexpr float kFactor = 16.0f;

  uint32_t bases, deltas;

  __device__ __forceinline__ StoredKeyScales() {}
  // are_large: whether any of the tokens has a scale above kLargest.
  __device__ __forceinline__ StoredKeyScales(const uint8_t* row, int group_half,
                                             bool are_large) {
    uint32_t word;
    if constexpr (HEAD_SIZE <= 128) {
      word = word_of(row);
      deltas = word >> (8 + group_half * (kLaneUnits * SCALE_DELTA_BITS));
    } else {
      word = reinterpret_cast<const uint32_t*>(row)[group_half];
      deltas = word >> 8;
    }
    uint32_t base = word & 0xFF;
    if (are_large) {
      // Scales this small, beside large ones, count as zero.
      constexpr uint32_t kLeast =
          SCALE_DELTA_STEP * ((1u << SCALE_DELTA_BITS) - 1);
      base = max(base, kReduction + kLeast) - kReduction;
    }
    bases = base * kPair;
  }

  static __device__ __forceinline__ uint32_t word_of(const uint8_t* row) {
    return HEAD_SIZE < 128 ? *reinterpret_cast<const uint16_t*>(row)
                           : *reinterpret_cast<const uint32_t*>(row);
  }
  // Whether a token has a scale above kLargest.
  static __device__ __forceinline__ bool is_large(const uint8_t* row) {
    if constexpr (HEAD_SIZE <= 128) {
      return (word_of(row) & 0xFF) > kLargest;
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(row);
      return max(words.x & 0xFF, words.y & 0xFF) > kLargest;
    }
  }

  // The scale of the lane's unit j.
  __device__ __forceinline__ __half2 operator[](int j) const {
    constexpr uint32_t kMask = (1u << SCALE_DELTA_BITS) - 1;
    const uint32_t delta = deltas >> (SCALE_DELTA_BITS * j) & kMask;
    return as_half2(mad_lo(delta, 0u - SCALE_DELTA_STEP * kPair, bases));
  }
};

// The low halves of both tables. The high halves are constants.
struct KeyTables {
  uint32_t first = KEY_FIRST_LOW, second = KEY_SECOND_LOW;
};

// Decode the eight coordinates of a unit. Pair i has the coordinates of codes
// 2 * i and 2 * i + 1.
//
// Codes are rotated left by a bit, so that bit 2 selects prmt's sign mode. A
// code and the code that differs from it in bit 2 have levels of one sign.
// Their bytes, 128 + level, therefore have the same upper bit. The first table
// has the bytes of codes with bit 2 clear. The second has the bytes of other
// codes, which are xored with sign bytes of the first.
__device__ __forceinline__ void table_coordinates(uint32_t (&pairs)[4],
                                                  uint32_t word, __half2 scale,
                                                  KeyTables tables = {}) {
  const uint32_t codes = select(0xEEEEEEEEu, word << 1, word >> 3);
  const uint32_t others = ~codes;
  const __half2 offset = __hmul2(scale, as_half2(KEY_BYTE_OFFSET));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bytes =
        permute(tables.first, KEY_FIRST_HIGH, codes >> (16 * i)) ^
        permute(tables.second, KEY_SECOND_HIGH, others >> (16 * i));
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      // A byte is the lower byte of an fp16 number from 8 to 16.
      const __half2 x =
          as_half2(__byte_perm(bytes, 0x48484848u, k == 0 ? 0x4140 : 0x4342));
      pairs[2 * i + k] = as_bits(__hfma2(x, scale, offset));
    }
  }
}

}  // namespace turbo
