// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Codes of K, and the bytes of their levels.
#pragma once

#include "common/tile.cuh"

namespace turbo {

// The form of codes of K in a lane, and tables of bytes for them.
//
// prmt takes a nibble below 8 as an index. For a nibble of 8 or more it gives
// the sign of the byte. One table is for codes below 8. The other is for the
// rest, and is indexed by their complements. The sum of both bytes is
// KEY_LEVEL_UNIT times the level, because each table makes up for the other's
// sign bytes. The tensor core adds the products of both bytes, so no
// instruction joins them.
//
// A code of four bits is the index of a level. So is a code of three bits in
// units p = 1: the branch, and below it two bits from the path. In units p = 0
// the branch stays in the lower bits. The bit above it changes the level by
// two, and the highest bit by one.
struct KeyCodes {
  uint32_t first_low = KEY_NEGATIVE_LOW, first_high = KEY_NEGATIVE_HIGH;
  uint32_t second_low = KEY_POSITIVE_LOW, second_high = KEY_POSITIVE_HIGH;
  bool is_odd;  // p of the lane's units

  __device__ __forceinline__ explicit KeyCodes(int lane)
      : is_odd(lane % 2 != 0) {
    if (KEY_BITS == 4) {
      // Half of each table is in the instructions. If the compiler knew the
      // other half, it would load that again for each look-up.
      first_low = __shfl_sync(~0u, first_low, 0);
      second_low = __shfl_sync(~0u, second_low, 0);
    } else if (!is_odd) {
      first_low = KEY_TURNED_FIRST_LOW, first_high = KEY_TURNED_FIRST_HIGH;
      second_low = KEY_TURNED_SECOND_LOW, second_high = KEY_TURNED_SECOND_HIGH;
    }
  }

  // Load the codes of token n of a tile.
  __device__ __forceinline__ void load(uint32_t (&words)[kLaneUnits],
                                       const uint8_t* tile, int n,
                                       int lane) const {
    if constexpr (KEY_BITS == 4) {
      load_key_words(words, tile, n, lane);
      return;
    }
    const int half = key_half(lane);
    uint32_t branches[kLaneUnits], paths[kLaneUnits / 2];
    load_words(branches, tile + n * KEY_ROW_BYTES + half * (4 * kLaneUnits));
    load_words(paths, tile + PATHS_OFFSET + n * (HEAD_SIZE / 8) +
                          half * (2 * kLaneUnits));
#pragma unroll
    for (int i = 0; i < kLaneUnits; ++i) {
      // Bit 4k + 2a + p is the path bit of code k of group a. With p = 1 the
      // bit of the code before is below it. With p = 0 that bit comes to lie
      // above it. Products replace shifts, because integer and logic
      // instructions are already half of all.
      const uint32_t path = paths[i / 2];
      const uint32_t here = path * (is_odd ? 1 : 16);
      const uint32_t there = path * (is_odd ? 16 : 1);
      const uint32_t bits =
          here ^ (there & (is_odd ? 0xAAAAAAAAu : 0x55555555u));
      const uint32_t placed =
          i % 2 == 0 ? bits * (is_odd ? 1 : 4) : bits >> (is_odd ? 2 : 0);
      words[i] =
          select(is_odd ? 0x33333333u : 0xCCCCCCCCu, placed, branches[i]);
    }
  }

  // Bytes of four codes from the first table, and of complements from the
  // second.
  __device__ __forceinline__ uint32_t first(uint32_t codes) const {
    return permute(first_low, first_high, codes);
  }
  __device__ __forceinline__ uint32_t second(uint32_t complements) const {
    return permute(second_low, second_high, complements);
  }
};

}  // namespace turbo
