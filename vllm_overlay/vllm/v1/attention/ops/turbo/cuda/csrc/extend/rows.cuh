// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Queries as rows of the tensor core's results: a lane has numbers of rows g =
// lane / 4 and g + 8 of its warp's 16.
#pragma once

#include "common/offset.cuh"
#include "common/segment.cuh"
#include "extend/decode_tile.cuh"
#include "extend/weigh.cuh"

namespace turbo {

// What a row is of a segment.
struct RowNote {
  int token;       // of the sequence's query tokens
  bool is_inside;  // whether the sequence has it
  int query;       // of the sequence, or -1
  // The cached tokens that it sees: from the first, and but the last few. A row
  // without a query sees all, of which nothing comes.
  int first, hidden;

  // column: the row, of all of a KV head. query_len, known_len: the sequence's
  // query tokens, and its length as it is known early.
  __device__ __forceinline__ RowNote(const AttentionParams& p,
                                     const Segment& segment, int column,
                                     int query_len, int known_len) {
    token = column / p.heads_per_kv;
    is_inside = token < query_len;
    query = is_inside ? p.query_of(token, segment.kv_head, column) : -1;
    first = is_inside ? p.first_seen(known_len, query_len, token) : 0;
    hidden = is_inside && !p.with_newest ? query_len - 1 - token : 0;
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

// Load a lane's queries, of two rows, as A fragments: coordinates are in the
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

// Go on to tokens with another offset of K.
//
// queries: those that see a token of the segment's; -1 for others, for of a
//   token that the sequence does not have the query may be NaN.
__device__ __forceinline__ void change_offset(RowsAccumulator& acc,
                                              const LaneQueries& queries,
                                              const AttentionParams& p,
                                              const Segment& segment,
                                              int offset, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float score = offset_score(p, segment.seq, segment.kv_head, offset,
                                     queries.of_row[r], lane);
    // A row that has seen no token keeps none, also if its query is NaN.
    if (acc.reference[r] != kNoRowReference)
      acc.reference[r] += acc.missing[r] - score;
    acc.missing[r] = score;
  }
}

// Write a row's partial result.
//
// row: of p.partial. r: which of the lane's. Returns where its LSE is.
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

// Mark the splits of a row behind a segment's as empty, if there are none.
__device__ __forceinline__ void end_splits(float* lse, const AttentionParams& p,
                                           const Segment& segment) {
  if (!segment.ends) return;
  const int num_queries = p.num_queries();
#pragma unroll 1
  for (int s = segment.split + 1; s < p.num_splits; ++s)
    lse[int64_t(s - segment.split) * num_queries] = -INFINITY;
}

// Where a segment's queries are among partial results: the first, and one more
// a query of the sequence.
__device__ __forceinline__ int64_t first_partial(const AttentionParams& p,
                                                 const Segment& segment) {
  return (int64_t(segment.seq) * p.num_splits + segment.split) *
         p.num_queries();
}

}  // namespace turbo
