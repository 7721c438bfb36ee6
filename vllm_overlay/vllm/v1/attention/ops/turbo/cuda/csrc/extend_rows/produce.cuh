// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Producers: warps that copy tiles from pages, and decode them.
#pragma once

#include <type_traits>

#include "extend_rows/copy_own_tiles.cuh"

namespace turbo {

// A warp's copies of its tiles of those of a segment's steps that its producer
// has. Lane i has the address of the tile of step i of these, and of those 32
// later.
template <typename Plan>
struct RowsCopies {
  static constexpr int kChunk = 16, kWarpBytes = 32 * kChunk;
  static constexpr int kWarpTiles = Plan::kWarpTiles;
  // From one of the producer's steps to its next.
  static constexpr int kStepTiles = Plan::kProducers * Plan::kTiles;
  const AttentionParams& p;
  const PassSegment& segment;
  uint32_t target;
  int first_tile;  // of the warp's
  const uint8_t* address[kWarpTiles];

  __device__ __forceinline__ RowsCopies(const AttentionParams& p,
                                        const PassSegment& segment,
                                        const uint8_t* tiles, int first_step,
                                        int warp, int lane)
      : p(p),
        segment(segment),
        target(shared_address(tiles) + lane * kChunk),
        first_tile(segment.first_tile + first_step * Plan::kTiles +
                   warp % 4 * kWarpTiles) {}

  __device__ __forceinline__ void load_addresses(int step, int lane) {
    const int* table =
        p.block_table + int64_t(segment.seq) * p.stride_block_table;
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      const int tile = first_tile + (step + lane) * kStepTiles + i;
      address[i] = nullptr;
      const bool is_seen = KEY_OFFSET == 0 || tile >= segment.first_seen_tile;
      if (is_seen && tile < min(segment.last_tile, segment.own_tile) &&
          tile * TILE_TOKENS < segment.num_tokens) {
        const int block = tile / p.tiles_per_block;
        address[i] = segment.cache + table[block] * p.stride_cache_block +
                     (tile - block * p.tiles_per_block) * TILE_BYTES;
      }
    }
  }

  __device__ __forceinline__ void issue(int step, int slot, int num_steps,
                                        int lane) {
    if (step < num_steps) {
      if (step % 32 == 0) load_addresses(step, lane);
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        const auto bits = reinterpret_cast<unsigned long long>(address[i]);
        const auto source =
            reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, bits, step % 32));
        if (source == nullptr) continue;
        const uint32_t to = target + (slot * kWarpTiles + i) * TILE_BYTES;
#pragma unroll
        for (int byte = 0; byte < TILE_BYTES; byte += kWarpBytes) {
          if (byte + kWarpBytes <= TILE_BYTES ||
              byte + lane * kChunk < TILE_BYTES)
            copy_async(to + byte, source + byte + lane * kChunk);
        }
      }
    }
    commit_copies();
  }
};

// Zero the scales of V of a tile's tokens that the sequence does not have, or
// that are not read.
__device__ __forceinline__ void clear_tokens(uint8_t* tile, int first, int end,
                                             int lane) {
  if (first <= 0 && end >= TILE_TOKENS) return;
  if (lane < TILE_TOKENS && (lane < first || lane >= end))
    clear_value_scales(tile, lane);
  __syncwarp();
}

// Decode a warp's tiles of a step, which have been copied.
//
// tiles: these. first: the first of them. index: its place in the step.
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
  for (int i = 0; i < kWarpTiles; ++i) {
    const int unseen = segment.first_seen_tile - (first + i);
    clear_tokens(tiles + i * TILE_BYTES,
                 KEY_OFFSET != 0 && unseen > 0 ? TILE_TOKENS : 0,
                 segment.num_tokens - (first + i) * TILE_TOKENS, lane);
  }
  wait_for(shared.empty_values[stage.index], stage.parity ^ 1);
  const uint32_t values = shared_address(shared.values[stage.index]);
#pragma unroll 1
  for (int i = 0; i < kWarpTiles; ++i)
    decode_values<Plan>(values, tiles + i * TILE_BYTES, index + i, lane);
  fence_async_proxy();
  arrive_warp(shared.full_values[stage.index], lane);
}

// Produce its steps of a segment.
template <typename Plan, typename Params>
__device__ __forceinline__ void produce_segment(RowsShared<Plan>& shared,
                                                Stage<Plan::kStages>& stage,
                                                const Params& p,
                                                const PassSegment& segment,
                                                int warp, int lane) {
  constexpr int kCopies = Plan::kCopies, kWarpTiles = Plan::kWarpTiles;
  constexpr int kProducers = Plan::kProducers;
  const int all_steps =
      (segment.last_tile - segment.first_tile + Plan::kTiles - 1) /
      Plan::kTiles;
  const int first_step =
      (warp / 4 + kProducers - stage.index % kProducers) % kProducers;
  const int num_steps = (all_steps - first_step + kProducers - 1) / kProducers;
  uint8_t* tiles = shared.tiles[warp][0][0];
  RowsCopies<Plan> copies(p, segment, tiles, first_step, warp, lane);
#pragma unroll 1
  for (int step = 0; step < kCopies; ++step)
    copies.issue(step, step, num_steps, lane);
  int slot = 0, step = 0;
#pragma unroll 1
  for (int any_step = 0; any_step < all_steps; ++any_step, stage.advance()) {
    if (stage.index % kProducers != warp / 4) continue;
    wait_copies<kCopies - 1>();
    __syncwarp();
    const int first = copies.first_tile + step * copies.kStepTiles;
    const int index = warp % 4 * kWarpTiles;
    bool is_own = false;
    if constexpr (std::is_same_v<Params, OutputParams>) {
      is_own = first - index >= segment.own_tile;
      if (is_own) copy_own_step(shared, stage, p, segment, first, index, lane);
    }
    if (!is_own) {
      decode_step(shared, stage, segment,
                  tiles + slot * (kWarpTiles * TILE_BYTES), first, index, lane);
    }
    copies.issue(step + kCopies, slot, num_steps, lane);
    ++step;
    if (++slot == kCopies) slot = 0;
  }
}

}  // namespace turbo
