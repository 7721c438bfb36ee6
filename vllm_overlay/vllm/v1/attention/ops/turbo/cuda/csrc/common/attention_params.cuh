// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The parameters of decode and extend attention.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/soft_cap.cuh"
#include "common/strides.cuh"
#include "turbo_constants.h"

namespace turbo {

struct AttentionParams {
  const __half* query;         // [T, Hq, D], rotated
  const float* query_scale;    // [T, Hq]
  const uint8_t* kv_cache;     // [num_blocks, H, N, C]
  const int* block_table;      // [B, max_blocks]
  const int* seq_lens;         // [B]
  const int* known_lens;       // [B], known before the previous kernel ends:
                               // seq_lens plus the tail's tokens
  const int* query_start_loc;  // [B + 1], or null: T = B * Q
  float* partial;              // [B, S, Q, Hq, D]
  float* partial_lse;          // [B, S, Q, Hq], base 2
  int64_t stride_cache_block;
  int64_t stride_cache_head;
  int stride_block_table;
  int num_seqs;
  int num_kv_heads;
  int heads_per_kv;  // query heads a KV head
  int tiles_per_block;
  int num_splits;
  int query_len;    // Q, most query tokens of a sequence: its last
  int with_raw;     // whether cached K and V of query tokens are left out
  int most_hidden;  // most cached query tokens that the first one does not see
  // The most tokens that a query token sees, itself the last.
  int sliding_window;
  // Whether the kernel before this one has written seq_lens.
  int lens_are_new;
  // With KEY_OFFSET, and in kernels with OutputParams.
  const void* original_query;  // [T, Hq, D], not rotated
  Strides original_strides;
  int is_bf16;  // whether original_query is bf16, not fp16
  // With KEY_OFFSET: the offset of K, for the scores of cached keys.
  const float* key_offset;  // [G, H, D]
  int num_offsets;          // G
  float offset_factor;      // factor of a score, for base-2 softmax
  SoftCap soft_cap;         // with SOFT_CAP: the cap of scores

  // The most queries of a sequence: one per query token and head.
  __device__ __forceinline__ int num_queries() const {
    return query_len * num_kv_heads * heads_per_kv;
  }
  // The most columns of a KV head: one per query token and query head.
  __device__ __forceinline__ int num_columns() const {
    return query_len * heads_per_kv;
  }
  __device__ __forceinline__ int first_token(int seq) const {
    return query_start_loc ? query_start_loc[seq] : seq * query_len;
  }
  __device__ __forceinline__ int num_query_tokens(int seq) const {
    return query_start_loc ? query_start_loc[seq + 1] - query_start_loc[seq]
                           : query_len;
  }
  // Tiles of raw tokens: query tokens whose K and V are read as computed. See
  // OutputParams.
  __device__ __forceinline__ int num_raw_tiles(int) const { return 0; }
  // The most ranges that all work is cut into.
  __device__ __forceinline__ int max_ranges() const { return gridDim.x; }
  // The query of a sequence's first token and head 0.
  __device__ __forceinline__ int64_t first_query(int seq) const {
    return int64_t(first_token(seq)) * num_kv_heads * heads_per_kv;
  }
  // The index, among a sequence's queries, of a KV head's column. token: the
  // column's query token.
  __device__ __forceinline__ int query_of(int token, int kv_head,
                                          int column) const {
    return (token * num_kv_heads + kv_head - token) * heads_per_kv + column;
  }
  // Cached tokens that a sequence's queries attend to, by given lengths.
  __device__ __forceinline__ int num_tokens(int seq, const int* lens) const {
    return lens[seq] - (with_raw ? num_query_tokens(seq) : 0);
  }
  __device__ __forceinline__ int num_tokens(int seq) const {
    return num_tokens(seq, seq_lens);
  }
  // The first token that a sequence's query token sees; negative for all.
  // known_len includes the tokens of a tail.
  __device__ __forceinline__ int first_seen(int known_len, int query_len,
                                            int token) const {
    return known_len - query_len + token + 1 - sliding_window;
  }
  __device__ __forceinline__ int first_seen(int seq, int token) const {
    return first_seen(known_lens[seq], num_query_tokens(seq), token);
  }
};

// Cached tokens that any of a sequence's queries sees: none if first is last.
struct SeenTokens {
  int first, last;

  __device__ __forceinline__ SeenTokens(const AttentionParams& p, int seq,
                                        const int* lens)
      : first(0), last(0) {
    if (seq >= p.num_seqs) return;
    last = max(p.num_tokens(seq, lens), 0);
    first = min(max(p.first_seen(seq, 0), 0), last);
  }
  __device__ __forceinline__ SeenTokens(const AttentionParams& p, int seq)
      : SeenTokens(p, seq, p.seq_lens) {}
  __device__ __forceinline__ int first_tile() const {
    return first / TILE_TOKENS;
  }
};

// The tiles of seen tokens, from a multiple of kUnit on.
template <int kUnit>
struct SeenTiles {
  int first, count;

  __device__ __forceinline__ explicit SeenTiles(const SeenTokens& tokens)
      : first(tokens.first_tile() / kUnit * kUnit),
        count(tokens.first < tokens.last
                  ? (tokens.last + TILE_TOKENS - 1) / TILE_TOKENS - first
                  : 0) {}
};

}  // namespace turbo
