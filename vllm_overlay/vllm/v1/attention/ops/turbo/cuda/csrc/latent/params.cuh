// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The parameters of decode attention to latents.
#pragma once

#include <cstdint>

#include "common/vectors.cuh"
#include "turbo_constants.h"

namespace turbo {

struct LatentParams {
  const void* query;           // [T, Hq, LATENT_RANK], rotated
  const void* query_rope;      // [T, Hq, ROPE_SIZE]
  const uint8_t* kv_cache;     // [num_blocks, N, C]
  const int* block_table;      // [B, max_blocks]
  const int* seq_lens;         // [B]
  const int* query_start_loc;  // [B + 1], or null: T = B * Q
  float* partial;              // [B, S, Q, Hq, LATENT_RANK]
  float* partial_lse;          // [B, S, Q, Hq], base 2
  Strides query_strides, rope_strides;
  int64_t stride_cache_block;
  int stride_block_table;
  int num_seqs;
  int num_heads;
  int tiles_per_block;
  int num_splits;
  int query_len;       // Q, most query tokens of a sequence: its last
  int is_bf16;         // whether the query is bf16, not fp16
  float score_factor;  // of a product, for base-2 softmax

  // The most rows of a sequence: one per query token and head.
  __device__ __forceinline__ int most_rows() const {
    return query_len * num_heads;
  }
  __device__ __forceinline__ int first_token(int seq) const {
    return query_start_loc ? query_start_loc[seq] : seq * query_len;
  }
  __device__ __forceinline__ int num_query_tokens(int seq) const {
    return query_start_loc ? query_start_loc[seq + 1] - query_start_loc[seq]
                           : query_len;
  }
};

}  // namespace turbo
