// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What attention that ends in outputs is given: of queries to cached tokens and
// to their own, at once.
#pragma once

#include "common/attention_params.cuh"
#include "common/sinks.cuh"

namespace turbo {

// Query tokens of a tile of their K and V: K's rows and V's columns, rotated.
constexpr int kOwnTileNumbers = 2 * TILE_TOKENS * HEAD_SIZE;

// Partial results are of a block's rows there: of range i 2 * i of the pass
// that it goes on with, and 2 * i + 1 of the one that it does not end. Those
// that it has all of are outputs at once.
//
// Queries are the original ones alone.
struct OutputParams : AttentionParams {
  void* output;  // [T, Hq, D]
  Strides output_strides;
  // [T / 16 + B, H, 2, 16 * D] fp16: sequence i's from first_token / 16 + i on.
  // Or null: query tokens are read from the cache.
  __half* own_tiles;
  const void* own_key;    // [T, H, D], not rotated
  const void* own_value;  // [T, H, D], not rotated
  Strides key_strides, value_strides;
  float query_factor;  // of rotated queries, for base-2 softmax
  Sinks sinks;
  int num_ranges;  // that there is room for

  __device__ __forceinline__ int num_own_tiles(int seq) const {
    if (own_tiles == nullptr || seq >= num_seqs) return 0;
    return (num_query_tokens(seq) + TILE_TOKENS - 1) / TILE_TOKENS;
  }
  __device__ __forceinline__ int max_ranges() const { return num_ranges; }
  __device__ __forceinline__ __half* own_tile(int seq, int kv_head,
                                              int tile) const {
    const int64_t place = first_token(seq) / TILE_TOKENS + seq + tile;
    return own_tiles + (place * num_kv_heads + kv_head) * kOwnTileNumbers;
  }
  // first_token: of the row's sequence.
  __device__ __forceinline__ int64_t output_place(int first_token,
                                                  int row) const {
    const int num_heads = num_kv_heads * heads_per_kv;
    const int token = row / num_heads;
    return (first_token + token) * output_strides.token +
           (row - token * num_heads) * output_strides.head;
  }
};

}  // namespace turbo
