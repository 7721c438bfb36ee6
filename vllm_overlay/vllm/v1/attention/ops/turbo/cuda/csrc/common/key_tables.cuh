// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Keys decoded to fp16 exactly, by tables of bytes.
#pragma once

#include "common/tile.cuh"

namespace turbo {

// Scales of keys as they are stored, for both numbers of a pair. Those of
// tokens where one is above kLargest are taken for 2^-4 of what they are, which
// a score makes up for: a product with KEY_BYTE_OFFSET then is finite.
struct StoredKeyScales {
  static constexpr uint32_t kPair = 0x00010001u << SCALE_SHIFT;
  static constexpr uint32_t kLargest = 218;  // the code of 5120
  static constexpr uint32_t kReduction = 32;
  static constexpr float kFactor = 16.0f;

  uint32_t bases, deltas;

  __device__ __forceinline__ StoredKeyScales() {}
  // are_large: whether some of the tokens' have one above kLargest.
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
      // Scales that are this small beside others are as good as zero.
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

  // Of the lane's unit j.
  __device__ __forceinline__ __half2 operator[](int j) const {
    constexpr uint32_t kMask = (1u << SCALE_DELTA_BITS) - 1;
    const uint32_t delta = deltas >> (SCALE_DELTA_BITS * j) & kMask;
    return as_half2(mad_lo(delta, 0u - SCALE_DELTA_STEP * kPair, bases));
  }
};

// Halves of the tables.
struct KeyTables {
  uint32_t first = KEY_FIRST_LOW, second = KEY_SECOND_LOW;
};

// A unit's eight coordinates: pair i has those of codes 2 * i and 2 * i + 1.
//
// A code is rotated by a bit, so that prmt's sign mode is that of bit 2: a code
// and the one that differs in that alone have levels of one sign, and bytes
// 128 + level with the same upper bit. The first table has those of codes with
// bit 2 clear, the second the others', which the sign bytes of the first
// invert.
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
      // The bytes as last ones of numbers from 8 to 16.
      const __half2 x =
          as_half2(__byte_perm(bytes, 0x48484848u, k == 0 ? 0x4140 : 0x4342));
      pairs[2 * i + k] = as_bits(__hfma2(x, scale, offset));
    }
  }
}

}  // namespace turbo
