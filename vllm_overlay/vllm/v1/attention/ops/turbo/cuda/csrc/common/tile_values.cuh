// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// V of a tile as operands of the tensor core.
#pragma once

#include "common/tile.cuh"
#include "common/value_levels.cuh"

namespace turbo {

// Decode V of a warp's share of a tile.
//
// store: is called with a fragment's index and a lane's four pairs. Pair
//   2 * h + r is coordinate lane / 4 of two tokens, from half h of the tokens
//   and half r of the coordinates.
template <typename Store>
__device__ __forceinline__ void decode_tile_values(const uint8_t* tile,
                                                   int lane,
                                                   const Store& store) {
  constexpr int kRowWords = kPieceWords / 2;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    uint32_t words[2][kPieceWords];
    __half2 a[2], b[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_value_words(words[h], tile, h, piece, lane);
      const uint32_t scales = value_scales(tile, h, piece, lane);
      a[h] = __hmul2(as_half2(scales), as_half2(VALUE_LINEAR));
      b[h] = __hmul2(as_half2(scales), as_half2(VALUE_QUADRATIC));
    }
#pragma unroll
    for (int j = 0; j < kRowWords; ++j) {
      uint32_t fragments[4][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t word = words[h][r * kRowWords + j];
          const uint32_t swapped = __byte_perm(word, word, 0x2301);
          const int m = 2 * h + r;
          fragments[0][m] = value_coordinates(low_positions(word), a[h], b[h]);
          fragments[1][m] = value_coordinates(high_positions(word), a[h], b[h]);
          fragments[2][m] =
              value_coordinates(low_positions(swapped), a[h], b[h]);
          fragments[3][m] =
              value_coordinates(high_positions(swapped), a[h], b[h]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store(piece * kPieceCodes + 4 * j + i, fragments[i]);
    }
  }
}

}  // namespace turbo
