// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Queries as rows of the tensor core's results. A lane has numbers of rows
// g = lane / 4 and g + 8 of its warp's 16.
#pragma once

#include "common/offset.cuh"
#include "common/segment.cuh"
#include "extend_mma/decode_tile.cuh"
#include "extend_mma/weigh.cuh"

namespace turbo {

// The query of a row of a segment.
struct RowNote {
  int token;       // the query token, in the sequence
  bool is_inside;  // whether the sequence has the token
  int query;       // in the sequence, or -1
  // The row sees cached tokens from `first` on, except the last `hidden`. A row
  // without a query sees all, and its result is not used.
  int first, hidden;

  // column: the row, among all rows of a KV head.
  // query_len: the sequence's query tokens.
  // known_len: its length, known before the previous kernel ends.
  __device__ __forceinline__ RowNote(const AttentionParams& p,
                                     const Segment& segment, int column,
                                     int query_len, int known_len) {
    token = column / p.heads_per_kv;
    is_inside = token < query_len;
    query = is_inside ? p.query_of(token, segment.kv_head, column) : -1;
    first = is_inside ? p.first_seen(known_len, query_len, token) : 0;
    hidden = is_inside && !p.with_raw ? query_len - 1 - token : 0;
  }
  // Whether the sequence has the token. The query of another may be NaN.
  __device__ __forceinline__ bool exists(int query_len, int known_len) const {
    return is_inside && token >= query_len - known_len;
  }
  __device__ __forceinline__ RowNote(const AttentionParams& p,
                                     const Segment& segment, int column)
      : RowNote(p, segment, column, p.num_query_tokens(segment.seq),
                p.known_lens[segment.seq]) {}
};

// The queries of a lane's two rows, or -1.
struct LaneQueries {
  int of_row[2];
};

// Load the queries of a lane's two rows as A fragments, with coordinates in the
// order of K's.
//
// queries: their places in p_queries.
__device__ __forceinline__ void load_row_queries(
    uint32_t (&fragments)[HEAD_SIZE / 4], const __half* p_queries,
    const LaneQueries& queries, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = queries.of_row[r];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Codes 2 * i and 2 * i + 1 of the lane's units.
      const __half* own = p_queries + int64_t(query) * HEAD_SIZE +
                          2 * i * NUM_UNITS + kLaneUnits * key_place(lane % 4);
#pragma unroll
      for (int j = 0; j < kLaneUnits; j += 2) {
        uint32_t x = 0, y = 0;
        if (query >= 0) {
          x = *reinterpret_cast<const uint32_t*>(own + j);
          y = *reinterpret_cast<const uint32_t*>(own + NUM_UNITS + j);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int chunk = 4 * (j + k) + i;
          fragments[chunk / 2 * 4 + chunk % 2 * 2 + r] =
              __byte_perm(x, y, k == 0 ? 0x5410 : 0x7632);
        }
      }
    }
  }
}

// Write a row's partial result, and return the address of its LSE.
//
// row: the row of p.partial.
// r: the index of the row among the lane's two.
__device__ __forceinline__ float* write_partial(const RowsAccumulator& acc,
                                                const AttentionParams& p,
                                                int64_t row, int r, float total,
                                                int lane) {
  const int t = lane % 4;
  float* lse = p.partial_lse + row;
  if (t == 0) *lse = acc.reference[r] + acc.missing[r] + log2f(total);
  const float factor = 1.0f / total;
  float* output = p.partial + row * HEAD_SIZE;
#pragma unroll
  for (int n = 0; n < HEAD_SIZE / 8; ++n) {
    const float2 x = {acc.output[4 * n + 2 * r] * factor,
                      acc.output[4 * n + 2 * r + 1] * factor};
    *reinterpret_cast<float2*>(output + value_coordinate(8 * n) + 2 * t) = x;
  }
  return lse;
}

// If a segment has a row's last tokens, mark the splits after it as empty.
__device__ __forceinline__ void end_splits(float* lse, const AttentionParams& p,
                                           const Segment& segment) {
  if (!segment.ends) return;
  const int num_queries = p.num_queries();
#pragma unroll 1
  for (int s = segment.split + 1; s < p.num_splits; ++s)
    lse[int64_t(s - segment.split) * num_queries] = -INFINITY;
}

// The place of a sequence's first query among partial results, for a segment.
// The sequence's other queries follow, one row each.
__device__ __forceinline__ int64_t first_partial(const AttentionParams& p,
                                                 const Segment& segment) {
  return (int64_t(segment.seq) * p.num_splits + segment.split) *
         p.num_queries();
}

}  // namespace turbo
