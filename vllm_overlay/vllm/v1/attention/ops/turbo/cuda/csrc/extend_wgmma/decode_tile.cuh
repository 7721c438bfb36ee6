// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A tile's codes as operands of warpgroups' products, in shared memory.
#pragma once

#include "extend_mma/decode_tile.cuh"
#include "extend_wgmma/layout.cuh"

namespace turbo {

// The offset of a 16-byte chunk of a row in panels, which are swizzled.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * kRowBytes + (chunk ^ row % 8) * 16;
}

// Decode K of a warp's tile of a step.
//
// keys: the stage's address.
// index: the tile's place in the step.
//
// See decode_tile_keys for the others.
template <typename Plan>
__device__ __forceinline__ void decode_keys(uint32_t keys, float& factor,
                                            const uint8_t* tile, int index,
                                            int num_tokens, int lane) {
  constexpr uint32_t kPanelBytes = Plan::kTokens * kRowBytes;
  const auto store = [&](int h, int j, const uint32_t (&pairs)[4]) {
    // A lane has the address of row lane % 8 of matrix lane / 8.
    const int row = index * TILE_TOKENS + 8 * h + lane % 8;
    store_matrices(
        keys + swizzled(row, j % 2 * 4 + lane / 8) + j / 2 * kPanelBytes,
        pairs[0], pairs[1], pairs[2], pairs[3]);
  };
  decode_tile_keys(factor, tile, num_tokens, lane, store);
}

// Decode V of a warp's tile of a step.
template <typename Plan>
__device__ __forceinline__ void decode_values(uint32_t values,
                                              const uint8_t* tile, int index,
                                              int lane) {
  constexpr uint32_t kPanelBytes = HEAD_SIZE * kRowBytes;
  // A matrix has rows of half r = lane / 8 % 2 of a fragment, and tokens of
  // half h = lane / 16.
  const int chunk = index % 4 * 2 + lane / 16;
  const uint32_t target = values + index / 4 * kPanelBytes +
                          swizzled(8 * (lane / 8 % 2) + lane % 8, chunk);
  decode_tile_values(tile, lane, [&](int fragment, const uint32_t (&f)[4]) {
    store_matrices(target + fragment * (16 * kRowBytes), f[0], f[1], f[2],
                   f[3]);
  });
}

}  // namespace turbo
