// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Copies of a warp's tiles, in the steps of a segment, from pages to shared
// memory.
#pragma once

#include "common/segment.cuh"
#include "extend_mma/ranges.cuh"

namespace turbo {

// The part of a tile that is copied: its bytes, and the place of each in the
// tile.
struct WholeTile {
  static constexpr bool kHasKeys = true, kHasValues = true;
  static constexpr int kBytes = TILE_BYTES;
  static __device__ __forceinline__ int place(int byte) { return byte; }
};
struct KeyPlanes {
  static constexpr bool kHasKeys = true, kHasValues = false;
  static constexpr int kCodes = VALUE_CODES_OFFSET;
  static constexpr int kBytes =
      kCodes + VALUE_SCALES_OFFSET - KEY_SCALES_OFFSET;
  static __device__ __forceinline__ int place(int byte) {
    return byte < kCodes ? byte : byte - kCodes + KEY_SCALES_OFFSET;
  }
};
struct ValuePlanes {
  static constexpr bool kHasKeys = false, kHasValues = true;
  static constexpr int kCodes = KEY_SCALES_OFFSET - VALUE_CODES_OFFSET;
  static constexpr int kBytes = kCodes + TILE_BYTES - VALUE_SCALES_OFFSET;
  static __device__ __forceinline__ int place(int byte) {
    return byte < kCodes ? byte + VALUE_CODES_OFFSET
                         : byte - kCodes + VALUE_SCALES_OFFSET;
  }
};

// Lane i has the addresses of the tiles of the warp's step i, and then of the
// step 32 later.
//
// Part: the part of a tile that is copied.
// kWarpTiles: the warp's tiles of a step.
// kStepTiles: tiles from one of the warp's steps to its next.
template <typename Part, int kWarpTiles, int kStepTiles>
struct PageCopies {
  static constexpr int kChunk = 16, kWarpBytes = 32 * kChunk;
  static_assert(Part::kBytes % kChunk == 0);
  const AttentionParams& p;
  const PassSegment& segment;
  uint32_t target;
  int first_tile;  // the warp's
  const uint8_t* address[kWarpTiles];

  __device__ __forceinline__ PageCopies(const AttentionParams& p,
                                        const PassSegment& segment,
                                        const uint8_t* tiles, int first_tile,
                                        int lane)
      : p(p),
        segment(segment),
        target(shared_address(tiles)),
        first_tile(first_tile) {}

  __device__ __forceinline__ void load_addresses(int step, int lane) {
    const int* table =
        p.block_table + int64_t(segment.seq) * p.stride_block_table;
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      const int tile = first_tile + (step + lane) * kStepTiles + i;
      address[i] = nullptr;
      const bool is_seen = KEY_OFFSET == 0 || tile >= segment.first_seen_tile;
      if (is_seen && tile < min(segment.last_tile, segment.raw_tile) &&
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
        for (int byte = 0; byte < Part::kBytes; byte += kWarpBytes) {
          const int own = byte + lane * kChunk;
          if (byte + kWarpBytes <= Part::kBytes || own < Part::kBytes)
            copy_async(to + Part::place(own), source + Part::place(own));
        }
      }
    }
    commit_copies();
  }
};

// Zero the scales of V of a tile's tokens outside of [first, end). The sequence
// does not have these tokens, or they are not read.
__device__ __forceinline__ void clear_tokens(uint8_t* tile, int first, int end,
                                             int lane) {
  if (first <= 0 && end >= TILE_TOKENS) return;
  if (lane < TILE_TOKENS && (lane < first || lane >= end))
    clear_value_scales(tile, lane);
  __syncwarp();
}

// Zero the scales of V of the unread tokens of a segment's tile.
__device__ __forceinline__ void clear_unread(uint8_t* tile,
                                             const Segment& segment, int index,
                                             int lane) {
  const bool is_unseen = KEY_OFFSET != 0 && segment.first_seen_tile > index;
  clear_tokens(tile, is_unseen ? TILE_TOKENS : 0,
               segment.num_tokens - index * TILE_TOKENS, lane);
}

}  // namespace turbo
