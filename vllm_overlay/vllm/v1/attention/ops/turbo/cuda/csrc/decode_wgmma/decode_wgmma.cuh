// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention by columns: the blocks of each segment.
#pragma once

#include "common/step_partition.cuh"
#include "decode_wgmma/segment.cuh"

namespace turbo {

// The seen tiles of a sequence. With KEY_OFFSET they begin with a whole step,
// because a step has one offset of K.
using ColumnsTiles = SeenTiles<KEY_OFFSET != 0 ? kStepTiles : 1>;

__device__ __forceinline__ int steps_of(const AttentionParams& p, int seq) {
  const int tiles = ColumnsTiles(SeenTokens(p, seq)).count;
  return (tiles + kStepTiles - 1) / kStepTiles;
}

using ColumnsPartition = StepPartition<1>;

// Attend to a range's share of a sequence. The sequence's passes begin at step
// seq_first.
template <typename Plan>
__device__ __forceinline__ void attend_passes(
    ColumnsShared<Plan>& shared, StepQueue<Plan>& queue,
    const AttentionParams& p, const ColumnsPartition& cut, int num_passes,
    int index, int seq, int seq_first, const Place& own) {
  const int first = index * cut.range, last = first + cut.range;
  const SeenTokens seen(p, seq);
  const ColumnsTiles tiles(seen);
  const int steps = (tiles.count + kStepTiles - 1) / kStepTiles;
  const int pass_steps = cut.counted(steps);
  const int head_passes = num_passes / p.num_kv_heads;
  const int query_len = p.num_query_tokens(seq);
#pragma unroll 1
  for (int pass = max(first - seq_first, 0) / pass_steps; pass < num_passes;
       ++pass) {
    const int start = seq_first + pass * pass_steps;
    if (start >= last) break;
    ColumnsSegment s;
    s.seq = seq;
    s.kv_head = pass / head_passes;
    s.first_column = pass % head_passes * Plan::kColumns;
    s.first_tile = tiles.first;
    s.first_seen_tile = seen.first_tile();
    s.first_step = max(first - start, 0);
    s.last_step = min(last - start, steps);
    s.num_tokens = seen.last;
    s.last_first = p.first_seen(seq, query_len - 1);
    const int token = s.first_column / p.heads_per_kv;
    s.first_limit = seen.last - (p.with_raw ? 0 : query_len - 1 - token);
    s.split = index - start / cut.range;
    s.ends = s.last_step == steps;
    if (token >= query_len || s.first_step >= s.last_step) continue;
    attend_segment(shared, queue, p, s, own);
  }
}

// Attend to a range, which has segments of one or more sequences.
template <typename Plan>
__device__ __forceinline__ void attend_range(ColumnsShared<Plan>& shared,
                                             StepQueue<Plan>& queue,
                                             const AttentionParams& p,
                                             const ColumnsPartition& cut,
                                             int num_passes, int index,
                                             const Place& own) {
  const int first = index * cut.range, last = first + cut.range;
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < p.num_seqs && before < last; base += 32) {
    const int steps = steps_of(p, base + own.lane);
    const int counted = cut.counted(steps);
    const int end = before + inclusive_sum(counted, own.lane) * num_passes;
    const int begin = end - counted * num_passes;
    uint32_t overlapping =
        __ballot_sync(~0u, begin < last && end > first && steps > 0);
#pragma unroll 1
    for (; overlapping != 0; overlapping &= overlapping - 1) {
      const int i = __ffs(overlapping) - 1;
      attend_passes(shared, queue, p, cut, num_passes, index, uniform(base + i),
                    __shfl_sync(~0u, begin, i), own);
    }
    before = __shfl_sync(~0u, end, 31);
  }
}

template <typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    decode_wgmma_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<ColumnsShared<Plan>*>(shared_bytes);
  // The compiler is told that a warp's index is uniform.
  const int warp = uniform(threadIdx.x / 32);
  const Place own = {warp / 4, warp % 4, int(threadIdx.x % 32)};
  StepQueue<Plan> queue = {p, shared_address(shared.tiles[own.set]),
                           shared_address(shared.copied[own.set])};
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < Plan::kSets * Plan::kStages; ++i)
      init_barrier(shared_address(shared.copied[0]) + 8 * i, kStepTiles);
    fence_barrier_init();
  }
  __syncthreads();
  // The previous kernel stores the queries. One that writes lengths also writes
  // data that the next kernel reads without waiting.
  if (p.lens_are_new) wait_for_previous_kernel();
  start_next_kernel();
  const int head_passes =
      (p.num_columns() + Plan::kColumns - 1) / Plan::kColumns;
  const int num_passes = p.num_kv_heads * head_passes;
  const ColumnsPartition cut(p, num_passes, gridDim.x, own.lane);
  wait_for_previous_kernel();
#pragma unroll 1
  for (int index = blockIdx.x; index < cut.num_ranges; index += gridDim.x)
    attend_range(shared, queue, p, cut, num_passes, index, own);
  skip_empty<Plan::kThreads / 32>(p, warp, own.lane);
}

}  // namespace turbo
