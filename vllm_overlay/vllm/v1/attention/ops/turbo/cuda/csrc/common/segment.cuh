// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Segments of sequences, which attention handles one at a time. Their tiles are
// copied to shared memory. A sequence without tokens has no segment.
#pragma once

#include "common/attention_params.cuh"
#include "common/tile.cuh"
#include "common/warp.cuh"

namespace turbo {

// Neighbouring tiles of a sequence and KV head, and the queries for them.
struct Segment {
  int seq;
  int kv_head;
  int first_column;           // among the KV head's queries
  const uint8_t* cache;       // pages of the KV head
  int first_tile, last_tile;  // in the sequence
  int first_seen_tile;        // tiles before it are not read
  int num_tokens;             // in the sequence
  int split;                  // the partial result's place
  bool ends;                  // whether it has the sequence's last tile
};

// Mark the partial results of sequences without tokens.
template <int kWarps>
__device__ __forceinline__ void skip_empty(const AttentionParams& p, int warp,
                                           int lane) {
  const int num_partials = p.num_splits * p.num_queries();
#pragma unroll 1
  for (int seq = int(blockIdx.x); seq < p.num_seqs; seq += int(gridDim.x)) {
    const SeenTokens seen(p, seq);
    if (seen.first < seen.last) continue;
#pragma unroll 1
    for (int i = 32 * warp + lane; i < num_partials; i += 32 * kWarps) {
      p.partial_lse[int64_t(seq) * num_partials + i] = -INFINITY;
    }
  }
}

// Zero the warp's share of a token's scales of V. The sequence does not have
// the token, or it is not read, so its bytes are arbitrary. A weight of zero
// does not make a product with infinity or NaN zero.
__device__ __forceinline__ void clear_value_scales(uint8_t* tiles, int token) {
  uint8_t* row = tiles + token / TILE_TOKENS * TILE_BYTES +
                 VALUE_SCALES_OFFSET + token % TILE_TOKENS * SCALE_BYTES +
                 kShareScaleBytes * share_of_warp();
#pragma unroll
  for (int i = 0; i < kShareScaleBytes; i += 2)
    *reinterpret_cast<uint16_t*>(row + i) = 0;
}

// The copies of a warp's tiles, two at a time, from pages to shared memory.
// Half of the lanes copy a tile. If warps share tiles, these lanes copy their
// warp's chunks of it. Lane i has the address of tile i % 2 of step i / 2.
struct TileCopies {
  static constexpr int kHalf = 16, kChunk = 16;
  static constexpr int kStep = kTileWarps * kHalf * kChunk;
  static constexpr int kSteps = 16;  // steps that lanes have the addresses of
  // An instruction's immediate offset reaches 2048 bytes either way, so
  // addresses lie kReach bytes past a tile's first byte.
  static constexpr int kReach = 2048;
  const AttentionParams& p;
  const Segment& segment;
  const int* table;
  const uint8_t* address;
  uint32_t target;
  int first, stride;  // of the warp's pairs of tiles
  int count;
  int lane;

  __device__ __forceinline__ TileCopies(const AttentionParams& p,
                                        const Segment& segment,
                                        const uint8_t* tiles, int index,
                                        int size, int lane)
      : p(p), segment(segment), address(nullptr), lane(lane) {
    table = p.block_table + int64_t(segment.seq) * p.stride_block_table;
    target = shared_address(tiles) + (lane / kHalf) * TILE_BYTES + own_byte();
    first = segment.first_tile + 2 * index;
    stride = 2 * size;
    count = (segment.last_tile - first + stride - 1) / stride;
  }

  // The steps from a tile of the warp's up to `last` (exclusive), a later one.
  // A stride is a power of two.
  __device__ __forceinline__ int steps_before(int last, int tile) const {
    return ((last - 1 - tile) >> (__ffs(stride) - 1)) + 1;
  }

  // The byte of a tile at which the lane's copies begin.
  __device__ __forceinline__ int own_byte() const {
    return (share_of_warp() * kHalf + lane % kHalf) * kChunk;
  }

  __device__ __forceinline__ void load_addresses(int step) {
    const int tile = first + (step + lane / 2) * stride + lane % 2;
    address = nullptr;
    // Segments begin at the first seen tile. With KEY_OFFSET they may begin
    // earlier, so that the tiles of a step share one offset of K.
    const bool is_seen = KEY_OFFSET == 0 || tile >= segment.first_seen_tile;
    if (is_seen && tile < segment.last_tile) {
      const int block = tile / p.tiles_per_block;
      address = segment.cache + table[block] * p.stride_cache_block +
                (tile - block * p.tiles_per_block) * TILE_BYTES + kReach;
    }
  }

  // Copy the tiles of a step, by its place among the steps with loaded
  // addresses. A step past the last has none.
  __device__ __forceinline__ void copy(int place, uint32_t stage_offset) {
    const auto bits = reinterpret_cast<unsigned long long>(address);
    const auto source = reinterpret_cast<const uint8_t*>(
        __shfl_sync(~0u, bits, 2 * place + lane / kHalf));
    copy_rest<0>(source + own_byte(), source != nullptr, target + stage_offset);
    commit_copies();
  }

  // Copy the lane's chunks of a tile, from byte i on.
  template <int i>
  __device__ __forceinline__ void copy_rest(const uint8_t* source, bool exists,
                                            uint32_t target) const {
    if constexpr (i < TILE_BYTES) {
      const bool is_inside =
          i + kStep <= TILE_BYTES || i + own_byte() < TILE_BYTES;
      copy_async_if<i, i % (2 * kReach) - kReach>(exists && is_inside, target,
                                                  source);
      constexpr int kNext = i + kStep;
      copy_rest<kNext>(source + (kNext % (2 * kReach) == 0 ? 2 * kReach : 0),
                       exists, target);
    }
  }

  // Copy the tiles of a step. Steps come in order, and addresses are loaded
  // here.
  __device__ __forceinline__ void issue(int step, uint32_t stage_offset) {
    if (step < count) {
      if (step % kSteps == 0) load_addresses(step);
      copy(step % kSteps, stage_offset);
    } else {
      commit_copies();
    }
  }
};

}  // namespace turbo
