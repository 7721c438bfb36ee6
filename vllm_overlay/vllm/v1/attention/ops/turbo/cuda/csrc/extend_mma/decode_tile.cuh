// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decodes a tile to operands of the tensor core. Queries are the rows of its
// results: S = Q K^T and O = P V.
//
// The order of coordinates is free. In queries and keys, chunk 4 * j + i of
// eight has codes 2 * i and 2 * i + 1 of unit j of each lane, lane by lane. In
// values, each fragment has two times eight coordinates: see value_coordinate.
#pragma once

#include "common/key_tables.cuh"
#include "common/tile_values.cuh"

namespace turbo {

// Decode K of a warp's tile.
//
// factor: the factor of the tile's scores, written.
// num_tokens: tokens of the tile that the sequence has. The bytes of others are
//   arbitrary.
// store: is called with half h of the tokens, unit j, and a lane's pair of each
//   chunk of the unit, for token lane / 4.
template <typename Store>
__device__ __forceinline__ void decode_tile_keys(float& factor,
                                                 const uint8_t* tile,
                                                 int num_tokens, int lane,
                                                 const Store& store) {
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
#pragma unroll
    for (int j = 0; j < kLaneUnits; ++j) {
      uint32_t pairs[4];
      table_coordinates(pairs, words[j], scales[j]);
      store(h, j, pairs);
    }
  }
}

// The coordinate of V in an even row of the operand; the next row has the next
// coordinate. Rows are those of the fragments, one after the other.
__device__ __forceinline__ int value_coordinate(int row) {
  return output_coordinate(row / 16, row / 8 % 2, row % 8 * 4);
}

}  // namespace turbo
