// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Joins the parts of passes that several ranges have parts of, to outputs.
#pragma once

#include "extend_mma/ranges.cuh"
#include "extend_wgmma/output_params.cuh"
#include "merge/weighted_sum.cuh"

namespace turbo {

constexpr int kJoinWarps = 8;
// Rows that a lane joins at a time, and turns of a block if there are many
// passes.
constexpr int kJoinedRows = 2;
constexpr int kJoinTurns = 2;
// Rows that a block joins at a time.
constexpr int kJoinBlockRows = kJoinWarps * kSideBySide * kJoinedRows;
// Parts of a row that are loaded at a time. If there are many passes, each has
// two.
constexpr int kPartsInFlight = 2;

// A row's partial results: that of range first_range, in which the pass begins,
// and those of the ranges after it.
template <int kRows>
struct RowParts {
  int row;  // of the pass
  int first_range, count;

  __device__ __forceinline__ int64_t place(int i) const {
    return int64_t(2 * (first_range + i) + (i == 0)) * kRows + row;
  }
};

// The next parts of a row, in the lanes of a warp or of half a warp.
struct PartsInFlight {
  float lse[kPartsInFlight];
  float4 numbers[kPartsInFlight][kChunks];

  template <int kRows>
  __device__ __forceinline__ void load(const OutputParams& p,
                                       const RowParts<kRows>& parts, int first,
                                       int lane) {
    const float* partial = p.partial + lane % kLanes * kVector;
#pragma unroll
    for (int u = 0; u < kPartsInFlight; ++u) {
      const bool is_there = first + u < parts.count;
      const int64_t place = parts.place(first + u);
      lse[u] = is_there ? __ldcg(p.partial_lse + place) : -INFINITY;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const float* own = partial + place * HEAD_SIZE + 128 * j;
        numbers[u][j] = load_if(is_there, own);
      }
    }
  }

  __device__ __forceinline__ void add_to(WeightedSum& row) const {
#pragma unroll
    for (int u = 0; u < kPartsInFlight; ++u) {
      // A part without tokens may have NaN.
      if (lse[u] != -INFINITY) row.add(lse[u], numbers[u]);
    }
  }
};

// Join partial results of rows, rotate them back, and write them.
//
// parts: the parts of a lane's rows, equally many per row.
// queries: the rows' queries in the sequence; -1 for none.
template <typename T, int kRows>
__device__ __forceinline__ void join_rows(
    const OutputParams& p, const Signs& signs,
    const RowParts<kRows> (&parts)[kJoinedRows], int first_token,
    const int (&queries)[kJoinedRows], int lane) {
  PartsInFlight loaded[kJoinedRows];
#pragma unroll
  for (int k = 0; k < kJoinedRows; ++k) loaded[k].load(p, parts[k], 0, lane);
#pragma unroll
  for (int k = 0; k < kJoinedRows; ++k) {
    const int query = max(queries[k], 0);
    WeightedSum row;
    if (p.sinks.logits != nullptr)
      row.begin_with(p.sinks.load(query % (p.num_kv_heads * p.heads_per_kv)));
    loaded[k].add_to(row);
#pragma unroll 1
    for (int first = kPartsInFlight; first < parts[k].count;
         first += kPartsInFlight) {
      loaded[k].load(p, parts[k], first, lane);
      loaded[k].add_to(row);
    }
    const float factor = row.total != 0.0f ? INVERSE_SQRT / row.total : 0.0f;
    Coordinates sum;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const float4& x = row.value[j];
      sum[j][0] = x.x * factor, sum[j][1] = x.y * factor;
      sum[j][2] = x.z * factor, sum[j][3] = x.w * factor;
    }
    hadamard(sum, lane);
    T* output = static_cast<T*>(p.output) + p.output_place(first_token, query) +
                lane % kLanes * kVector;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      float x[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] = signs.apply(sum[j][i], j, i);
      if (queries[k] >= 0) store_vector(output + 128 * j, x);
    }
  }
}

// Blocks (i, ...) join the pass that begins in range i and goes on in range
// i + 1, if there is such a pass.
template <typename Plan>
__global__ void __launch_bounds__(32 * kJoinWarps)
    join_kernel(const __grid_constant__ OutputParams p) {
  using Cut = typename Plan::Cut;
  constexpr int kRows = Plan::kRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Signs signs(lane);
  const Ranges ranges = Cut::ranges(p, lane);
  wait_for_previous_kernel();
  start_next_kernel();
  const int range = blockIdx.x, step = (range + 1) * ranges.size;
  if (ranges.whole || range + 1 >= ranges.count) return;
  const PassPlace pass = Cut::place_of(p, step);
  if (pass.first == step || pass.first / ranges.size != range) return;
  const int count = (pass.last - 1) / ranges.size - range + 1;
  const int kv_head = pass.pass / pass.head_passes;
  const int first_column = pass.pass % pass.head_passes * kRows;
  const int num_columns = p.num_query_tokens(pass.seq) * p.heads_per_kv;
  const int num_rows = min(num_columns - first_column, kRows);
  const int first_token = p.first_token(pass.seq);
  constexpr int kWarpRows = kSideBySide * kJoinedRows;
#pragma unroll 1
  for (int first = int(blockIdx.y) * kJoinBlockRows + warp * kWarpRows;
       first < num_rows; first += int(gridDim.y) * kJoinBlockRows) {
    RowParts<kRows> parts[kJoinedRows];
    int queries[kJoinedRows];
#pragma unroll
    for (int k = 0; k < kJoinedRows; ++k) {
      const int row = first + kSideBySide * k + lane / kLanes;
      const int column = first_column + row;
      parts[k] = {min(row, num_rows - 1), range, count};
      const int query = p.query_of(column / p.heads_per_kv, kv_head, column);
      queries[k] = row < num_rows ? query : -1;
    }
    if (p.is_bf16) {
      join_rows<__nv_bfloat16>(p, signs, parts, first_token, queries, lane);
    } else {
      join_rows<__half>(p, signs, parts, first_token, queries, lane);
    }
  }
}

}  // namespace turbo
