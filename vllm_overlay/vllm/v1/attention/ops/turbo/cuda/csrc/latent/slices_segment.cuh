// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention of a block to a segment, by instructions that every GPU from
// 8.0 on has.
//
// As in segment.cuh, query rows are the columns of both products,
// S^T = K q^T and O^T = V^T P^T. A team of four warps takes one or more tiles
// of 16 tokens at once. Each warp decodes a slice of the coordinates. Its
// registers are an operand of S^T, and the team adds the slices' scores. With
// their 8 x 8 matrices transposed they are also an operand of O^T, of which the
// warp has its slice. Values do not pass through shared memory.
#pragma once

#include "latent/queries.cuh"
#include "latent/slices_partial.cuh"
#include "latent/slices_tile.cuh"

namespace turbo {

// A warp's queries as operands. Registers hold those of some blocks of columns.
template <typename Plan>
struct SliceQueries {
  static constexpr int kSliceSteps = kOwnSteps + kOwnRopes;
  static constexpr int kSpace = Plan::kHeld > 0 ? Plan::kHeld : 1;
  uint32_t held[kSliceSteps][kSpace][2];
  uint32_t rows;  // shared address of a lane's row of matrices

  // The index of a slice's step among all steps.
  static __device__ __forceinline__ int step_of(int s, int warp) {
    return s < kOwnSteps ? warp * kOwnSteps + s : kLatentSteps + warp;
  }
  __device__ __forceinline__ void load(const SliceShared<Plan>& shared,
                                       const SlicePlace& own) {
    const int g = own.lane / 4, t = own.lane % 4;
#pragma unroll
    for (int s = 0; s < kSliceSteps; ++s) {
#pragma unroll
      for (int n = 0; n < Plan::kHeld; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          held[s][n][h] = *reinterpret_cast<const uint32_t*>(
              &shared.query[step_of(s, own.warp)][h][8 * n + g][2 * t]);
      }
    }
    // The matrices are both halves of a step's depth, for a block and for the
    // next.
    if constexpr (Plan::kHeld < Plan::kBlocks) {
      rows = shared_address(
          &shared.query[0][own.lane / 8 % 2]
                       [8 * (Plan::kHeld + own.lane / 16) + own.lane % 8][0]);
    }
  }
  // Add a step's products to the scores of a tile.
  __device__ __forceinline__ void multiply(float (&scores)[Plan::kBlocks][4],
                                           const uint32_t (&f)[4], int s,
                                           int warp) const {
#pragma unroll
    for (int n = 0; n < Plan::kHeld; ++n)
      mma_f16(scores[n], f[0], f[1], f[2], f[3], held[s][n][0], held[s][n][1]);
#pragma unroll
    for (int n = Plan::kHeld; n < Plan::kBlocks; n += 2) {
      uint32_t q[4];
      load_matrices(q, rows + step_of(s, warp) * (32 * Plan::kColumns) +
                           (n - Plan::kHeld) * 128);
      mma_f16(scores[n], f[0], f[1], f[2], f[3], q[0], q[1]);
      mma_f16(scores[n + 1], f[0], f[1], f[2], f[3], q[2], q[3]);
    }
  }
};

// Write the scores of a slice of a tile for its team. The operands are kept.
template <typename Plan>
__device__ __forceinline__ void score_tile(SliceShared<Plan>& shared,
                                           uint32_t (&values)[kOwnSteps][4],
                                           const SliceQueries<Plan>& queries,
                                           const SliceTile& taken, int tile,
                                           const SlicePlace& own) {
  float scores[Plan::kBlocks][4] = {};
  if constexpr (kOwnRopes != 0) {
    uint32_t f[4];
    taken.decode_own_rope(f);
    queries.multiply(scores, f, kOwnSteps, own.warp);
  }
  const int shift = 1 + 6 * (own.lane % 4);
  const RunScales scales[2] = {RunScales(taken.scales[0], shift),
                               RunScales(taken.scales[1], shift)};
#pragma unroll
  for (int word = 0; word < kOwnWords; ++word) {
    taken.decode_own_word(values, scales, word, own.warp);
    queries.multiply(scores, values[2 * word], 2 * word, own.warp);
    queries.multiply(scores, values[2 * word + 1], 2 * word + 1, own.warp);
  }
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      shared.scores[own.team][own.warp][2 * (tile * Plan::kBlocks + n) + h]
                   [own.lane] = {scores[n][2 * h], scores[n][2 * h + 1]};
  }
}

// Add a tile's values.
template <typename Plan>
__device__ __forceinline__ void add_values(
    const SliceShared<Plan>& shared, SliceAccumulator<Plan>& acc,
    const uint32_t (&values)[kOwnSteps][4], int tile, const SlicePlace& own) {
  uint32_t weights[Plan::kBlocks][2];
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    const uint2 x = *reinterpret_cast<const uint2*>(
        shared.weights[own.team][tile * Plan::kBlocks + n][own.lane]);
    weights[n][0] = x.x, weights[n][1] = x.y;
  }
#pragma unroll
  for (int s = 0; s < kOwnSteps; ++s) {
#pragma unroll
    for (int n = 0; n < Plan::kBlocks; ++n)
      mma_f16(acc.output[s][n], values[s][0], values[s][2], values[s][1],
              values[s][3], weights[n][0], weights[n][1]);
  }
}

// Attend to the next tiles of a team.
template <typename Plan>
__device__ __forceinline__ void attend_tiles(
    SliceShared<Plan>& shared, SliceAccumulator<Plan>& acc,
    SliceQueue<Plan>& queue, const SliceQueries<Plan>& queries,
    const LatentSegment& segment, int first_token, const SlicePlace& own) {
  constexpr int kTiles = Plan::kTiles;
  uint32_t values[kTiles][kOwnSteps][4];
  queue.wait();
  {
    SliceTile taken[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      taken[i].load(shared.tiles[own.team][queue.stage][i],
                    segment.num_tokens - first_token - i * TILE_TOKENS, own);
    queue.advance();
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      score_tile(shared, values[i], queries, taken[i], i, own);
  }
  own.sync();
  if (queue.is_issuing(own)) queue.issue(own);
  const bool is_cut = first_token + kTiles * TILE_TOKENS > segment.first_limit;
  weigh_tiles(shared, acc, first_token, is_cut, own, [&] {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int s = 0; s < kOwnSteps; ++s) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          values[i][s][j] = transposed(values[i][s][j]);
      }
    }
    if constexpr (!Plan::kBulk) wait_copies<Plan::kStages - 1>();
  });
#pragma unroll
  for (int i = 0; i < kTiles; ++i) add_values(shared, acc, values[i], i, own);
}

template <typename Plan>
__device__ __forceinline__ void attend_segment(SliceShared<Plan>& shared,
                                               SliceQueue<Plan>& queue,
                                               const LatentParams& p,
                                               const LatentSegment& segment,
                                               const SlicePlace& own) {
  queue.begin(segment, own);
  const int last_tile = queue.last_tile;
  int tile = queue.next_tile;
#pragma unroll
  for (int stage = 0; stage < Plan::kStages; ++stage) {
    if (queue.is_issuing(own)) queue.issue(own);
  }
  load_queries(shared, p, segment);
  SliceAccumulator<Plan> acc = {};
  if constexpr (!Plan::kBulk) wait_copies<Plan::kStages - 1>();
  __syncthreads();
  SliceQueries<Plan> queries;
  queries.load(shared, own);
#pragma unroll 1
  for (; tile < last_tile; tile += Plan::kTeams * Plan::kTiles)
    attend_tiles(shared, acc, queue, queries, segment, tile * TILE_TOKENS, own);
  __syncthreads();
  write_slices(shared, acc, p, segment, own);
}

template <int columns, int teams, int tiles, int stages, int held, bool bulk>
struct SliceKernel {
  using Plan = SlicePlan<columns, teams, tiles, stages, held, bulk>;
  using Shared = SliceShared<Plan>;
  static constexpr bool kHasRoles = false;
  static constexpr int kColumns = columns;
  static constexpr int kThreads = teams * kTeamThreads;
  static_assert(sizeof(Shared) <= kLeastSharedBytes);

  Shared& shared;
  SlicePlace own;
  SliceQueue<Plan> queue;

  __device__ __forceinline__ SliceKernel(uint8_t* bytes, const LatentParams& p,
                                         int block_warp, int lane)
      : shared(*reinterpret_cast<Shared*>(bytes)),
        own{block_warp / kTeamWarps, block_warp % kTeamWarps, lane},
        queue{p, shared_address(shared.tiles[own.team]),
              shared_address(shared.copied[own.team])} {
    if constexpr (bulk) {
      if (queue.is_issuing(own) && lane == 0) {
#pragma unroll
        for (int i = 0; i < stages; ++i)
          init_barrier(queue.barriers + 8 * i, 1);
        fence_barrier_init();
      }
      __syncthreads();
    }
  }
  __device__ __forceinline__ void attend(const LatentParams& p,
                                         const LatentSegment& s) {
    attend_segment(shared, queue, p, s, own);
  }
};

}  // namespace turbo
