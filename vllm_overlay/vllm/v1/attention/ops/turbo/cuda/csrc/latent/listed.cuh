// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Copies of tokens that a list names by their slots. They lie anywhere in the
// cache, and a tile of them is made in shared memory.
#pragma once

#include "latent/decoded.cuh"

namespace turbo {

static_assert(LATENT_RANK == 512 && ROPE_SIZE == 64,
              "other sizes have no lists");

// The scales of the rope of a token come with those of three neighbours.
constexpr int kChunk = 16;  // bytes of a copy
constexpr int kScaleTokens = kChunk / (ROPE_SIZE / 16);
constexpr int kListedSpace = kRopeScales + TILE_TOKENS * kChunk;

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
  // Copy a chunk, if its token n is of the tile.
  //
  // source: the chunk's place in the cache, which the lane of the token has.
  __device__ __forceinline__ void copy_chunk(uint32_t target, int64_t source,
                                             int n, int place) const {
    source = __shfl_sync(~0u, source, n);
    if (n < count()) copy_async(target, p.kv_cache + source + place);
  }
  // Copy the next tokens to the places of a tile.
  //
  // nothing: a zero that depends on what must come first.
  __device__ __forceinline__ void copy(uint32_t target, uint32_t, int nothing) {
    const int lane = threadIdx.x % 32;
    const int tile = (slot + nothing) / TILE_TOKENS;
    const int block = tile / p.tiles_per_block;
    const int64_t source = int64_t(block) * p.stride_cache_block +
                           (tile - block * p.tiles_per_block) * TILE_BYTES;
    row = slot % TILE_TOKENS;
    constexpr int kCodes = kRowBytes / kChunk, kRope = ROPE_SIZE / kChunk;
    constexpr int kScales = LATENT_RANK / 32;
    static_assert(kScales <= kChunk);
#pragma unroll
    for (int i = 0; i < TILE_TOKENS * kCodes / 32; ++i) {
      const int n = i * (32 / kCodes) + lane / kCodes;
      const int place = lane % kCodes * kChunk;
      copy_chunk(target + n / 8 * kSecondHalf + n % 8 * kRowBytes + place,
                 source + row * kRowBytes, n, place);
    }
#pragma unroll
    for (int i = 0; i < TILE_TOKENS * kRope / 32; ++i) {
      const int n = i * (32 / kRope) + lane / kRope;
      const int place = lane % kRope * kChunk;
      copy_chunk(target + kRopes + n * ROPE_SIZE + place,
                 source + ROPE_OFFSET + row * ROPE_SIZE, n, place);
    }
    const int n = lane % TILE_TOKENS;
    const bool is_rope = lane >= TILE_TOKENS;
    const int64_t scales = source + LATENT_SCALES_OFFSET + row * kScales;
    const int64_t rope_scales =
        source + ROPE_SCALES_OFFSET + row / kScaleTokens * kChunk;
    const int64_t from = __shfl_sync(~0u, rope_scales, n);
    if (n < count()) {
      copy_async(target + (is_rope ? kRopeScales + n * kChunk
                                   : kLatentScales + n * kScales),
                 p.kv_cache + (is_rope ? from : scales));
    }
    commit_copies();
    next_tile += kStride;
    ask(lane);
  }
  // Wait for the tile that was copied.
  __device__ __forceinline__ void wait(uint32_t) const {
    wait_copies<0>();
    __syncwarp();
  }
  // The byte of the copied rope scales that the lane has of token n.
  __device__ __forceinline__ int scale_of(int n, int t) const {
    const int own = __shfl_sync(~0u, row, n);
    return n * kChunk + own % kScaleTokens * (ROPE_SIZE / 16) + t;
  }
};

}  // namespace turbo
