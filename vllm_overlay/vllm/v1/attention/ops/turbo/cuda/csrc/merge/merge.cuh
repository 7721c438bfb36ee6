// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Merge of decode attention's splits. A row's partial results are joined and
// rotated back. They may be joined with a sink and with the sequence's raw
// tokens and those in the tail.
//
// A row is a query of a sequence, query token and query head. It has as many
// warps as the GPU has room for. Block (i, j) has the j-th rows of sequence i,
// as many as kMergeWarps warps have.
#pragma once

#include "common/warp.cuh"
#include "merge/tail.cuh"

namespace turbo {

constexpr int kMergeThreads = 32 * kMergeWarps;
// Blocks per multiprocessor. More leave too few registers for loads in flight.
// With a tail there are three for long vectors. There are two for fp32, which
// takes three operands instead of one.
template <typename T, bool kWithTail>
constexpr int kMergeBlocks = !kWithTail       ? 4
                             : sizeof(T) == 4 ? 2
                             : kChunks > 1    ? 3
                                              : 4;
// Loads of partial results that a warp has in flight.
constexpr int kLoadsInFlight = kChunks > 1 ? 4 : 8;
static_assert(MAX_SPLITS == 64, "a lane has two LSEs of a row");

struct MergeShared {
  // By row. The last LSE is -inf, and rows are padded for banks.
  float lse[kMergeWarps][MAX_SPLITS + 4];
  float4 sums[kMergeWarps][HEAD_SIZE / kVector];  // by warp
};

// Copy the LSEs of the block's rows to shared memory, each once. LSEs of
// neighbouring rows lie side by side. Rows that the sequence does not have get
// -inf, because their LSEs are not written.
__device__ __forceinline__ void load_lses(MergeShared& shared,
                                          const MergeParams& p, int seq,
                                          int first_row, int num_rows) {
  const int rows = kMergeWarps >> p.row_shift;
  const int row_bits = __ffs(rows) - 1;
  if (threadIdx.x < kMergeWarps)
    shared.lse[threadIdx.x][MAX_SPLITS] = -INFINITY;
  const float* lses =
      p.partial_lse + int64_t(seq) * p.num_splits * p.num_queries;
#pragma unroll
  for (int i = 0; i < kMergeWarps * MAX_SPLITS; i += kMergeThreads) {
    const int index = i + int(threadIdx.x);
    const int r = index & (rows - 1), split = index >> row_bits;
    if (split >= MAX_SPLITS) break;
    const int row = first_row + r;
    float lse = -INFINITY;
    if (split < p.num_splits && row < num_rows) {
      lse = __ldcg(lses + split * p.num_queries + row);
    }
    shared.lse[r][split] = lse;
  }
}

// Sum the partial results `first`, `first + step` and so on of a row, with
// their weights. A split of weight zero is not read.
//
// partial: the row's result of split 0.
// count: splits up to the last that was written.
__device__ __forceinline__ void add_partials(Coordinates& sum,
                                             const MergeParams& p,
                                             const float* partial,
                                             const float* lse, float reference,
                                             int first, int step, int count,
                                             int lane) {
  const int stride = p.num_queries * HEAD_SIZE;
  const float* own = partial + lane % kLanes * kVector;
#pragma unroll 1
  for (int base = first; kSideBySide * base < count;
       base += step * kLoadsInFlight) {
    float weight[kLoadsInFlight];
    float4 loaded[kLoadsInFlight][kChunks];
#pragma unroll
    for (int u = 0; u < kLoadsInFlight; ++u) {
      const int split = kSideBySide * (base + step * u) + lane / kLanes;
      weight[u] = exp2_approx(lse[min(split, MAX_SPLITS)] - reference);
      // A reference of NaN makes all weights NaN.
      const bool is_read = weight[u] != 0.0f && split < count;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        loaded[u][j] = load_if(is_read, own + split * stride + 128 * j);
      }
    }
#pragma unroll
    for (int u = 0; u < kLoadsInFlight; ++u) {
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
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      sum[0][i] += __shfl_xor_sync(~0u, sum[0][i], kLanes);
    }
  }
}

// Add the sums of a row's warps to that of its first. Only the first goes on.
__device__ __forceinline__ bool join_warps(MergeShared& shared,
                                           Coordinates& sum, int warp,
                                           int warps, int lane) {
  if (warps == 1) return true;
  const int place = lane % kLanes;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    shared.sums[warp][32 * j + place] = {sum[j][0], sum[j][1], sum[j][2],
                                         sum[j][3]};
  }
  __syncthreads();
  if ((warp & (warps - 1)) != 0) return false;
#pragma unroll
  for (int w = 1; w < kMergeWarps; ++w) {
    if (w >= warps) break;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const float4 x = shared.sums[warp + w][32 * j + place];
      sum[j][0] += x.x, sum[j][1] += x.y, sum[j][2] += x.z, sum[j][3] += x.w;
    }
  }
  return true;
}

// Rotate a row's sum back and write it.
//
// largest: the largest LSE, -inf without splits.
// total: the sum of the splits' weights relative to it.
template <typename T, bool kWithRaw>
__device__ __forceinline__ void finish_row(
    Coordinates& sum, const MergeParams& p, const RawSum& raw,
    const Signs& signs, float largest, float total, const Row& row, int lane) {
  float rescale = 1.0f, raw_weight = 0.0f;
  if constexpr (kWithRaw) {
    const float reference = or_zero(fmaxf(largest, raw.largest));
    rescale = exp2_approx(largest - reference);
    raw_weight = exp2_approx(raw.largest - reference);
    total = fmaf(total, rescale, raw_weight * raw.total);
  }
  // The total is about one or more, unless there are no tokens. The test is not
  // "> 0", so that NaN stays NaN.
  const float inverse = total != 0.0f ? reciprocal_approx(total) : 0.0f;
  const float normaliser = rescale * INVERSE_SQRT * inverse;
  raw_weight *= inverse;
  hadamard(sum, lane);
  T* output = static_cast<T*>(p.output) + row.token * p.output_strides.token +
              row.head * p.output_strides.head + lane % kLanes * kVector;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    float x[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[i] = signs.apply(sum[j][i] * normaliser, j, i);
    }
    if constexpr (kWithRaw) {
      x[0] = fmaf(raw_weight, raw.value[j].x, x[0]);
      x[1] = fmaf(raw_weight, raw.value[j].y, x[1]);
      x[2] = fmaf(raw_weight, raw.value[j].z, x[2]);
      x[3] = fmaf(raw_weight, raw.value[j].w, x[3]);
    }
    if (kSideBySide == 1 || lane < kLanes) store_vector(output + 128 * j, x);
  }
}

// Write a row's sum as it is, and its LSE. They are a rank's part of a
// sequence, for another merge.
//
// largest, total: see finish_row.
__device__ __forceinline__ void write_part(const Coordinates& sum,
                                           const MergeParams& p, float largest,
                                           float total, int64_t row, int lane) {
  const float inverse = total != 0.0f ? reciprocal_approx(total) : 0.0f;
  float* output =
      static_cast<float*>(p.output) + row * HEAD_SIZE + lane % kLanes * kVector;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    float x[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = sum[j][i] * inverse;
    if (kSideBySide == 1 || lane < kLanes) store_vector(output + 128 * j, x);
  }
  // Without tokens it is -inf, the logarithm of zero.
  if (lane == 0) p.lse[row] = or_zero(largest) + log2f(total);
}

template <typename T, bool kWithRaw, bool kWithTail = false>
__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks<T, kWithTail>)
    merge_kernel(const __grid_constant__ MergeParams p) {
  __shared__ MergeShared shared;
  const int lane = threadIdx.x % 32;
  const int warp =
      __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be uniform
  const int warps = 1 << p.row_shift, r = warp >> p.row_shift;
  const int seq = blockIdx.x;
  const int first_row = blockIdx.y * (kMergeWarps >> p.row_shift);
  // Warps without a row take the last row and do not write it.
  const int index = min(first_row + r, p.num_queries - 1);
  const Row row(p, seq, index);

  // Work that does not depend on the decode kernel is done while that still
  // runs. The decode kernel lets this one begin once the store has ended, which
  // writes the tail.
  const Signs signs(lane);
  Tail<kWithTail> tail(p, seq, row, first_row, index, warp);
  tail.template attend<T>(p, seq, row, r, lane);
  RawSum raw;
  const bool joins = (warp & (warps - 1)) == 0 && row.place < row.query_len;
  if constexpr (kWithRaw) {
    if (joins && p.sinks.logits != nullptr)
      raw.begin_with(p.sinks.load(row.head));
    if (joins && p.with_raw && p.raw_lse == nullptr)
      raw.attend<T>(p, seq, row, lane);
  }
  tail.join(p, raw, r, lane);
  wait_for_previous_kernel();
  start_next_kernel();
  load_lses(shared, p, seq, first_row, row.query_len * p.num_heads);
  if constexpr (kWithRaw) {
    // This result may be as new as the partial results.
    if (joins && p.raw_lse != nullptr) raw.take_result<T>(p, seq, row, lane);
  }
  __syncthreads();

  const float* lse = shared.lse[r];
  const float low = lse[lane], high = lse[32 + lane];
  const float largest = warp_max(fmaxf(low, high));
  const float reference = or_zero(largest);
  const uint32_t written_low = __ballot_sync(~0u, low != -INFINITY);
  const uint32_t written_high = __ballot_sync(~0u, high != -INFINITY);
  const int count =
      written_high ? 64 - __clz(written_high) : 32 - __clz(written_low);
  Coordinates sum = {};
  const float* partial =
      p.partial +
      (int64_t(seq) * p.num_splits * p.num_queries + index) * HEAD_SIZE;
  add_partials(sum, p, partial, lse, reference, warp & (warps - 1), warps,
               count, lane);
  if (!join_warps(shared, sum, warp, warps, lane)) return;
  if (first_row + r >= p.num_queries) return;
  const float total = warp_sum<32>(exp2_approx(low - reference) +
                                   exp2_approx(high - reference));
  if constexpr (!kWithRaw && sizeof(T) == 4) {
    if (p.lse != nullptr) {
      // Rows that the sequence does not have also get an LSE.
      write_part(sum, p, largest, total, int64_t(seq) * p.num_queries + index,
                 lane);
      return;
    }
  }
  if (row.place >= row.query_len) return;
  finish_row<T, kWithRaw>(sum, p, raw, signs, largest, total, row, lane);
}

}  // namespace turbo
