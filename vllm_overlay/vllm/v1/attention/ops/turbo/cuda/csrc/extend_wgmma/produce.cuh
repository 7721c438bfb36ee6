// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Producers: warps that copy tiles from pages, and decode them.
#pragma once

#include <type_traits>

#include "extend_mma/copies.cuh"
#include "extend_wgmma/copy_raw_tiles.cuh"

namespace turbo {

// Decode a warp's tiles of a step, which have been copied.
//
// tiles: the copied bytes.
// first: the first of the tiles, in the sequence.
// index: the place of that tile in the step.
template <typename Plan>
__device__ __forceinline__ void decode_step(RowsShared<Plan>& shared,
                                            Stage<Plan::kStages>& stage,
                                            const Segment& segment,
                                            uint8_t* tiles, int first,
                                            int index, int lane) {
  constexpr int kWarpTiles = Plan::kWarpTiles;
  wait_for(shared.empty_keys[stage.index], stage.parity ^ 1);
  const uint32_t keys = shared_address(shared.keys[stage.index]);
#pragma unroll 1
  for (int i = 0; i < kWarpTiles; ++i) {
    decode_keys<Plan>(keys, shared.factors[stage.of_both()][index + i],
                      tiles + i * TILE_BYTES, index + i,
                      segment.num_tokens - (first + i) * TILE_TOKENS, lane);
  }
  fence_async_proxy();
  arrive_warp(shared.full_keys[stage.index], lane);
#pragma unroll 1
  for (int i = 0; i < kWarpTiles; ++i)
    clear_unread(tiles + i * TILE_BYTES, segment, first + i, lane);
  wait_for(shared.empty_values[stage.index], stage.parity ^ 1);
  const uint32_t values = shared_address(shared.values[stage.index]);
#pragma unroll 1
  for (int i = 0; i < kWarpTiles; ++i)
    decode_values<Plan>(values, tiles + i * TILE_BYTES, index + i, lane);
  fence_async_proxy();
  arrive_warp(shared.full_values[stage.index], lane);
}

// Produce the steps of a segment that the warp's producer has.
template <typename Plan, typename Params>
__device__ __forceinline__ void produce_segment(
    RowsShared<Plan>& shared, Stage<Plan::kStages>& stage, OffsetSteps& offsets,
    const Params& p, const PassSegment& segment, int warp, int lane) {
  constexpr int kCopies = Plan::kCopies, kWarpTiles = Plan::kWarpTiles;
  constexpr int kProducers = Plan::kProducers;
  const int all_steps = num_steps_of<Plan::kTiles>(segment);
  const int first_step =
      (warp / 4 + kProducers - stage.index % kProducers) % kProducers;
  const int num_steps = (all_steps - first_step + kProducers - 1) / kProducers;
  uint8_t* tiles = shared.tiles[warp][0][0];
  // Tiles from one of the producer's steps to its next.
  constexpr int kStepTiles = kProducers * Plan::kTiles;
  const int index = warp % 4 * kWarpTiles;
  PageCopies<WholeTile, kWarpTiles, kStepTiles> copies(
      p, segment, tiles, segment.first_tile + first_step * Plan::kTiles + index,
      lane);
#pragma unroll 1
  for (int step = 0; step < kCopies; ++step)
    copies.issue(step, step, num_steps, lane);
  int slot = 0, step = 0;
  offsets.begin(segment);
#pragma unroll 1
  for (int any_step = 0; any_step < all_steps; ++any_step, stage.advance()) {
    if constexpr (Plan::kNotesOffsets) {
      const int tile = segment.first_tile + any_step * Plan::kTiles;
      if (offsets.is_next(p, tile)) {
        int offset = offset_of_tile(p, tile);
        bool has_first = tile == 0;
        if constexpr (std::is_same_v<Params, OutputParams>) {
          if (tile >= segment.raw_tile) {
            offset = offset_of_raw(p, segment.num_tokens);
            has_first = false;
          }
        }
        write_offset_scores<4 * kProducers>(shared.offsets, offsets, p, segment,
                                            offset, has_first, warp, lane);
      }
    }
    if (stage.index % kProducers != warp / 4) continue;
    wait_copies<kCopies - 1>();
    __syncwarp();
    const int first = copies.first_tile + step * kStepTiles;
    bool is_raw = false;
    if constexpr (std::is_same_v<Params, OutputParams>) {
      is_raw = first - index >= segment.raw_tile;
      if (is_raw) copy_raw_step(shared, stage, p, segment, first, index, lane);
    }
    if (!is_raw) {
      decode_step(shared, stage, segment,
                  tiles + slot * (kWarpTiles * TILE_BYTES), first, index, lane);
    }
    copies.issue(step + kCopies, slot, num_steps, lane);
    ++step;
    if (++slot == kCopies) slot = 0;
  }
}

}  // namespace turbo
