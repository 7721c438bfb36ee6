// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Tiles of a team: their copies, and a warp's slice of one in registers.
#pragma once

#include "latent/slices_layout.cuh"

namespace turbo {

// A team's copies of its tiles, kTiles at once.
template <typename Plan>
struct SliceQueue {
  const LatentParams& p;
  uint32_t tiles, barriers;  // shared addresses
  int issue_stage = 0, stage = 0, phase = 0;
  // State of the segment.
  const int* table = nullptr;
  int next_tile = 0, last_tile = 0;
  // The next tile's block of the sequence, and its place in the block.
  int place = 0, in_block = 0;
  // The blocks in the cache of 32 places from first_place on, one per lane. A
  // load for each tile would make the warp wait for it, because its result is
  // uniform.
  int blocks = 0, first_place = 0;

  __device__ __forceinline__ bool is_issuing(const SlicePlace& own) const {
    return !Plan::kBulk || own.warp == own.team % kTeamWarps;
  }
  __device__ __forceinline__ void load_blocks(int first, int lane) {
    first_place = first;
    if ((first + lane) * p.tiles_per_block < last_tile)
      blocks = table[first + lane];
  }
  __device__ __forceinline__ int block_at(int at, int lane) {
    if (at - first_place >= 32) load_blocks(at, lane);
    return __shfl_sync(~0u, blocks, at - first_place);
  }
  __device__ __forceinline__ void begin(const LatentSegment& s,
                                        const SlicePlace& own) {
    table = p.block_table + int64_t(s.seq) * p.stride_block_table;
    next_tile =
        s.first_step * (kStepTokens / TILE_TOKENS) + own.team * Plan::kTiles;
    last_tile = min(s.last_step * (kStepTokens / TILE_TOKENS),
                    (s.num_tokens + TILE_TOKENS - 1) / TILE_TOKENS);
    place = next_tile / p.tiles_per_block;
    in_block = next_tile % p.tiles_per_block;
    load_blocks(place, own.lane);
  }
  // Copy the next tiles, if there are any, to a stage that all have read.
  __device__ __forceinline__ void issue(const SlicePlace& own) {
    if (next_tile < last_tile) {
      const uint32_t barrier = barriers + issue_stage * 8;
      const int count = min(last_tile - next_tile, Plan::kTiles);
      if (Plan::kBulk && own.lane == 0)
        expect_bytes(barrier, count * TILE_BYTES);
#pragma unroll
      for (int i = 0; i < Plan::kTiles; ++i) {
        if (i >= count) break;
        int at = in_block + i, in_seq = place;
        if (i > 0) in_seq += at / p.tiles_per_block, at %= p.tiles_per_block;
        copy(tiles + (issue_stage * Plan::kTiles + i) * kTileSpace,
             p.kv_cache +
                 int64_t(block_at(in_seq, own.lane)) * p.stride_cache_block +
                 at * TILE_BYTES,
             barrier, own);
      }
      issue_stage = issue_stage + 1 == Plan::kStages ? 0 : issue_stage + 1;
      next_tile += Plan::kTeams * Plan::kTiles;
      in_block += Plan::kTeams * Plan::kTiles;
      while (in_block >= p.tiles_per_block) {
        in_block -= p.tiles_per_block;
        ++place;
      }
    }
    if constexpr (!Plan::kBulk) commit_copies();
  }
  // Copy a tile to its places in shared memory, which are those of copy_tile.
  __device__ __forceinline__ void copy(uint32_t target, const uint8_t* source,
                                       uint32_t barrier,
                                       const SlicePlace& own) {
    if constexpr (Plan::kBulk) {
      if (own.lane != 0) return;
      copy_bulk(target, source, kHalfBytes, barrier);
      copy_bulk(target + kSecondHalf, source + kHalfBytes,
                TILE_BYTES - kHalfBytes, barrier);
    } else {
      constexpr int kRound = 16 * kTeamThreads;
      const int first = 16 * (32 * own.warp + own.lane);
#pragma unroll
      for (int round = 0; round < TILE_BYTES; round += kRound) {
        if (round + kRound > TILE_BYTES && first >= TILE_BYTES - round) break;
        // This is known at compile time if rounds end where halves do.
        const bool is_half = kHalfBytes % kRound == 0
                                 ? round < kHalfBytes
                                 : round + first < kHalfBytes;
        const int moved = is_half ? 0 : kSecondHalf - kHalfBytes;
        copy_async(target + first + moved + round, source + first + round);
      }
    }
  }
  // Wait for the next tiles. If copies are no bulk copies, all threads have
  // waited for them before the team's last barrier.
  __device__ __forceinline__ void wait() const {
    if constexpr (Plan::kBulk) wait_barrier(barriers + stage * 8, phase);
  }
  __device__ __forceinline__ void advance() {
    if (++stage == Plan::kStages) stage = 0, phase ^= 1;
  }
};

// The words that a lane decodes of a tile, for token token_of_row(g) and the
// token four later.
struct SliceTile {
  uint32_t codes[2][kOwnWords], scales[2], ropes[2], rope_scales[2];

  // Tokens from num_tokens on, which are missing, decode to zeros.
  __device__ __forceinline__ void load(const uint8_t* tile, int num_tokens,
                                       const SlicePlace& own) {
    const int g = own.lane / 4, t = own.lane % 4;
    const int first = own.warp * kOwnWords, run = first / kRunWords;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = token_of_row(g) + 4 * r;
      const uint8_t* words = tile + (n / 8) * kSecondHalf + n % 8 * kRowBytes +
                             64 * run + 16 * t + 4 * (first % kRunWords);
      load_words(codes[r], words);
      scales[r] = *reinterpret_cast<const uint32_t*>(
          tile + kLatentScales + n * (LATENT_RANK / 32) + 4 * run);
      if constexpr (kOwnRopes != 0) {
        ropes[r] = *reinterpret_cast<const uint32_t*>(
            tile + kRopes + n * ROPE_SIZE + 16 * t + 4 * own.warp);
        rope_scales[r] = tile[kRopeScales + n * (ROPE_SIZE / 16) + t];
      }
    }
    if (num_tokens < TILE_TOKENS) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (token_of_row(g) + 4 * r < num_tokens) continue;
        scales[r] = 0, rope_scales[r] = 0;
      }
    }
  }

  // The operand of the rope's step.
  __device__ __forceinline__ void decode_own_rope(uint32_t (&f)[4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t x[2];
      decode_rope(x, ropes[r],
                  as_half2(rope_scales[r] * (0x00010001u << SCALE_SHIFT)));
      f[r] = x[0], f[2 + r] = x[1];
    }
  }

  // Operands of the two steps of a word.
  __device__ __forceinline__ void decode_own_word(
      uint32_t (&f)[kOwnSteps][4], const RunScales (&own_scales)[2], int word,
      int warp) const {
    const bool is_second = kOwnWords == 4 ? word / 2 : warp % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const __half2 a = is_second ? __high2half2(own_scales[r].a)
                                  : __low2half2(own_scales[r].a);
      const __half2 b = is_second ? __high2half2(own_scales[r].b)
                                  : __low2half2(own_scales[r].b);
      uint32_t x[4];
      decode_word(x, codes[r][word], a, b);
      f[2 * word][r] = x[0], f[2 * word][2 + r] = x[1];
      f[2 * word + 1][r] = x[2], f[2 * word + 1][2 + r] = x[3];
    }
  }
};

}  // namespace turbo
