// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention over pages of latents: which blocks attend to what.
#pragma once

#include "latent/segment.cuh"

namespace turbo {

// Attend to a range: to segments of any few sequences.
template <typename Plan>
__device__ __forceinline__ void attend_range(LatentShared<Plan>& shared,
                                             TileQueue<Plan>& queue,
                                             const LatentParams& p,
                                             const LatentPartition& cut,
                                             int num_passes, int index,
                                             const Place<Plan>& own) {
  const int lane = own.lane;
  const int first = index * cut.range, last = first + cut.range;
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < p.num_seqs && before < last; base += 32) {
    const int steps = steps_of(p, base + lane);
    const int counted = cut.counted(steps);
    const int end = before + inclusive_sum(counted, lane) * num_passes;
    const int begin = end - counted * num_passes;
    uint32_t overlapping =
        __ballot_sync(~0u, begin < last && end > first && steps > 0);
#pragma unroll 1
    for (; overlapping != 0; overlapping &= overlapping - 1) {
      const int i = __ffs(overlapping) - 1;
      const int seq_steps = __shfl_sync(~0u, steps, i);
      const int pass_steps = cut.counted(seq_steps);
      const int seq_first = __shfl_sync(~0u, begin, i);
      int pass = max(first - seq_first, 0) / pass_steps;
#pragma unroll 1
      for (; pass < num_passes; ++pass) {
        const int start = seq_first + pass * pass_steps;
        if (start >= last) break;
        LatentSegment s;
        s.seq = uniform(base + i);
        const int query_tokens = p.num_query_tokens(s.seq);
        s.num_rows = query_tokens * p.num_heads;
        s.first_row = uniform(pass) * Plan::kColumns;
        s.num_tokens = uniform(p.seq_lens[s.seq]);
        s.first_limit =
            s.num_tokens - query_tokens + 1 + s.first_row / p.num_heads;
        s.first_step = uniform(max(first - start, 0));
        s.last_step = uniform(min(last - start, seq_steps));
        s.split = index - start / cut.range;
        s.ends = s.last_step == seq_steps;
        if (s.first_row >= s.num_rows || s.first_step >= s.last_step) continue;
        attend_segment(shared, queue, p, s, own);
      }
    }
    before = __shfl_sync(~0u, end, 31);
  }
}

// Mark the splits of sequences without tokens as empty.
__device__ __forceinline__ void skip_empty(const LatentParams& p) {
  const int count = p.num_splits * p.most_rows();
  for (int seq = blockIdx.x; seq < p.num_seqs; seq += gridDim.x) {
    if (p.seq_lens[seq] > 0) continue;
    for (int i = threadIdx.x; i < count; i += kBlockThreads)
      p.partial_lse[int64_t(seq) * count + i] = -INFINITY;
  }
}

template <typename Plan>
__device__ __forceinline__ void latent_decode(const LatentParams& p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<LatentShared<Plan>*>(shared_bytes);
  // Warps are known to be uniform.
  const int block_warp = uniform(threadIdx.x / 32);
  const Place<Plan> own = {block_warp / 4, block_warp % 4,
                           int(threadIdx.x % 32)};
  const int tiles = 4 * own.set() + own.warp;
  TileQueue<Plan> queue = {p, shared_address(shared.tiles[tiles]),
                           shared_address(shared.copied[tiles])};
  if (own.part() == 0 && own.lane == 0) {
#pragma unroll
    for (int i = 0; i < Plan::kStages; ++i)
      init_barrier(queue.barriers + 8 * i, 1);
    fence_barrier_init();
  }
  if constexpr (Plan::kShares)
    __syncthreads();
  else
    __syncwarp();
  start_next_kernel();
  wait_for_previous_kernel();
  const int num_passes = (p.most_rows() + Plan::kColumns - 1) / Plan::kColumns;
  const LatentPartition cut(p, num_passes, gridDim.x, own.lane);
#pragma unroll 1
  for (int index = blockIdx.x; index < cut.num_ranges; index += gridDim.x) {
    attend_range(shared, queue, p, cut, num_passes, index, own);
  }
  skip_empty(p);
}

template <typename Plan>
__global__ void __launch_bounds__(kBlockThreads, 1)
    latent_decode_kernel(const __grid_constant__ LatentParams p) {
  latent_decode<Plan>(p);
}

}  // namespace turbo
