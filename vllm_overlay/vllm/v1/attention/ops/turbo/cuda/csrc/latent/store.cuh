// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Store: rotates latents, quantises them and rotary keys, and writes them to
// pages. A launch has blocks for both.
#pragma once

#include "common/divisor.cuh"
#include "common/warp.cuh"
#include "latent/rope.cuh"
#include "latent/rotate.cuh"
#include "store/quantize.cuh"

namespace turbo {

struct LatentStoreParams {
  const uint16_t* kv_c = nullptr;         // [T, LATENT_RANK]
  const uint16_t* k_pe = nullptr;         // [T, ROPE_SIZE], or null
  uint8_t* kv_cache = nullptr;            // [num_blocks, N, C]
  const int64_t* slot_mapping = nullptr;  // [T], below 2**31
  const uint4* tables = nullptr;          // SideTables<true>
  const float* mean = nullptr;            // [LATENT_RANK], or null: none
  int64_t stride_kv_c_token = 0;
  int64_t stride_k_pe_token = 0;
  int64_t stride_cache_block = 0;
  Divisor by_block;
  int num_tokens = 0;
  int latent_blocks = 0;  // the first of the grid

  explicit LatentStoreParams(int block_size) : by_block(block_size) {}
};

// The division of latents among threads. With kParts = 1 a lane has a group,
// for many tokens. With 4 a latent has kSingleWarps warps, for few tokens.
template <int kParts>
struct LatentShare {
  static_assert(kParts == 1 || kParts == kSingleParts);
  static constexpr bool kIsMany = kParts == 1;
  using Input = std::conditional_t<kIsMany, GroupInput, PartsInput>;
  static constexpr int kElements = SCALE_GROUP / kParts;
  static constexpr int kThreads = NUM_GROUPS * kParts;       // of a latent
  static constexpr int kLatents = kStoreThreads / kThreads;  // of a block
};
constexpr int kBlockRopes = kStoreThreads / 32 * kWarpRopes;

// The place of a token's bytes: a tile, or null, and the token's index in it.
// There is no tail.
struct LatentPlace {
  static constexpr uint8_t* tag = nullptr;
  uint8_t* tile = nullptr;
  int token = 0;

  __device__ __forceinline__ LatentPlace(const LatentStoreParams& p, int slot) {
    if (slot < 0) return;
    int position;
    const int block = p.by_block.divide(slot, position);
    token = position % TILE_TOKENS;
    tile = p.kv_cache + block * p.stride_cache_block +
           position / TILE_TOKENS * TILE_BYTES;
  }
};

// The slot of a row, or -1.
__device__ __forceinline__ int slot_of(const LatentStoreParams& p, int row) {
  return row < p.num_tokens ? static_cast<int>(p.slot_mapping[row]) : -1;
}

template <bool kIsBf16>
__device__ __forceinline__ void store_ropes(const LatentStoreParams& p,
                                            int block) {
  const int row = block * kBlockRopes + int(threadIdx.x) / kRopeLanes;
  start_next_kernel();
  const LatentPlace place(p, slot_of(p, row));
  const uint16_t* k_pe = p.k_pe + row * p.stride_k_pe_token;
  store_rope<kIsBf16>(place.tile == nullptr ? nullptr : k_pe, place.tile,
                      place.token);
}

// Load tables, with one row per thread of the first warp.
__device__ __forceinline__ void load_tables(const LatentStoreParams& p,
                                            SideTables<true>& tables) {
  constexpr int kNumRows = sizeof(tables) / sizeof(uint4);
  static_assert(sizeof(tables) % sizeof(uint4) == 0 && kNumRows <= 32);
  if (threadIdx.x < kNumRows) {
    reinterpret_cast<uint4*>(&tables)[threadIdx.x] =
        __ldg(p.tables + threadIdx.x);
  }
  __syncthreads();
}

template <bool kIsBf16, int kParts>
__device__ __forceinline__ void store_latents(const LatentStoreParams& p,
                                              SideTables<true>& tables) {
  using Share = LatentShare<kParts>;
  typename Share::Input input;
  const int row =
      int(blockIdx.x) * Share::kLatents + int(threadIdx.x) / Share::kThreads;
  // Loads take long, so all are issued before the barrier.
  const int slot = slot_of(p, row);
  input.load(p.kv_c + min(row, p.num_tokens - 1) * p.stride_kv_c_token);
  LaneMean<typename Share::Input> mean;
  if (p.mean != nullptr) mean.load(p.mean);
  load_tables(p, tables);
  // The warps of a latent end together.
  if (!__any_sync(~0u, slot >= 0)) return;
  if (p.mean != nullptr) mean.template take_off<kIsBf16>(input);
  float y[1][Share::kElements];
  int exponent;
  input.template rotate<kIsBf16>(y, exponent);
  start_next_kernel();
  encode_vector<true, kParts>(y, exponent, tables, LatentPlace(p, slot));
}

template <bool kIsBf16, int kParts>
__global__ void __launch_bounds__(kStoreThreads)
    latent_store_kernel(const __grid_constant__ LatentStoreParams p) {
  __shared__ __align__(16) SideTables<true> tables;
  // See store_kernel.
  wait_for_previous_kernel();
  const int rope_block = int(blockIdx.x) - p.latent_blocks;
  if (kHasRope && rope_block >= 0) {
    store_ropes<kIsBf16>(p, rope_block);
  } else {
    store_latents<kIsBf16, kParts>(p, tables);
  }
}

}  // namespace turbo
