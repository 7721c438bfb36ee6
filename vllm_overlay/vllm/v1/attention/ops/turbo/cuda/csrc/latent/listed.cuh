// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Copies of tokens that a list names by their slots. They lie anywhere in the
// cache, and a tile of them is made in shared memory.
#pragma once

#include "latent/decoded.cuh"

namespace turbo {

// The scales of the rope of a token come with those of three neighbours.
constexpr int kScaleBytes = 16;
constexpr int kScaleTokens = kScaleBytes / (ROPE_SIZE ? ROPE_SIZE / 16 : 4);
constexpr int kListedSpace = kRopeScales + TILE_TOKENS * kScaleBytes;
constexpr int kListedBytes =
    kRowBytes + LATENT_RANK / 32 + (ROPE_SIZE ? ROPE_SIZE + kScaleBytes : 0);

// The tokens of a segment that a warp decodes, a tile of the list at once.
//
// kStride: from a tile to the next, in tiles.
template <int kStride>
struct ListWalk {
  const LatentParams& p;
  const int* list = nullptr;
  int next_tile = 0, last_tile = 0, num_tokens = 0;
  // The slot of the lane's token of the next tile, loaded early, and the row of
  // its last one in the cache's tile.
  int slot = 0, row = 0;

  __device__ __forceinline__ bool has_next() const {
    return next_tile < last_tile;
  }
  // Tokens of the next tile.
  __device__ __forceinline__ int count() const {
    return min(num_tokens - next_tile * TILE_TOKENS, TILE_TOKENS);
  }
  __device__ __forceinline__ void ask(int lane) {
    if (has_next() && lane < count())
      slot = __ldg(list + next_tile * TILE_TOKENS + lane);
  }
  __device__ __forceinline__ void begin(const LatentSegment& s, int first) {
    list = p.block_table + int64_t(s.seq) * p.stride_block_table;
    num_tokens = s.num_tokens;
    next_tile = first;
    last_tile = min(s.last_step * kStepTiles,
                    (num_tokens + TILE_TOKENS - 1) / TILE_TOKENS);
    ask(threadIdx.x % 32);
  }
  // Copy the next tokens to the places of a tile, one by each lane.
  //
  // nothing: a zero that depends on what must come first.
  __device__ __forceinline__ void copy(uint32_t target, uint32_t barrier,
                                       int nothing) {
    const int lane = threadIdx.x % 32, tokens = count();
    if (lane == 0) expect_bytes(barrier, tokens * kListedBytes);
    __syncwarp();
    if (lane < tokens) {
      const int tile = (slot + nothing) / TILE_TOKENS;
      const int block = tile / p.tiles_per_block;
      const uint8_t* source = p.kv_cache +
                              int64_t(block) * p.stride_cache_block +
                              (tile - block * p.tiles_per_block) * TILE_BYTES;
      row = slot % TILE_TOKENS;
      copy_bulk(target + lane / 8 * kSecondHalf + lane % 8 * kRowBytes,
                source + row * kRowBytes, kRowBytes, barrier);
      constexpr int kScales = LATENT_RANK / 32;
      copy_bulk(target + kLatentScales + lane * kScales,
                source + LATENT_SCALES_OFFSET + row * kScales, kScales,
                barrier);
      if constexpr (ROPE_SIZE != 0) {
        copy_bulk(target + kRopes + lane * ROPE_SIZE,
                  source + ROPE_OFFSET + row * ROPE_SIZE, ROPE_SIZE, barrier);
        copy_bulk(
            target + kRopeScales + lane * kScaleBytes,
            source + ROPE_SCALES_OFFSET + row / kScaleTokens * kScaleBytes,
            kScaleBytes, barrier);
      }
    }
    next_tile += kStride;
    ask(lane);
  }
  // The byte of the copied rope scales that the lane has of token n.
  __device__ __forceinline__ int scale_of(int n, int t) const {
    const int own = __shfl_sync(~0u, row, n);
    return n * kScaleBytes + own % kScaleTokens * (ROPE_SIZE / 16) + t;
  }
};

}  // namespace turbo
