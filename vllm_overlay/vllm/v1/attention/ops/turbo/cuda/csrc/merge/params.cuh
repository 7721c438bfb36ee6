// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The parameters of the merge.
#pragma once

#include "common/cap_scores.cuh"
#include "common/sinks.cuh"
#include "common/vectors.cuh"
#include "common/tail.cuh"

namespace turbo {

// Warps per block. Long vectors leave registers and shared memory for fewer.
constexpr int kMergeWarps = HEAD_SIZE <= 256 ? 8 : 4;

struct MergeParams {
  const float* partial;        // [B, S, Q, Hq, D], rotated
  const float* partial_lse;    // [B, S, Q, Hq], base 2; -inf: no tokens
  const int* seq_lens;         // [B]
  const int* query_start_loc;  // [B + 1], or null: T = B * Q
  void* output;                // [T, Hq, D]
  // Base-2 LSEs, on a rank that has a part of each sequence; null otherwise.
  // The output is then [B, Q, Hq, D] fp32, in rotated space.
  float* lse;         // [B, Q, Hq]
  const void* query;  // [T, Hq, D], not rotated
  const void* key;    // [T, H, D], of the raw tokens
  const void* value;  // [T, H, D]
  Strides output_strides, query_strides;
  Strides key_strides, value_strides;
  float score_factor;  // factor of a score, for base-2 softmax
  int num_heads;       // Hq
  int heads_per_kv;    // query heads per KV head
  int query_len;       // Q, most query tokens of a sequence
  int num_queries;     // Q * Hq
  int num_splits;
  int row_shift;  // a row has 1 << row_shift warps, up to kMergeWarps
  int with_raw;   // whether there are raw tokens
  // The result of attention to the raw tokens alone. If null, the merge
  // computes it.
  const void* raw_output;  // [T, Hq, D]
  const float* raw_lse;    // [Hq, T], base e
  Strides raw_strides;
  int64_t stride_raw_lse;  // between heads
  int sliding_window;      // most raw tokens that a query token sees
  Sinks sinks;
  // With a tail: its pages, and lengths without the tokens that are
  // read from it.
  TailPages tail;
  const int* packed_lens;   // [B]
  const float* key_offset;  // [G, H, D], of the tail's tokens, or null
  int num_kv_heads;         // H
  int num_offsets;          // G
  SoftCap soft_cap;         // with SOFT_CAP: of scores of raw and tail tokens

  // The score of a query's product with a key.
  __device__ __forceinline__ float score_of(float product) const {
    const float score = score_factor * product;
    if constexpr (SOFT_CAP != 0) return soft_cap(score);
    return score;
  }
};

}  // namespace turbo
