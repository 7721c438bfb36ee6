// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A step's scores: its tiles are copied, decoded, multiplied and stored.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

// A warp's copies of its tiles, in every step or in every other. Warpgroups
// that share tokens also share copies. The first warpgroup issues them.
template <typename Plan>
struct TileQueue {
  const LatentParams& p;
  uint32_t tiles, barriers;  // shared addresses
  int issued = 0, taken = 0;
  // State of the segment.
  const int* table = nullptr;
  int next_tile = 0, last_tile = 0;
  // The next tile's block of the sequence, and its place in the block.
  int place = 0, in_block = 0;
  int block = 0;  // that block in the cache, loaded early

  __device__ __forceinline__ void ask() {
    if (next_tile < last_tile) block = table[place];
  }
  __device__ __forceinline__ void begin(const LatentSegment& s,
                                        const Place<Plan>& own) {
    table = p.block_table + int64_t(s.seq) * p.stride_block_table;
    next_tile = (s.first_step + own.set()) * 4 + own.warp;
    last_tile =
        min(s.last_step * 4, (s.num_tokens + TILE_TOKENS - 1) / TILE_TOKENS);
    if (own.part() != 0) last_tile = 0;
    place = next_tile / p.tiles_per_block;
    in_block = next_tile % p.tiles_per_block;
    ask();
  }
  // Copy the next tile, if there is one, over a tile that all lanes have read.
  //
  // loaded: bits that depend on all lanes' loads of that tile. The copy must
  //   not overtake these loads, and loads of the tensor core can hold them up.
  __device__ __forceinline__ void issue(int lane, uint32_t loaded) {
    if (next_tile >= last_tile) return;
    const int stage = issued % Plan::kStages;
    // A zero that the compiler does not know to be one.
    const int nothing = uniform(int(loaded & uint32_t(p.num_splits >> 31)));
    const uint8_t* source =
        p.kv_cache + int64_t(uniform(block) + nothing) * p.stride_cache_block +
        in_block * TILE_BYTES;
    if (lane == 0)
      copy_tile(tiles + stage * kTileSpace, source, barriers + stage * 8);
    ++issued;
    next_tile += 4 * Plan::kSets;
    in_block += 4 * Plan::kSets;
    while (in_block >= p.tiles_per_block) {
      in_block -= p.tiles_per_block;
      ++place;
    }
    ask();
  }
};

// Wait for the next tile, in a step of the segment, and load it, or load the
// part that is decoded first.
template <typename Plan>
__device__ __forceinline__ void take_tile(LatentShared<Plan>& shared,
                                          LaneTile<Plan>& taken,
                                          TileQueue<Plan>& queue,
                                          const LatentSegment& segment,
                                          int step, const Place<Plan>& own) {
  const int first_token = step * kStepTokens + own.warp * TILE_TOKENS;
  const int stage = queue.taken % Plan::kStages;
  if (first_token < segment.num_tokens) {
    wait_barrier(queue.barriers + stage * 8, queue.taken / Plan::kStages & 1);
    ++queue.taken;
  }
  taken.load(shared.tiles[4 * own.set() + own.warp][stage],
             segment.num_tokens - first_token, own);
}

// Operands of the products of a step's values and weights.
struct ValueOperands {
  uint32_t values, weights;

  template <typename Plan>
  __device__ __forceinline__ ValueOperands(LatentShared<Plan>& shared,
                                           const Place<Plan>& own)
      : values(of_loop(wgmma_operand(shared_address(shared.values[own.group]),
                                     kValueBytes))),
        weights(of_loop(
            wgmma_operand(shared_address(shared.weights[own.set()]), 128))) {}
};

// Add a block of coordinates of a step's values, in a group of products.
template <typename Plan>
__device__ __forceinline__ void add_block(LatentAccumulator<Plan>& acc,
                                          const ValueOperands& operands,
                                          int block) {
  const uint32_t values = operands.values, weights = operands.weights;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kStepTokens / 16; ++k) {
    wgmma_shared(
        acc.output[block],
        wgmma_descriptor(values + (block * kValueBytes + k * 2048) / 16,
                         wgmma_layout<1>(1024)),
        wgmma_descriptor(weights + k * 256 / 16,
                         wgmma_layout<0>(16 * kStepTokens)));
  }
  wgmma_commit();
}

// Multiply a tile by the queries while it is decoded. Its values replace those
// of the step before, block by block as those are added.
//
// fragments: those of the tile's first batches.
// adds: whether there is a step before.
template <bool adds, typename Plan>
__device__ __forceinline__ void multiply_tile(LatentShared<Plan>& shared,
                                              LatentAccumulator<Plan>& acc,
                                              float (&scores)[Plan::kScores],
                                              Fragments (&fragments)[2],
                                              LaneTile<Plan>& taken,
                                              const Place<Plan>& own) {
  constexpr int kColumns = Plan::kColumns, kOutputs = Plan::kOutputs;
  constexpr int kStepOperand = 2 * kColumns;  // of a step of the depth
  const ValueOperands operands(shared, own);
  const uint32_t all =
      wgmma_operand(shared_address(shared.query), 16 * kColumns);
  const uint32_t query =
      of_loop(all + own.part() * (Plan::kLatentSteps * kStepOperand));
  // Issue the products of some steps, from `first` on.
  const auto multiply = [&](const Fragments& f, uint32_t first, int steps,
                            bool adds_scores) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      wgmma_registers(
          scores, f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3],
          wgmma_descriptor(first + i * kStepOperand, wgmma_layout<0>(128)),
          adds_scores || i > 0);
    }
    wgmma_commit();
  };
  if constexpr (ROPE_SIZE != 0) {
    uint32_t rope = query + kLatentSteps * kStepOperand;
    if constexpr (Plan::kShares)
      rope = of_loop(all + (kLatentSteps + own.part() * Plan::kRopeSteps) *
                               kStepOperand);
    multiply(fragments[1], rope, Plan::kRopeSteps, false);
  }
  if constexpr (adds) add_block(acc, operands, 0);

  // A step's operand is stored as it is. Rows of its four 8 x 8 matrices are
  // tokens, of 16 bytes. Lane l has the address of row l % 8 of matrix l / 8.
  const int lane = own.lane;
  const uint32_t values = shared_address(shared.values[own.group]) +
                          (16 * own.warp + 8 * (lane / 8 % 2) + lane % 8) * 128;
  const uint32_t chunk = ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
  for (int j = 0; j < Plan::kRuns; ++j) {
    if (!Plan::kEarly && j + 1 < Plan::kRuns) taken.load_codes(j + 1);
    const RunScales scales[2] = {scales_of(taken, 0, j),
                                 scales_of(taken, 1, j)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr int kAhead = adds ? 1 : 0;
      const int block = 2 * j + half;
      Fragments& f = fragments[half];
      if (block > 0) decode_words(f, taken, scales, j, half);
      multiply(f, query + 4 * block * kStepOperand, 4,
               ROPE_SIZE != 0 || block > 0);
      const bool has_next = block + 1 < kOutputs;
      if (adds && has_next) add_block(acc, operands, block + 1);
      // Wait for all but the latest products. The registers of the batch before
      // are then free. The place of this block's values is free when all warps
      // are here.
      if (has_next)
        wgmma_wait<1 + kAhead>();
      else
        wgmma_wait<1>();
      if constexpr (adds) own.sync_group();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_matrices(values + block * kValueBytes + (chunk ^ (32 * i)),
                       f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3]);
      }
    }
  }
  wgmma_wait<0>();
  hold(scores);
  if constexpr (adds) acc.hold_outputs();
}

}  // namespace turbo
