// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention of a row to the sequence's raw tokens, which are not quantised.
#pragma once

#include "merge/params.cuh"
#include "merge/weighted_sum.cuh"

namespace turbo {

// A query: its head, its token in the batch, and the token's place in the
// sequence's.
struct Row {
  int64_t token;
  int head, place;
  int query_len;  // of the sequence

  __device__ __forceinline__ Row(const MergeParams& p, int seq, int index)
      : place(unsigned(index) / unsigned(p.num_heads)), query_len(p.query_len) {
    head = index - place * p.num_heads;
    int first = seq * p.query_len;
    if (p.query_start_loc != nullptr) {
      first = p.query_start_loc[seq];
      query_len = p.query_start_loc[seq + 1] - first;
    }
    token = int64_t(first) + place;
  }
};

// Attention of a row to the raw tokens, up to its own.
struct RawSum : WeightedSum {
  // The number of tokens that a row sees. Padding sees none, and may be NaN.
  static __device__ __forceinline__ int places_of(const MergeParams& p, int seq,
                                                  const Row& row) {
    const int missing = max(row.query_len - p.seq_lens[seq], 0);
    return min(row.place + 1 - missing, p.sliding_window);
  }

  // Add the result of attention to the tokens, which is given.
  template <typename T>
  __device__ __forceinline__ void take_result(const MergeParams& p, int seq,
                                              const Row& row, int lane) {
    if (places_of(p, seq, row) <= 0) return;
    const float lse =
        LOG2_E * p.raw_lse[row.head * p.stride_raw_lse + row.token];
    const T* output = static_cast<const T*>(p.raw_output) +
                      row.token * p.raw_strides.token +
                      row.head * p.raw_strides.head + lane % kLanes * kVector;
    float4 v[kChunks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) v[j] = load_vector(output + 128 * j);
    add(lse, v);
  }

  template <typename T>
  __device__ __forceinline__ void attend(const MergeParams& p, int seq,
                                         const Row& row, int lane) {
    const int places = places_of(p, seq, row);
    const int64_t kv_head = unsigned(row.head) / unsigned(p.heads_per_kv);
    const int first = lane % kLanes * kVector;
    const T* query = static_cast<const T*>(p.query) +
                     row.token * p.query_strides.token +
                     row.head * p.query_strides.head + first;
    const T* key =
        static_cast<const T*>(p.key) + kv_head * p.key_strides.head + first;
    const T* value =
        static_cast<const T*>(p.value) + kv_head * p.value_strides.head + first;
    float4 q[kChunks], v[kChunks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) q[j] = load_vector(query + 128 * j);
#pragma unroll 1
    for (int i = places - 1; i >= 0; --i) {
      const int64_t token = row.token - i;
      float score = 0.0f;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const float4 k =
            load_vector(key + token * p.key_strides.token + 128 * j);
        v[j] = load_vector(value + token * p.value_strides.token + 128 * j);
        score += q[j].x * k.x + q[j].y * k.y + (q[j].z * k.z + q[j].w * k.w);
      }
      add(p.score_of(warp_sum<kLanes>(score)), v);
    }
  }
};

}  // namespace turbo
