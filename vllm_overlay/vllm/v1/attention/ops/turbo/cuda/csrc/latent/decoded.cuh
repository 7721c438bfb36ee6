// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Producers decode latents to shared memory for consumers' products, a step of
// 64 tokens at once.
#pragma once

#include "extend_mma/stages.cuh"
#include "latent/layout.cuh"

namespace turbo {

static_assert(kStepTokens == 64 && kSteps % 4 == 0 &&
              (ROPE_SIZE == 0 || ROPE_SIZE == 64));

// Operands are blocks of rows of 128 bytes, which have 64 places of the depth.
// Rows are query rows, or tokens of a step. Their 16-byte chunks are swizzled.
constexpr int kPlaceBytes = 128;
constexpr int kOperandBytes = kPlaceBytes * 64;
constexpr int kOperandBlocks = kSteps / 4;
// The layout of an operand, of which eight rows are 1024 bytes.
constexpr uint32_t kRowsLayout = wgmma_layout<1>(8 * kPlaceBytes);
constexpr int kStepTiles = kStepTokens / TILE_TOKENS;
// Segments that are announced at once.
constexpr int kAnnounced = 2;

// The place of a row's coordinate and the next: see load_queries.
__device__ __forceinline__ __half2& swizzled_pair(uint8_t* block, int row,
                                                  const DepthPlace& at) {
  const int chunk = at.step % 4 * 2 + at.place / 8;
  return *reinterpret_cast<__half2*>(block + row * kPlaceBytes +
                                     (chunk ^ row % 8) * 16 + at.place % 8 * 2);
}

// The memory that producers and consumers share.
//
// stages: steps that are decoded.
// blocks: of 64 coordinates, which consumers read.
template <int stages, int blocks>
struct alignas(1024) DecodedSteps {
  static constexpr int kStages = stages;
  static constexpr int kStageBytes = blocks * kOperandBytes;
  uint8_t tiles[stages][blocks][kOperandBytes];
  // Segments that producers announce to consumers. A last one has no sequence.
  LatentSegment segments[kAnnounced];
  // A stage is full when it has been decoded, and free when it has been read.
  uint64_t full[stages], free[stages];
  // Producers announce a segment, and consumers are done with it.
  uint64_t announced[kAnnounced], done[kAnnounced];

  // All threads of the block call it.
  //
  // producer_warps: those that decode a step.
  __device__ __forceinline__ void begin(int producer_warps,
                                        int consumer_warps) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < stages; ++i) {
        init_barrier(shared_address(&full[i]), producer_warps);
        init_barrier(shared_address(&free[i]), consumer_warps);
      }
#pragma unroll
      for (int i = 0; i < kAnnounced; ++i) {
        init_barrier(shared_address(&announced[i]), 1);
        init_barrier(shared_address(&done[i]), consumer_warps);
      }
      fence_barrier_init();
    }
    __syncthreads();
  }
  // Call attend with each segment that is announced.
  template <typename F>
  __device__ __forceinline__ void for_announced(int lane, const F& attend) {
    Stage<kAnnounced> next;
#pragma unroll 1
    while (true) {
      wait_for(announced[next.index], next.parity);
      const LatentSegment& s = segments[next.index];
      if (uniform(s.seq) < 0) break;
      attend(s);
      arrive_warp(done[next.index], lane);
      next.advance();
    }
  }
};

// The first producer announces segments to the consumers.
template <typename Steps>
struct Announcer {
  Steps& shared;
  Stage<kAnnounced> next;

  __device__ __forceinline__ void announce(const LatentSegment& s, int warp) {
    if (warp != 0) return;
    const int lane = threadIdx.x % 32, i = next.index;
    wait_for(shared.done[i], next.parity ^ 1);
    if (lane == 0) shared.segments[i] = s;
    arrive_warp(shared.announced[i], lane);
    next.advance();
  }
  __device__ __forceinline__ void end(int warp) {
    LatentSegment none = {};
    none.seq = -1;
    announce(none, warp);
  }
};

// The tiles of a segment that a warp decodes, in order.
//
// kStride: from a tile to the next, in tiles.
template <int kStride>
struct TileWalk {
  const LatentParams& p;
  const int* table = nullptr;
  int next_tile = 0, last_tile = 0;
  // The next tile's block of the sequence, and its place in the block.
  int place = 0, in_block = 0;
  int block = 0;   // that block in the cache, loaded early
  int copied = 0;  // the parity of copies

  __device__ __forceinline__ bool has_next() const {
    return next_tile < last_tile;
  }
  __device__ __forceinline__ void ask() {
    if (has_next()) block = __ldg(table + place);
  }
  // first: the first tile.
  __device__ __forceinline__ void begin(const LatentSegment& s, int first) {
    table = p.block_table + int64_t(s.seq) * p.stride_block_table;
    next_tile = first;
    last_tile = min(s.last_step * kStepTiles,
                    (s.num_tokens + TILE_TOKENS - 1) / TILE_TOKENS);
    place = next_tile / p.tiles_per_block;
    in_block = next_tile % p.tiles_per_block;
    ask();
  }
  // The address of the next tile, if there is one.
  //
  // nothing: a zero that depends on what must come first.
  __device__ __forceinline__ const uint8_t* next(int nothing = 0) const {
    return p.kv_cache +
           int64_t(uniform(block) + nothing) * p.stride_cache_block +
           in_block * TILE_BYTES;
  }
  __device__ __forceinline__ void advance() {
    next_tile += kStride;
    in_block += kStride;
    while (in_block >= p.tiles_per_block) {
      in_block -= p.tiles_per_block;
      ++place;
    }
    ask();
  }
  // Copy the next tile.
  __device__ __forceinline__ void copy(uint32_t target, uint32_t barrier,
                                       int nothing) {
    const uint8_t* tile = next(nothing);
    if (threadIdx.x % 32 == 0) copy_tile(target, tile, barrier);
    advance();
  }
  // Wait for the tile that was copied.
  __device__ __forceinline__ void wait(uint32_t barrier) {
    wait_barrier(barrier, copied);
    copied ^= 1;
  }
  // The byte of the rope's scales that a lane has of token n.
  static __device__ __forceinline__ int scale_of(int n, int t) {
    return n * (ROPE_SIZE / 16) + t;
  }
};

// A warp's 16 rows of an operand. A step of the depth is stored as it is: rows
// of its four 8 x 8 matrices are tokens, of 16 bytes. Lane l has the address of
// row l % 8 of matrix l / 8.
struct WarpRows {
  uint32_t row, chunk;

  // target: the address of the first row.
  explicit __device__ __forceinline__ WarpRows(uint32_t target) {
    const int lane = threadIdx.x % 32;
    row = target + (8 * (lane / 8 % 2) + lane % 8) * kPlaceBytes;
    chunk = ((lane / 16) ^ (lane % 8)) * 16;
  }
  // Store four steps of the depth, in a block of the operand.
  __device__ __forceinline__ void store(int block, const Fragments& f) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_matrices(row + block * kOperandBytes + (chunk ^ (32 * i)), f[4 * i],
                     f[4 * i + 1], f[4 * i + 2], f[4 * i + 3]);
    }
  }
};

}  // namespace turbo
