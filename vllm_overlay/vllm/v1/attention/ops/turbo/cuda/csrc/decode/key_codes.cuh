// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Codes of K, and the bytes of their levels.
#pragma once

#include "common/tile.cuh"

namespace turbo {

// How a lane has its codes of K, and tables of bytes for them.
//
// prmt takes a nibble below 8 as an index; of a nibble from 8 it gives the sign
// of the byte. One table is for codes below 8, the other, looked up by their
// complements, for the rest: the sum of both bytes is KEY_LEVEL_UNIT times the
// level, for each makes up for the other's sign byte. The tensor core adds
// their products, so nothing has to join the two.
//
// Of four bits a code is a level's index. So it is of three bits where p = 1:
// the branch, and below it the two bits that the path makes. Where p = 0 the
// branch is left in the lower bits: above it is what changes the level by two,
// and then what does by one.
struct KeyCodes {
  uint32_t first_low = KEY_NEGATIVE_LOW, first_high = KEY_NEGATIVE_HIGH;
  uint32_t second_low = KEY_POSITIVE_LOW, second_high = KEY_POSITIVE_HIGH;
  bool is_odd;  // p

  __device__ __forceinline__ explicit KeyCodes(int lane)
      : is_odd(lane % 2 != 0) {
    if (KEY_BITS == 4) {
      // Of each table half is in the instructions. The compiler, if it knew the
      // other, would load it anew for each look-up.
      first_low = __shfl_sync(~0u, first_low, 0);
      second_low = __shfl_sync(~0u, second_low, 0);
    } else if (!is_odd) {
      first_low = KEY_TURNED_FIRST_LOW, first_high = KEY_TURNED_FIRST_HIGH;
      second_low = KEY_TURNED_SECOND_LOW, second_high = KEY_TURNED_SECOND_HIGH;
    }
  }

  // Load those of token n of a tile.
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
      // Bits 4k + 2a + p of code k and group a. With p = 1 the bit before is
      // below it; with p = 0 it comes to lie above it. Products instead of
      // shifts, as integers and logic have half of the instructions.
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

  // Bytes of four codes by the first table, and of complements by the second.
  __device__ __forceinline__ uint32_t first(uint32_t codes) const {
    return permute(first_low, first_high, codes);
  }
  __device__ __forceinline__ uint32_t second(uint32_t complements) const {
    return permute(second_low, second_high, complements);
  }
};

}  // namespace turbo
