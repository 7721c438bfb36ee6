// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Outputs of passes that several ranges have parts of.
#pragma once

#include "extend/ranges.cuh"
#include "extend_rows/output_params.cuh"
#include "merge/inverse_rotation.cuh"

namespace turbo {

constexpr int kJoinWarps = 8;
// Rows of a warp at a time, and how often, at most.
constexpr int kJoinedRows = 2 * kSideBySide;
constexpr int kJoinTurns = 2;

// A row's partial results: those of range first_range and of the next ones,
// the first of which goes on to them.
template <int kRows>
struct RowParts {
  int row;  // of a block's
  int first_range, count;

  __device__ __forceinline__ int64_t place(int i) const {
    return int64_t(2 * (first_range + i) + (i == 0)) * kRows + row;
  }
};

// A row's sum of partial results, in a warp's lanes, or in those of half of it.
struct JoinedRow {
  Coordinates sum;
  float reference, total;

  __device__ __forceinline__ explicit JoinedRow(float sink)
      : sum{}, reference(sink), total(sink == -INFINITY ? 0.0f : 1.0f) {}
};

// The next parts of a row.
template <int kParts>
struct PartsInFlight {
  float lse[kParts];
  float4 numbers[kParts][kChunks];

  template <int kRows>
  __device__ __forceinline__ void load(const OutputParams& p,
                                       const RowParts<kRows>& parts, int first,
                                       int lane) {
    const float* partial = p.partial + lane % kLanes * kVector;
#pragma unroll
    for (int u = 0; u < kParts; ++u) {
      const bool is_there = first + u < parts.count;
      const int64_t place = parts.place(first + u);
      lse[u] = is_there ? __ldcg(p.partial_lse + place) : -INFINITY;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        numbers[u][j] = {};
        if (is_there) {
          numbers[u][j] = __ldcg(reinterpret_cast<const float4*>(
              partial + place * HEAD_SIZE + 128 * j));
        }
      }
    }
  }

  __device__ __forceinline__ void add_to(JoinedRow& row) const {
    float largest = row.reference;
#pragma unroll
    for (int u = 0; u < kParts; ++u) largest = fmaxf(largest, lse[u]);
    const float reference = largest == -INFINITY ? 0.0f : largest;
    const float rescale = exp2_approx(row.reference - reference);
    row.reference = largest;
    row.total *= rescale;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) row.sum[j][i] *= rescale;
    }
#pragma unroll
    for (int u = 0; u < kParts; ++u) {
      const float weight = exp2_approx(lse[u] - reference);
      row.total += weight;
      // Where a part has no tokens there may be NaN.
      if (weight == 0.0f) continue;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const float4& x = numbers[u][j];
        row.sum[j][0] = fmaf(weight, x.x, row.sum[j][0]);
        row.sum[j][1] = fmaf(weight, x.y, row.sum[j][1]);
        row.sum[j][2] = fmaf(weight, x.z, row.sum[j][2]);
        row.sum[j][3] = fmaf(weight, x.w, row.sum[j][3]);
      }
    }
  }
};

// Join partial results of rows, rotate them back, and write them.
//
// parts: a lane's rows', as many each. queries: these, of the sequence's; -1
//   for none.
template <typename T, int kTogether, int kRows>
__device__ __forceinline__ void join_rows(
    const OutputParams& p, const Signs& signs,
    const RowParts<kRows> (&parts)[kTogether], int seq,
    const int (&queries)[kTogether], int lane) {
  constexpr int kParts = kChunks > 1 ? 2 : 4;
  PartsInFlight<kParts> loaded[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) loaded[k].load(p, parts[k], 0, lane);
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int query = max(queries[k], 0);
    float sink = -INFINITY;
    if (p.sinks.logits != nullptr)
      sink = p.sinks.load(query % (p.num_kv_heads * p.heads_per_kv));
    JoinedRow row(sink);
    loaded[k].add_to(row);
#pragma unroll 1
    for (int first = kParts; first < parts[k].count; first += kParts) {
      loaded[k].load(p, parts[k], first, lane);
      loaded[k].add_to(row);
    }
    const float factor = row.total != 0.0f ? INVERSE_SQRT / row.total : 0.0f;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) row.sum[j][i] *= factor;
    }
    hadamard(row.sum, lane);
    T* output = static_cast<T*>(p.output) + p.output_place(seq, query) +
                lane % kLanes * kVector;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      float x[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] = signs.apply(row.sum[j][i], j, i);
      if (queries[k] >= 0) store_vector(output + 128 * j, x);
    }
  }
}

// Blocks (i, ...) join the pass that range i is the first to have a part of,
// and range i + 1 has one of, too, if there is such a pass.
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
  constexpr int kTogether = kJoinedRows / kSideBySide;
#pragma unroll 1
  for (int first = (int(blockIdx.y) * kJoinWarps + warp) * kJoinedRows;
       first < num_rows; first += int(gridDim.y) * kJoinWarps * kJoinedRows) {
    RowParts<kRows> parts[kTogether];
    int queries[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int row = first + kSideBySide * k + lane / kLanes;
      const int column = first_column + row;
      parts[k] = {min(row, num_rows - 1), range, count};
      const int query = p.query_of(column / p.heads_per_kv, kv_head, column);
      queries[k] = row < num_rows ? query : -1;
    }
    if (p.is_bf16) {
      join_rows<__nv_bfloat16>(p, signs, parts, pass.seq, queries, lane);
    } else {
      join_rows<__half>(p, signs, parts, pass.seq, queries, lane);
    }
  }
}

}  // namespace turbo
