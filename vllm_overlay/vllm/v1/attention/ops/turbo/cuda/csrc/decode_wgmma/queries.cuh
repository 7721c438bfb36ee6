// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Queries as an operand of the tensor core.
#pragma once

#include "decode_wgmma/layout.cuh"

namespace turbo {

// Write the queries of a segment's columns to shared memory, with the tokens
// that they see, and their factors. Columns without a query are zero.
template <typename Plan>
__device__ __noinline__ void load_queries(ColumnsShared<Plan>& shared,
                                          const AttentionParams& p,
                                          const ColumnsSegment& segment) {
  constexpr int kColumns = Plan::kColumns, kPairs = HEAD_SIZE / 2;
  const int64_t first_query = p.first_query(segment.seq);
  const int query_len = p.num_query_tokens(segment.seq);
  if (const int i = threadIdx.x; i < kColumns) {
    const int column = segment.first_column + i;
    const int token = column / p.heads_per_kv;
    const bool inside = token < query_len;
    const int row = p.query_of(token, segment.kv_head, column);
    shared.rows[i] = inside ? row : -1;
    shared.firsts[i] = inside ? p.first_seen(segment.seq, token) : 0;
    const int hidden = inside && !p.with_raw ? query_len - 1 - token : 0;
    shared.limits[i] = segment.num_tokens - hidden;
    const float factor = inside ? p.query_scale[first_query + row] : 0.0f;
#pragma unroll
    for (int set = 0; set < Plan::kSets; ++set) {
      float* own =
          reinterpret_cast<float*>(&shared.scaling[set][i / 2]) + i % 2;
      own[0] = factor;
      own[2] = kNoReference;
      if constexpr (KEY_OFFSET != 0) shared.missing[set][i] = 0.0f;
    }
  }
  __syncthreads();
  const __half* queries = p.query + first_query * HEAD_SIZE;
#pragma unroll 4
  for (int i = threadIdx.x; i < kColumns * kPairs; i += Plan::kThreads) {
    const int column = i / kPairs, coordinate = i % kPairs * 2;
    const int row = shared.rows[column];
    __half2 x = __float2half2_rn(0.0f);
    if (row >= 0) {
      x = *reinterpret_cast<const __half2*>(queries + int64_t(row) * HEAD_SIZE +
                                            coordinate);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const DepthPlace at = place_of(coordinate + k);
      shared.query[at.step][at.place / 8][column][at.place % 8] =
          k == 0 ? x.x : x.y;
    }
  }
}

}  // namespace turbo
