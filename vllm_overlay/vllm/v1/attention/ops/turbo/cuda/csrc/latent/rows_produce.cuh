// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Producers: warps that decode tiles to shared memory, each one of every step.
// Codes come from the cache straight to registers.
#pragma once

#include "latent/rows_layout.cuh"

namespace turbo {

// The words of a tile that a lane decodes. Row g of the tile is its token g.
struct RowsTile : LaneTile {
  // Load from a tile, of which num_tokens or more tokens exist. Others decode
  // to zeros, and with none there need not be a tile.
  __device__ __forceinline__ void ask(const uint8_t* tile, int num_tokens) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto load = [](const uint8_t* p) {
      return __ldcg(reinterpret_cast<const uint4*>(p));
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = g + 8 * r;
#pragma unroll
      for (int j = 0; j < LaneTile::kRuns; ++j) scales[r][j] = 0;
      rope_scales[r] = 0;
      if (n >= num_tokens) continue;
      const uint8_t* row = tile + n * kRowBytes + 16 * t;
#pragma unroll
      for (int j = 0; j < LaneTile::kRuns; ++j)
        codes[r][j] = load(row + 64 * j);
      const uint4 x = load(tile + ROPE_OFFSET + n * ROPE_SIZE + 16 * t);
      ropes[r][0] = x.x, ropes[r][1] = x.y;
      ropes[r][2] = x.z, ropes[r][3] = x.w;
      const uint4 y =
          load(tile + LATENT_SCALES_OFFSET + n * (LATENT_RANK / 32));
      scales[r][0] = y.x, scales[r][1] = y.y;
      scales[r][2] = y.z, scales[r][3] = y.w;
      rope_scales[r] =
          __ldcg(tile + ROPE_SCALES_OFFSET + n * (ROPE_SIZE / 16) + t);
    }
  }
};
static_assert(LaneTile::kRuns == 4 && LaneTile::kRopeWords == 4);

// Make what a warp has written visible to the consumers' products.
__device__ __forceinline__ void give_written(uint64_t& barrier) {
  fence_async_proxy();
  arrive_warp(barrier, threadIdx.x % 32);
}

// Decode a tile to a stage.
//
// target: the address of the tile's first row.
// begun: the barrier of the first blocks.
// wait: is called before the stage is written. The first batches have then been
//   decoded.
template <typename F>
__device__ __forceinline__ void decode_rows(RowsTile& taken, uint32_t target,
                                            uint64_t& begun, const F& wait) {
  const WarpRows stage(target);
  Fragments fragments[2];
  decode_first(fragments, taken);
  wait();
  stage.store(LATENT_RANK / 64, fragments[1]);
#pragma unroll
  for (int j = 0; j < LaneTile::kRuns; ++j) {
    const RunScales scales[2] = {scales_of(taken, 0, j),
                                 scales_of(taken, 1, j)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Fragments& f = fragments[half];
      if (j + half > 0) decode_words(f, taken, scales, j, half);
      stage.store(2 * j + half, f);
      // No load is under way, which the fence would wait for.
      if (2 * j + half + 1 == kBlocksAhead) give_written(begun);
    }
  }
}

struct RowsProducer {
  static constexpr int kColumns = kRowsOfBlock;
  RowsShared& shared;
  int warp;  // among producers
  Announcer<RowsShared> announcer;
  TileWalk<kStepTiles> walk;
  Stage<kRowStages> stage;

  __device__ __forceinline__ RowsProducer(RowsShared& shared, int warp,
                                          const LatentParams& p)
      : shared(shared), warp(warp), announcer{shared}, walk{p} {}

  __device__ __forceinline__ void attend(const LatentParams&,
                                         const LatentSegment& s) {
    const int lane = threadIdx.x % 32;
    announcer.announce(s, warp);
    walk.begin(s, s.first_step * kStepTiles + warp);
    RowsTile taken;
    // Have the next tile loaded from now on.
    const auto turn_to_next = [&] {
      int num_tokens = 0;
      const uint8_t* tile = nullptr;
      if (walk.has_next()) {
        num_tokens = s.num_tokens - walk.next_tile * TILE_TOKENS;
        tile = walk.next();
        walk.advance();
      }
      taken.ask(tile, num_tokens);
    };
    turn_to_next();
#pragma unroll 1
    for (int step = s.first_step; step < s.last_step; ++step) {
      const uint32_t target = shared_address(shared.tiles[stage.index]) +
                              warp * (TILE_TOKENS * kPlaceBytes);
      // Its loads are asked for when this tile has been stored.
      if (walk.has_next()) {
        const uint8_t* tile = walk.next();
        if (lane == 0) prefetch_bulk(tile, TILE_BYTES);
      }
      decode_rows(taken, target, shared.begun[stage.index], [&] {
        wait_for(shared.free[stage.index], stage.parity ^ 1);
      });
      give_written(shared.full[stage.index]);
      stage.advance();
      // The fence could wait for loads that were asked for before it.
      turn_to_next();
    }
  }
};

}  // namespace turbo
