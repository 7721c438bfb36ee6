// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A warp's share of the sum of values of many queries: O^T = V^T P^T, of its
// coordinates, for all queries of a block.
#pragma once

#include "common/tile.cuh"

namespace turbo {

// B fragments of weights of a tile: [pair of tiles of columns][lane], for the
// first and for the second of a pair.
template <int kColumnTiles>
using ColumnWeights = uint4[kColumnTiles / 2][32];

// A fragments of a tile's V^T: kOutputs of them, from first_output, a multiple.
// Fragment i has coordinates output_coordinate(first_output + i, ...).
template <int kOutputs>
__device__ __forceinline__ void value_fragments(
    uint32_t (&fragments)[kOutputs][4], const uint8_t* tile, int first_output,
    int lane) {
  static_assert(kOutputs <= 2, "codes of a half of a word");
  constexpr int kRowWords = kPieceWords / 2;
  const int piece = kPieces == 1 ? 0 : first_output / kPieceCodes;
  const uint32_t second_word = first_output % kPieceCodes < 4 ? 0 : ~0u;
  const int code = first_output % 4;  // of a word
  const int selector = code < 2 ? 0x3210 : 0x2301;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t words[kPieceWords];
    load_value_words(words, tile, h, piece, lane);
    uint32_t scales = value_scales(tile, h, 0, lane);
    if constexpr (kPieces > 1) {
      // The piece as an index would put words in local memory.
      if (piece > 0) scales = value_scales(tile, h, 1, lane);
    }
    const __half2 a = __hmul2(as_half2(scales), as_half2(VALUE_LINEAR));
    const __half2 b = __hmul2(as_half2(scales), as_half2(VALUE_QUADRATIC));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t word = words[r * kRowWords];
      if constexpr (kRowWords == 2)
        word = select(second_word, words[2 * r + 1], word);
      word = __byte_perm(word, word, selector);
      if constexpr (kOutputs == 2) {
        fragments[0][2 * h + r] = value_coordinates(low_positions(word), a, b);
        fragments[1][2 * h + r] = value_coordinates(high_positions(word), a, b);
      } else {
        const __half2 v =
            code % 2 == 0 ? low_positions(word) : high_positions(word);
        fragments[0][2 * h + r] = value_coordinates(v, a, b);
      }
    }
  }
}

// Add a tile's V^T P^T to a warp's outputs.
template <int kOutputs, int kColumnTiles>
__device__ __forceinline__ void add_tile_values(
    float (&output)[kOutputs][kColumnTiles][4], const uint8_t* tile,
    const ColumnWeights<kColumnTiles>& weights, int first_output, int lane) {
  uint32_t values[kOutputs][4];
  value_fragments(values, tile, first_output, lane);
#pragma unroll
  for (int n = 0; n < kColumnTiles; n += 2) {
    const uint4 w = weights[n / 2][lane];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const uint32_t (&v)[4] = values[i];
      mma_f16(output[i][n], v[0], v[1], v[2], v[3], w.x, w.y);
      mma_f16(output[i][n + 1], v[0], v[1], v[2], v[3], w.z, w.w);
    }
  }
}

}  // namespace turbo
