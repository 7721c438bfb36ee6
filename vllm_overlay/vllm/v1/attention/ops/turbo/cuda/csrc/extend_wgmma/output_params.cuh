// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The parameters of attention that writes outputs: queries attend to cached
// tokens and to raw tokens at once.
#pragma once

#include "common/offset.cuh"
#include "common/sinks.cuh"

namespace turbo {

// Numbers of K and V in a tile of raw tokens: K's rows and V's columns,
// rotated.
constexpr int kRawTileNumbers = 2 * TILE_TOKENS * HEAD_SIZE;

// The row of the offset that is taken off keys of raw tokens: that of the tile
// of the last cached token. So their scores lack what the last cached step's
// scores lack.
//
// num_tokens: the sequence's cached tokens, which may be none.
__device__ __forceinline__ int offset_of_raw(const AttentionParams& p,
                                             int num_tokens) {
  return offset_of_tile(p, max(num_tokens - 1, 0) / TILE_TOKENS);
}

// Partial results have a block's rows per place. Range i has two places. Place
// 2 * i is for the pass that the range continues. Place 2 * i + 1 is for the
// pass that it begins and does not end. A pass that a range has in full becomes
// outputs at once.
//
// Only the original queries are given.
struct OutputParams : AttentionParams {
  void* output;  // [T, Hq, D]
  Strides output_strides;
  // [T / 16 + B, H, 2, 16 * D] fp16. The tiles of sequence i begin at
  // first_token / 16 + i. Null if query tokens are read from the cache.
  __half* raw_tiles;
  const void* own_key;    // [T, H, D], not rotated
  const void* own_value;  // [T, H, D], not rotated
  Strides key_strides, value_strides;
  float query_factor;  // of rotated queries, for base-2 softmax
  Sinks sinks;
  int num_ranges;  // the most that partial results have room for

  __device__ __forceinline__ int num_raw_tiles(int seq) const {
    if (raw_tiles == nullptr || seq >= num_seqs) return 0;
    return (num_query_tokens(seq) + TILE_TOKENS - 1) / TILE_TOKENS;
  }
  __device__ __forceinline__ int max_ranges() const { return num_ranges; }
  __device__ __forceinline__ __half* raw_tile(int seq, int kv_head,
                                              int tile) const {
    const int64_t place = first_token(seq) / TILE_TOKENS + seq + tile;
    return raw_tiles + (place * num_kv_heads + kv_head) * kRawTileNumbers;
  }
  // first_token: that of the row's sequence.
  __device__ __forceinline__ int64_t output_place(int first_token,
                                                  int row) const {
    const int num_heads = num_kv_heads * heads_per_kv;
    const int token = row / num_heads;
    return (first_token + token) * output_strides.token +
           (row - token * num_heads) * output_strides.head;
  }
};

}  // namespace turbo
