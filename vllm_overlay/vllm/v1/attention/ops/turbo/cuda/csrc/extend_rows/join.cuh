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
// Blocks that share the rows of a pass, at least.
constexpr int kJoinBlocks = 4;

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

// Join a row's partial results, rotate that back, and write it.
//
// query: of the sequence's.
template <typename T, int kRows>
__device__ __forceinline__ void join_row(const OutputParams& p,
                                         const Signs& signs,
                                         const RowParts<kRows>& parts, int seq,
                                         int query, int lane) {
  constexpr int kLoadsInFlight = kChunks > 1 ? 4 : 8;
  float sink = -INFINITY;
  if (p.sinks.logits != nullptr)
    sink = p.sinks.load(query % (p.num_kv_heads * p.heads_per_kv));
  int highest = ordered_bits(__float_as_int(sink));
#pragma unroll 1
  for (int i = lane; i < parts.count; i += 32) {
    const float lse = __ldcg(p.partial_lse + parts.place(i));
    highest = max(highest, ordered_bits(__float_as_int(lse)));
  }
  highest = __reduce_max_sync(~0u, highest);
  float reference = __int_as_float(ordered_bits(highest));
  if (reference == -INFINITY) reference = 0.0f;
  Coordinates sum = {};
  float total = lane < kLanes ? exp2_approx(sink - reference) : 0.0f;
  const float* partial = p.partial + lane % kLanes * kVector;
  // Of vectors side by side each takes turns with parts.
  const int side = lane / kLanes;
#pragma unroll 1
  for (int base = 0; base < parts.count; base += kSideBySide * kLoadsInFlight) {
    float weight[kLoadsInFlight];
    float4 loaded[kLoadsInFlight][kChunks];
#pragma unroll
    for (int u = 0; u < kLoadsInFlight; ++u) {
      const int part = base + kSideBySide * u + side;
      const int i = min(part, parts.count - 1);
      const float lse = __ldcg(p.partial_lse + parts.place(i));
      weight[u] = part < parts.count ? exp2_approx(lse - reference) : 0.0f;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        loaded[u][j] = __ldcg(reinterpret_cast<const float4*>(
            partial + parts.place(i) * HEAD_SIZE + 128 * j));
      }
    }
#pragma unroll
    for (int u = 0; u < kLoadsInFlight; ++u) {
      total += weight[u];
      // Where a part has no tokens there may be NaN.
      if (weight[u] == 0.0f) continue;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const float4& x = loaded[u][j];
        sum[j][0] = fmaf(weight[u], x.x, sum[j][0]);
        sum[j][1] = fmaf(weight[u], x.y, sum[j][1]);
        sum[j][2] = fmaf(weight[u], x.z, sum[j][2]);
        sum[j][3] = fmaf(weight[u], x.w, sum[j][3]);
      }
    }
  }
  if constexpr (kSideBySide == 2) {
    total += __shfl_xor_sync(~0u, total, kLanes);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      sum[0][i] += __shfl_xor_sync(~0u, sum[0][i], kLanes);
  }
  const float factor = total != 0.0f ? INVERSE_SQRT / total : 0.0f;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[j][i] *= factor;
  }
  hadamard(sum, lane);
  T* output = static_cast<T*>(p.output) + p.output_place(seq, query) +
              lane % kLanes * kVector;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    float x[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = signs.apply(sum[j][i], j, i);
    if (kSideBySide == 1 || lane < kLanes) store_vector(output + 128 * j, x);
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
#pragma unroll 1
  for (int row = int(blockIdx.y) * kJoinWarps + warp; row < num_rows;
       row += int(gridDim.y) * kJoinWarps) {
    const int column = first_column + row;
    const int query = p.query_of(column / p.heads_per_kv, kv_head, column);
    const RowParts<kRows> parts = {row, range, count};
    if (p.is_bf16) {
      join_row<__nv_bfloat16>(p, signs, parts, pass.seq, query, lane);
    } else {
      join_row<__half>(p, signs, parts, pass.seq, query, lane);
    }
  }
}

}  // namespace turbo
