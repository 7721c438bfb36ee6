// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A step's scores: its tiles come, are decoded, multiplied and stored.
#pragma once

#include "common/wgmma.cuh"
#include "latent/layout.cuh"

namespace turbo {

// A warp's copies of its tiles, every other step's.
template <int kStages>
struct TileQueue {
  const LatentParams& p;
  uint32_t tiles, barriers;  // shared addresses
  int warp;                  // of the warpgroup
  int issued = 0, taken = 0;
  // Of the segment.
  const int* table = nullptr;
  int next_tile = 0, last_tile = 0;
  // Of the next tile: which block of the sequence, and where in it.
  int place = 0, in_block = 0;
  int block = 0;  // that block, which is asked for early

  __device__ __forceinline__ void ask() {
    if (next_tile < last_tile) block = table[place];
  }
  __device__ __forceinline__ void begin(const LatentSegment& s, int pair) {
    table = p.block_table + int64_t(s.seq) * p.stride_block_table;
    next_tile = (s.first_step + pair) * 4 + warp;
    last_tile =
        min(s.last_step * 4, (s.num_tokens + TILE_TOKENS - 1) / TILE_TOKENS);
    place = next_tile / p.tiles_per_block;
    in_block = next_tile % p.tiles_per_block;
    ask();
  }
  // Copy the next tile, if there is one, to where both have read one.
  //
  // loaded: any bits of what all lanes have loaded of that: copies must not
  // overtake loads, which the tensor core's own can hold up.
  __device__ __forceinline__ void issue(int lane, uint32_t loaded) {
    if (next_tile >= last_tile) return;
    const int stage = issued % kStages;
    // Zero, which the compiler does not know.
    const int nothing = uniform(int(loaded & uint32_t(p.num_splits >> 31)));
    const uint8_t* source =
        p.kv_cache + int64_t(uniform(block) + nothing) * p.stride_cache_block +
        in_block * TILE_BYTES;
    if (lane == 0)
      copy_tile(tiles + stage * kTileSpace, source, barriers + stage * 8);
    ++issued;
    next_tile += 4 * kGroups;
    in_block += 4 * kGroups;
    while (in_block >= p.tiles_per_block) {
      in_block -= p.tiles_per_block;
      ++place;
    }
    ask();
  }
};

// Wait for the next tile, of a step that is not past the segment, and load it,
// or what is decoded first.
template <typename Plan>
__device__ __forceinline__ void take_tile(LatentShared<Plan>& shared,
                                          LaneTile& taken,
                                          TileQueue<Plan::kStages>& queue,
                                          const LatentSegment& segment,
                                          int step, int group, int warp) {
  const int lane = threadIdx.x % 32;
  const int first_token = step * kStepTokens + warp * TILE_TOKENS;
  const int place = queue.taken % Plan::kStages;
  uint8_t* tile = shared.tiles[4 * group + warp][place];
  if (first_token < segment.num_tokens) {
    wait_barrier(queue.barriers + place * 8, queue.taken / Plan::kStages & 1);
    ++queue.taken;
  }
  if (first_token + TILE_TOKENS > segment.num_tokens)
    clear_missing(tile, segment.num_tokens - first_token, lane);
  taken.load<Plan::kEarly>(tile, lane);
}

// Multiply a tile by the queries while it is decoded, and store its values.
//
// fragments: of its first batches.
template <typename Plan>
__device__ __forceinline__ void multiply_tile(LatentShared<Plan>& shared,
                                              float (&scores)[Plan::kScores],
                                              Fragments (&fragments)[2],
                                              LaneTile& taken, int group,
                                              int warp) {
  const int lane = threadIdx.x % 32;
  constexpr int kColumns = Plan::kColumns;
  const uint32_t query =
      wgmma_operand(shared_address(shared.query), 16 * kColumns);
  // Of four steps from the first.
  const auto multiply = [&](const Fragments& f, int first, bool adds) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma_registers(scores, f[4 * i], f[4 * i + 1], f[4 * i + 2],
                      f[4 * i + 3],
                      wgmma_descriptor(query + (first + i) * (2 * kColumns),
                                       wgmma_layout<0>(128)),
                      adds || i > 0);
    }
    wgmma_commit();
  };
  if constexpr (ROPE_SIZE != 0) multiply(fragments[1], kLatentSteps, false);

  // A step's operand as it is: its four 8x8 matrices are rows of tokens, of 16
  // bytes, of which lane l has the address of row l % 8 of matrix l / 8.
  const uint32_t values = shared_address(shared.values[group]) +
                          (16 * warp + 8 * (lane / 8 % 2) + lane % 8) * 128;
  const uint32_t chunk = ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    if (!Plan::kEarly && j + 1 < kRuns) taken.load_codes(j + 1);
    const RunScales scales[2] = {scales_of(taken, 0, j),
                                 scales_of(taken, 1, j)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Fragments& f = fragments[half];
      if (j + half > 0) decode_words(f, taken, scales, j, half);
      const int first = 8 * j + 4 * half;
      multiply(f, first, ROPE_SIZE != 0 || first > 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_matrices(
            values + (2 * j + half) * kValueBytes + (chunk ^ (32 * i)),
            f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3]);
      }
      wgmma_wait<1>();
    }
  }
  wgmma_wait<0>();
  hold(scores);
}

}  // namespace turbo
