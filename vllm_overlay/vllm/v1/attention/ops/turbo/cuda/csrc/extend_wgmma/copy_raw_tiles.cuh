// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Steps of raw tokens, whose K and V are as computed. Another kernel has turned
// them to operands of the tensor core, without the division into panels: see
// raw_tiles.cuh.
#pragma once

#include "extend_wgmma/decode_tile.cuh"
#include "extend_wgmma/output_params.cuh"

namespace turbo {

// Copy K of a tile, or zeros if there is no tile.
//
// keys: the keys of the stage.
// index: the tile's place in the step.
template <typename Plan>
__device__ __forceinline__ void copy_raw_keys(uint8_t* keys, const uint4* tile,
                                              int index, int lane) {
  constexpr uint32_t kPanelBytes = Plan::kTokens * kRowBytes;
  constexpr int kRowChunks = HEAD_SIZE / 8;
#pragma unroll
  for (int i = lane; i < TILE_TOKENS * kRowChunks; i += 32) {
    const int row = index * TILE_TOKENS + i / kRowChunks;
    const int chunk = i % kRowChunks;
    const uint4 x = tile != nullptr ? __ldcg(tile + i) : uint4{};
    *reinterpret_cast<uint4*>(keys + chunk / 8 * kPanelBytes +
                              swizzled(row, chunk % 8)) = x;
  }
}

// Copy V likewise.
__device__ __forceinline__ void copy_raw_values(uint8_t* values,
                                                const uint4* tile, int index,
                                                int lane) {
  constexpr uint32_t kPanelBytes = HEAD_SIZE * kRowBytes;
  constexpr int kRowChunks = TILE_TOKENS / 8;
  constexpr int kKeyChunks = TILE_TOKENS * HEAD_SIZE / 8;
#pragma unroll
  for (int i = lane; i < HEAD_SIZE * kRowChunks; i += 32) {
    const int chunk = index % 4 * kRowChunks + i % kRowChunks;
    const uint4 x = tile != nullptr ? __ldcg(tile + kKeyChunks + i) : uint4{};
    *reinterpret_cast<uint4*>(values + index / 4 * kPanelBytes +
                              swizzled(i / kRowChunks, chunk)) = x;
  }
}

// Copy a warp's tiles of a step of raw tokens.
//
// first: the first of the warp's tiles.
// index: the place of that tile in the step.
template <typename Plan>
__device__ __forceinline__ void copy_raw_step(RowsShared<Plan>& shared,
                                              Stage<Plan::kStages>& stage,
                                              const OutputParams& p,
                                              const PassSegment& segment,
                                              int first, int index, int lane) {
  constexpr int kWarpTiles = Plan::kWarpTiles;
  // Queries include the gain of a codebook, which raw keys do not need.
  constexpr float kFactor = (1 << PRODUCT_FRACTION_BITS) / KEY_GAIN;
  const auto source = [&](int i) -> const uint4* {
    if (first + i >= segment.last_tile) return nullptr;
    return reinterpret_cast<const uint4*>(
        p.raw_tile(segment.seq, segment.kv_head, first + i - segment.raw_tile));
  };
  wait_for(shared.empty_keys[stage.index], stage.parity ^ 1);
#pragma unroll 1
  for (int i = 0; i < kWarpTiles; ++i) {
    copy_raw_keys<Plan>(shared.keys[stage.index][0][0], source(i), index + i,
                        lane);
    if (lane == 0) shared.factors[stage.of_both()][index + i] = kFactor;
  }
  fence_async_proxy();
  arrive_warp(shared.full_keys[stage.index], lane);
  wait_for(shared.empty_values[stage.index], stage.parity ^ 1);
#pragma unroll 1
  for (int i = 0; i < kWarpTiles; ++i) {
    copy_raw_values(shared.values[stage.index][0][0], source(i), index + i,
                    lane);
  }
  fence_async_proxy();
  arrive_warp(shared.full_values[stage.index], lane);
}

}  // namespace turbo
