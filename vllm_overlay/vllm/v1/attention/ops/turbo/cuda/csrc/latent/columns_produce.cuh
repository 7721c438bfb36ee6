// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Producers: two warpgroups that decode steps in turn, each tile once. A tile's
// registers are an operand of the scores, and are stored as values.
#pragma once

#include "latent/columns_layout.cuh"

namespace turbo {

// Decode a tile to a stage while it is multiplied by the queries.
//
// begin: is called when the tile is in registers, before the stage is written.
template <int columns, typename F>
__device__ __forceinline__ void score_tile(float (&scores)[columns / 2],
                                           const LaneTile& taken,
                                           uint32_t target, uint32_t query,
                                           const F& begin) {
  constexpr int kQueryBytes = ColumnsShared<columns>::kQueryBytes;
  const WarpRows stage(target);
  // Issue the products of a batch's steps of the depth, from `step` on.
  const auto multiply = [&](const Fragments& f, int step, bool adds) {
    const uint32_t rows = query + step / 4 * (kQueryBytes / 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma_registers(scores, f[4 * i], f[4 * i + 1], f[4 * i + 2],
                      f[4 * i + 3], wgmma_descriptor(rows + 2 * i, kRowsLayout),
                      adds || i > 0);
    }
    wgmma_commit();
  };
  Fragments fragments[2];
  decode_first(fragments, taken);
  if constexpr (ROPE_SIZE != 0) multiply(fragments[1], kLatentSteps, false);
  multiply(fragments[0], 0, ROPE_SIZE != 0);
  begin();
#pragma unroll
  for (int j = 0; j < LaneTile::kRuns; ++j) {
    const RunScales scales[2] = {scales_of(taken, 0, j),
                                 scales_of(taken, 1, j)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block = 2 * j + half;
      Fragments& f = fragments[half];
      if (block > 0) {
        // The registers of the batch before the latest are then free.
        wgmma_wait<1>();
        decode_words(f, taken, scales, j, half);
        multiply(f, 4 * block, true);
      }
      stage.store(block, f);
    }
  }
  wgmma_wait<0>();
  hold(scores);
}

// Warpgroups decode steps in turn. A warp's next tile is copied while it
// decodes one from registers.
template <int columns>
struct ColumnsProducer {
  static constexpr int kColumns = columns;
  using Shared = ColumnsShared<columns>;
  Shared& shared;
  int warp;  // among producers
  Announcer<Shared> announcer;
  ColumnsWalk walk;
  Stage<kProducers> segment;
  int parity = 0;  // of the warpgroup's stage
  int next = 0;    // the stage of the segment's first step

  __device__ __forceinline__ ColumnsProducer(Shared& shared, int warp,
                                             const LatentParams& p)
      : shared(shared), warp(warp), announcer{shared}, walk{p} {}

  // Copy the next tile, if there is one, over a tile that all lanes have read.
  //
  // loaded: bits that depend on all lanes' loads of that tile. The copy must
  //   not overtake these loads.
  __device__ __forceinline__ void copy_next(uint32_t loaded) {
    if (!walk.has_next()) return;
    // A zero that the compiler does not know to be one.
    const int nothing =
        uniform(int(loaded & uint32_t(walk.p.num_splits >> 31)));
    walk.copy(shared_address(shared.copies[warp]),
              shared_address(&shared.copied[warp]), nothing);
  }

  __device__ __forceinline__ void attend(const LatentParams&,
                                         const LatentSegment& s) {
    const int lane = threadIdx.x % 32;
    const int group = warp / kStepTiles, tile = warp % kStepTiles;
    announcer.announce(s, warp);
    const int first = s.first_step + (group ^ next);
    next ^= (s.last_step - s.first_step) & 1;
    walk.begin(s, first * kStepTiles + tile);
    copy_next(0);
    wait_for(shared.written[segment.index], segment.parity);
    segment.advance();
    const uint32_t query =
        of_loop(wgmma_operand(shared_address(shared.query), 16));
    const uint32_t target = shared_address(shared.tiles[group]) +
                            tile * (TILE_TOKENS * kPlaceBytes);
    float4* given = &shared.scores[group][0][32 * tile + lane];
#pragma unroll 1
    for (int step = first; step < s.last_step; step += kProducers) {
      const int num_tokens =
          s.num_tokens - step * kStepTokens - tile * TILE_TOKENS;
      if (num_tokens > 0) walk.wait(shared_address(&shared.copied[warp]));
      LaneTile taken;
      taken.load(shared.copies[warp], num_tokens, walk, lane);
      float scores[columns / 2];
      score_tile<columns>(scores, taken, target, query, [&] {
        copy_next(taken.any_bits());
        wait_for(shared.free[group], parity ^ 1);
      });
#pragma unroll
      for (int n = 0; n < columns / 8; ++n)
        given[n * kGroupThreads] = {scores[4 * n], scores[4 * n + 1],
                                    scores[4 * n + 2], scores[4 * n + 3]};
      fence_async_proxy();
      arrive_warp(shared.full[group], lane);
      parity ^= 1;
    }
  }
};

}  // namespace turbo
