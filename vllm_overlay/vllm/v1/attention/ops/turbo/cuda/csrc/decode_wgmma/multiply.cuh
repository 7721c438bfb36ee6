// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A step's products: its tiles are copied, decoded and multiplied.
#pragma once

#include "decode_wgmma/layout.cuh"

namespace turbo {

// A warpgroup's copies of its steps. Lanes 0 to 3 of one of its warps copy a
// tile of a step each. Each warpgroup has another warp for it.
template <typename Plan>
struct StepQueue {
  const AttentionParams& p;
  uint32_t tiles, barriers;  // shared addresses
  int issued = 0;            // the next copy's stage
  int taken = 0;             // twice the stage, plus the barrier's phase
  // State of the segment.
  const uint8_t* cache = nullptr;
  const int* table = nullptr;
  int next_tile = 0, first_tile = 0, last_tile = 0;  // the lane's
  int num_left = 0;                                  // steps
  // The next tile's block of the sequence, and its place in the block.
  int place = 0, in_block = 0;
  int block = 0;  // that block in the cache, loaded early

  __device__ __forceinline__ static bool copies(const Place& own) {
    return own.warp == own.set % 4;
  }
  __device__ __forceinline__ bool has_tile() const {
    return num_left > 0 && next_tile < last_tile &&
           (KEY_OFFSET == 0 || next_tile >= first_tile);
  }
  __device__ __forceinline__ void ask() {
    if (has_tile()) block = table[place];
  }
  __device__ __forceinline__ void begin(const ColumnsSegment& s,
                                        const Place& own) {
    if (!copies(own) || own.lane >= kStepTiles) return;
    cache = p.kv_cache + s.kv_head * p.stride_cache_head;
    table = p.block_table + int64_t(s.seq) * p.stride_block_table;
    const int first_step = s.first_step + own.set;
    num_left = (s.last_step - first_step + Plan::kSets - 1) / Plan::kSets;
    next_tile = s.first_tile + first_step * kStepTiles + own.lane;
    // Segments begin at the first seen tile. With KEY_OFFSET they may begin
    // earlier, so that a step has one offset of K.
    first_tile = s.first_seen_tile;
    last_tile = (s.num_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    place = next_tile / p.tiles_per_block;
    in_block = next_tile % p.tiles_per_block;
    ask();
  }
  // Copy the next step to a stage that all warps have read.
  __device__ __forceinline__ void issue(const Place& own) {
    if (!copies(own) || own.lane >= kStepTiles || num_left <= 0) return;
    const uint32_t barrier = barriers + issued * 8;
    if (has_tile()) {
      copy_tile(tiles + (issued * kStepTiles + own.lane) * kTileSpace,
                cache + block * p.stride_cache_block + in_block * TILE_BYTES,
                barrier);
    } else {
      expect_bytes(barrier, 0);
    }
    issued = issued + 1 == Plan::kStages ? 0 : issued + 1;
    --num_left;
    next_tile += kStepTiles * Plan::kSets;
    in_block += kStepTiles * Plan::kSets;
    while (in_block >= p.tiles_per_block) {
      in_block -= p.tiles_per_block;
      ++place;
    }
    ask();
  }
  // Wait for the next step, and return its offset in bytes.
  __device__ __forceinline__ int take() {
    const int stage = taken >> 1;
    wait_barrier(barriers + stage * 8, taken & 1);
    const bool is_last = stage + 1 == Plan::kStages;
    taken = is_last ? ~taken & 1 : taken + 2;
    return stage * kStepTiles * kTileSpace;
  }
};

// The words and scales that a lane decodes of a tile's keys, in rows g and
// g + 8.
struct LaneKeys {
  KeyWords words[2];
  KeyScales scales[2];

  __device__ __forceinline__ void load(const uint8_t* tile, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = token_of_row(lane / 4) ^ 8 * r;
      load_key_units(words[r], tile, n, lane % 4);
      scales[r] = KeyScales(tile + kGap + KEY_SCALES_OFFSET + n * SCALE_BYTES,
                            lane % 4);
    }
  }
};

// Scores of a warpgroup's tokens, without the queries' factors. Score 4 * n + c
// is that of row g and column 8 * n + 2 * t + c. Score 4 * n + 2 + c is that of
// row g + 8.
template <typename Plan>
__device__ __forceinline__ void multiply_keys(ColumnsShared<Plan>& shared,
                                              float (&scores)[Plan::kScores],
                                              const LaneKeys& keys,
                                              const KeyTables& tables) {
  constexpr int kColumns = Plan::kColumns;
  const uint32_t query =
      of_loop(wgmma_operand(shared_address(shared.query), 16 * kColumns));
#pragma unroll
  for (int slot = 0; slot < 2 * kLaneGroups; ++slot) {
    uint32_t x[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t word = keys.words[r][slot % 2][slot / 2];
      table_coordinates(x[r], word, keys.scales[r][slot / 2], tables);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * slot + i;
      wgmma_registers(
          scores, x[0][2 * i], x[1][2 * i], x[0][2 * i + 1], x[1][2 * i + 1],
          wgmma_descriptor(query + step * 2 * kColumns, wgmma_layout<0>(128)),
          step > 0);
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  hold(scores);
  const bool first = keys.scales[0].are_reduced;
  const bool second = keys.scales[1].are_reduced;
  if (__any_sync(~0u, first || second)) {
#pragma unroll
    for (int i = 0; i < Plan::kScores; ++i)
      scores[i] *= (i / 2 % 2 ? second : first) ? KeyScales::kFactor : 1.0f;
  }
}

// Add a step's values, with a group of products per tile.
template <typename Plan>
__device__ __forceinline__ void add_values(ColumnsShared<Plan>& shared,
                                           ColumnsAccumulator<Plan>& acc,
                                           const uint8_t* tiles, int parity,
                                           const ValuePlace& place,
                                           const Place& own) {
  const uint32_t weights = of_loop(
      wgmma_operand(shared_address(shared.weights[own.set][parity]), 128));
#pragma unroll
  for (int k = 0; k < kStepTiles; ++k) {
    uint32_t f[kOutputs][4];
    decode_values(f, tiles + k * kTileSpace, shared.scales[own.set][parity], k,
                  place, own.lane % 4);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) {
      wgmma_by_columns(acc.output[m], f[m][0], f[m][1], f[m][2], f[m][3],
                       wgmma_descriptor(weights + k * 256 / 16,
                                        wgmma_layout<0>(16 * kStepTokens)));
    }
    wgmma_commit();
  }
}

}  // namespace turbo
