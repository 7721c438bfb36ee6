// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention over pages of latents: the segments of each block.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

// Attend to a range, which has segments of one or more sequences.
//
// kernel: see SliceKernel, ColumnsProducer and RowsProducer.
template <typename Kernel>
__device__ __forceinline__ void attend_range(Kernel& kernel,
                                             const LatentParams& p,
                                             const LatentPartition& cut,
                                             int num_passes, int index) {
  const int lane = threadIdx.x % 32;
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
        s.first_row = uniform(pass) * Kernel::kColumns;
        s.num_tokens = uniform(p.seq_lens[s.seq]);
        s.first_limit =
            s.num_tokens - query_tokens + 1 + s.first_row / p.num_heads;
        s.first_step = uniform(max(first - start, 0));
        s.last_step = uniform(min(last - start, seq_steps));
        s.split = index - start / cut.range;
        s.ends = s.last_step == seq_steps;
        if (s.first_row >= s.num_rows || s.first_step >= s.last_step) continue;
        kernel.attend(p, s);
      }
    }
    before = __shfl_sync(~0u, end, 31);
  }
}

// Mark the splits of sequences without tokens as empty.
__device__ __forceinline__ void skip_empty(const LatentParams& p,
                                           int num_threads) {
  const int count = p.num_splits * p.most_rows();
  for (int seq = blockIdx.x; seq < p.num_seqs; seq += gridDim.x) {
    if (p.seq_lens[seq] > 0) continue;
    for (int i = threadIdx.x; i < count; i += num_threads)
      p.partial_lse[int64_t(seq) * count + i] = -INFINITY;
  }
}

// Attend to the ranges of the block.
template <typename Kernel>
__device__ __forceinline__ void attend_ranges(Kernel& kernel,
                                              const LatentParams& p, int lane) {
  constexpr int kColumns = Kernel::kColumns;
  const int num_passes = (p.most_rows() + kColumns - 1) / kColumns;
  const LatentPartition cut(p, num_passes, gridDim.x, lane);
#pragma unroll 1
  for (int index = blockIdx.x; index < cut.num_ranges; index += gridDim.x)
    attend_range(kernel, p, cut, num_passes, index);
}

// Kernel: with kHasRoles, its warps attend to ranges in their own ways.
template <typename Kernel>
__device__ __forceinline__ void latent_decode(const LatentParams& p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const int lane = threadIdx.x % 32;
  // The compiler is told that a warp's index is uniform.
  Kernel kernel(shared_bytes, p, uniform(threadIdx.x / 32), lane);
  start_next_kernel();
  wait_for_previous_kernel();
  if constexpr (Kernel::kHasRoles)
    kernel.attend_ranges(lane);
  else
    attend_ranges(kernel, p, lane);
  skip_empty(p, Kernel::kThreads);
}

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    latent_decode_kernel(const __grid_constant__ LatentParams p) {
  latent_decode<Kernel>(p);
}

}  // namespace turbo
