// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Producers: warps that copy tiles from pages, and decode them.
#pragma once

#include "extend_mma/copies.cuh"
#include "extend_mma/decode_tile.cuh"
#include "extend_mma/layout.cuh"

namespace turbo {

// Decode a warp's tile of a step, which has been copied.
//
// index: the tile's place in the step.
// tile: the tile's index in the sequence.
template <typename Plan>
__device__ __forceinline__ void produce_keys(ExtendShared<Plan>& shared,
                                             const Stage<Plan::kStages>& stage,
                                             const Segment& segment,
                                             const uint8_t* bytes, int index,
                                             int tile, int lane) {
  wait_for(shared.empty_keys[stage.index], stage.parity ^ 1);
  auto* keys = &shared.keys[stage.index][2 * index];
  decode_tile_keys(shared.factors[stage.of_both()][index], bytes,
                   segment.num_tokens - tile * TILE_TOKENS, lane,
                   [&](int h, int j, const uint32_t (&pairs)[4]) {
                     keys[h][j][lane] = {pairs[0], pairs[1], pairs[2],
                                         pairs[3]};
                   });
  arrive_warp(shared.full_keys[stage.index], lane);
}
template <typename Plan>
__device__ __forceinline__ void produce_values(
    ExtendShared<Plan>& shared, const Stage<Plan::kStages>& stage,
    const Segment& segment, uint8_t* bytes, int index, int tile, int lane) {
  clear_unread(bytes, segment, tile, lane);
  wait_for(shared.empty_values[stage.index], stage.parity ^ 1);
  auto& values = shared.values[stage.index][index];
  decode_tile_values(bytes, lane, [&](int fragment, const uint32_t (&f)[4]) {
    values[fragment][lane] = {f[0], f[1], f[2], f[3]};
  });
  arrive_warp(shared.full_values[stage.index], lane);
}

// Produce a tile of each step of a segment, or a part of that tile.
//
// index: the tile's place in steps.
template <typename TilePart, typename Plan>
__device__ __forceinline__ void produce_segment(ExtendShared<Plan>& shared,
                                                Stage<Plan::kStages>& stage,
                                                OffsetSteps& offsets,
                                                const AttentionParams& p,
                                                const PassSegment& segment,
                                                int index, int lane) {
  constexpr int kCopies = Plan::kCopies;
  const int num_steps = num_steps_of<Plan::kTiles>(segment);
  uint8_t* tiles = shared.tiles[index][0];
  PageCopies<TilePart, 1, Plan::kTiles> copies(
      p, segment, tiles, segment.first_tile + index, lane);
#pragma unroll 1
  for (int step = 0; step < kCopies; ++step)
    copies.issue(step, step, num_steps, lane);
  int slot = 0;
  offsets.begin(segment);
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, stage.advance()) {
    wait_copies<kCopies - 1>();
    __syncwarp();
    uint8_t* bytes = tiles + slot * TILE_BYTES;
    const int tile = copies.first_tile + step * Plan::kTiles;
    if constexpr (TilePart::kHasKeys)
      produce_keys(shared, stage, segment, bytes, index, tile, lane);
    if constexpr (KEY_OFFSET != 0) {
      // Consumers multiply these keys before they release the notes before.
      const int first = segment.first_tile + step * Plan::kTiles;
      if (offsets.is_next(p, first)) {
        const int warp = index + (TilePart::kHasKeys ? 0 : Plan::kTiles);
        write_offset_scores<Plan::kProducers>(shared.offsets, offsets, p,
                                              segment, offset_of_tile(p, first),
                                              first == 0, warp, lane);
      }
    }
    if constexpr (TilePart::kHasValues)
      produce_values(shared, stage, segment, bytes, index, tile, lane);
    // The decoded bytes are no longer read, so their slot is free.
    copies.issue(step + kCopies, slot, num_steps, lane);
    if (++slot == kCopies) slot = 0;
  }
}

}  // namespace turbo
