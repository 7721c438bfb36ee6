// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A tile's codes as operands of the tensor core, in shared memory.
//
// The order of coordinates is free. Of queries and keys, chunk 4 * j + i of a
// row has codes 2 * i and 2 * i + 1 of unit j of each lane's, lane by lane; of
// values, the rows are those of extend/values.cuh's fragments, one after the
// other.
#pragma once

#include "common/key_tables.cuh"
#include "extend/values.cuh"
#include "extend_rows/layout.cuh"

namespace turbo {

// Where a lane's rows of 8x8 matrices are in a row of panels: its chunk.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * kRowBytes + (chunk ^ row % 8) * 16;
}

// Decode K of a warp's tile of a step.
//
// keys: the stage's address. factor: of the tile's scores. num_tokens: of the
// tile, those that the sequence has; behind them are any bytes.
template <typename Plan>
__device__ __forceinline__ void decode_keys(uint32_t keys, float& factor,
                                            const uint8_t* tile, int index,
                                            int num_tokens, int lane) {
  constexpr uint32_t kPanelBytes = Plan::kTokens * kRowBytes;
  const int g = lane / 4, t = lane % 4;
  const uint8_t* rows = tile + KEY_SCALES_OFFSET + g * SCALE_BYTES;
  bool is_large = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    is_large |= g + 8 * h < num_tokens &&
                StoredKeyScales::is_large(rows + 8 * h * SCALE_BYTES);
  }
  const bool are_large = __any_sync(~0u, is_large);
  if (lane == 0) factor = are_large ? StoredKeyScales::kFactor : 1.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t words[kLaneUnits];
    load_key_words(words, tile, g + 8 * h, lane);
    const StoredKeyScales scales(rows + 8 * h * SCALE_BYTES, t / 2, are_large);
    // Row lane % 8 of matrix lane / 8.
    const int row = index * TILE_TOKENS + 8 * h + lane % 8;
    const uint32_t even = keys + swizzled(row, lane / 8);
    const uint32_t odd = keys + swizzled(row, 4 + lane / 8);
#pragma unroll
    for (int j = 0; j < kLaneUnits; ++j) {
      uint32_t pairs[4];
      table_coordinates(pairs, words[j], scales[j]);
      store_matrices((j % 2 ? odd : even) + j / 2 * kPanelBytes, pairs[0],
                     pairs[1], pairs[2], pairs[3]);
    }
  }
}

// Decode V of a warp's tile of a step.
template <typename Plan>
__device__ __forceinline__ void decode_values(uint32_t values,
                                              const uint8_t* tile, int index,
                                              int lane) {
  constexpr uint32_t kPanelBytes = HEAD_SIZE * kRowBytes;
  constexpr int kRowWords = kPieceWords / 2;
  // Matrices are of rows r = lane / 8 % 2 of a fragment and tokens h = lane /
  // 16.
  const int chunk = index % 4 * 2 + lane / 16;
  const uint32_t target = values + index / 4 * kPanelBytes +
                          swizzled(8 * (lane / 8 % 2) + lane % 8, chunk);
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
      for (int i = 0; i < 4; ++i) {
        const int fragment = piece * kPieceCodes + 4 * j + i;
        const uint32_t (&f)[4] = fragments[i];
        store_matrices(target + fragment * (16 * kRowBytes), f[0], f[1], f[2],
                       f[3]);
      }
    }
  }
}

// The first of two coordinates of V, of a row of the operand that is even.
__device__ __forceinline__ int value_coordinate(int row) {
  return output_coordinate(row / 16, row / 8 % 2, row % 8 * 4);
}

}  // namespace turbo
