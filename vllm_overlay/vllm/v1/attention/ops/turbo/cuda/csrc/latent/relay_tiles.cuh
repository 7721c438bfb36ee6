// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A producer's tiles, which its lanes load from pages to registers: of the next
// tile what takes the place of what has been decoded of this one.
#pragma once

#include "latent/relay_layout.cuh"

namespace turbo {

// Where a warp's next tile is.
template <typename Plan>
struct RelayTiles {
  const LatentParams& p;
  const Place<Plan>& own;
  const int* table = nullptr;
  int last_tile = 0;  // of the segment
  const uint8_t* tile = nullptr;
  int block = 0, in_block = 0;  // of the one after

  // Ask for the page of a step's tile. Past the segment it is of any.
  __device__ __forceinline__ void ask(int step) {
    const int index = min(4 * step + own.warp, last_tile - 1);
    const int place = index / p.tiles_per_block;
    in_block = index - place * p.tiles_per_block;
    block = table[place];
  }
  __device__ __forceinline__ void take() {
    tile = p.kv_cache + int64_t(block) * p.stride_cache_block +
           in_block * TILE_BYTES;
  }
  __device__ __forceinline__ void begin(const LatentSegment& s) {
    table = p.block_table + int64_t(s.seq) * p.stride_block_table;
    last_tile =
        min(4 * s.last_step, (s.num_tokens + TILE_TOKENS - 1) / TILE_TOKENS);
    ask(s.first_step + own.group);
    take();
    ask(s.first_step + own.group + Plan::kProducers);
  }
  __device__ __forceinline__ int token(int row) const {
    return token_of_row(own.lane / 4) + 4 * row;
  }
  __device__ __forceinline__ void load_run(LaneTile<Plan>& taken,
                                           int run) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* from =
          tile + token(r) * kRowBytes + own.lane % 4 * 16 + 64 * run;
      taken.codes[r][run] = __ldcg(reinterpret_cast<const uint4*>(from));
    }
  }
  __device__ __forceinline__ void load_ropes(LaneTile<Plan>& taken) const {
    if constexpr (ROPE_SIZE != 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 x = __ldcg(reinterpret_cast<const uint4*>(
            tile + ROPE_OFFSET + token(r) * ROPE_SIZE + own.lane % 4 * 16));
        taken.ropes[r][0] = x.x, taken.ropes[r][1] = x.y;
        taken.ropes[r][2] = x.z, taken.ropes[r][3] = x.w;
        taken.rope_scales[r] =
            __ldcg(tile + ROPE_SCALES_OFFSET +
                   token(r) * (ROPE_SIZE / SCALE_GROUP) + own.lane % 4);
      }
    }
  }
  __device__ __forceinline__ void load_scales(LaneTile<Plan>& taken) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* from =
          tile + LATENT_SCALES_OFFSET + token(r) * (LATENT_RANK / 32);
      if constexpr (Plan::kRuns == 4) {
        const uint4 x = __ldcg(reinterpret_cast<const uint4*>(from));
        taken.scales[r][0] = x.x, taken.scales[r][1] = x.y;
        taken.scales[r][2] = x.z, taken.scales[r][3] = x.w;
      } else {
        const uint2 x = __ldcg(reinterpret_cast<const uint2*>(from));
        taken.scales[r][0] = x.x, taken.scales[r][1] = x.y;
      }
    }
  }
  // Tokens from num_tokens on, which are missing, decode to zeros.
  __device__ __forceinline__ void clear(LaneTile<Plan>& taken,
                                        int num_tokens) const {
    if (num_tokens >= TILE_TOKENS) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (token(r) < num_tokens) continue;
#pragma unroll
      for (int j = 0; j < Plan::kRuns; ++j) taken.scales[r][j] = 0;
      taken.rope_scales[r] = 0;
    }
  }
};

}  // namespace turbo
