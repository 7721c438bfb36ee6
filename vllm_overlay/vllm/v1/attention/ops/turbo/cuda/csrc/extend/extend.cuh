// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention of sequences' last few dozen tokens to pages of the turbo format:
// which blocks attend to what.
#pragma once

#include "extend/segment.cuh"

namespace turbo {

// Of a sequence: steps have one offset of K.
using ExtendTiles = SeenTiles<KEY_OFFSET != 0 ? kStepTiles : 1>;

// What there is to do for a sequence: passes, each for as many queries of a KV
// head as attend at once, of so many steps.
struct Work {
  int steps, passes;
};

template <int kBlockColumns>
__device__ __forceinline__ Work work_of(const AttentionParams& p, int seq) {
  const int tiles = ExtendTiles(SeenTokens(p, seq)).count;
  if (tiles == 0) return {0, 0};
  const int columns = p.num_query_tokens(seq) * p.heads_per_kv;
  const int head_passes = (columns + kBlockColumns - 1) / kBlockColumns;
  return {(tiles + kStepTiles - 1) / kStepTiles, head_passes * p.num_kv_heads};
}

// With one split, a result does not depend on what else is in the batch.
template <int kBlockColumns>
__device__ __forceinline__ Ranges cut_ranges(const AttentionParams& p,
                                             int lane) {
  int total = 0, longest = 0, passes = 0;
#pragma unroll 1
  for (int seq = lane; seq < p.num_seqs; seq += 32) {
    const Work work = work_of<kBlockColumns>(p, seq);
    total += work.steps * work.passes;
    longest = max(longest, work.steps);
    passes += work.passes;
  }
  longest = max(__reduce_max_sync(~0u, longest), 1);
  if (p.num_splits == 1) return {longest, __reduce_add_sync(~0u, passes), true};
  total = __reduce_add_sync(~0u, total);
  // A range may begin inside a pass, so a pass may need one more split.
  const int least = (longest + p.num_splits - 2) / (p.num_splits - 1);
  const int blocks = int(gridDim.x);
  const int size = max((total + blocks - 1) / blocks, least);
  return {size, (total + size - 1) / size, false};
}

// Attend to what a range has of a sequence, whose passes begin at step
// seq_first.
template <int kBlockColumns, int kWarps, int kStages>
__device__ __forceinline__ void attend_passes(
    ExtendShared<kBlockColumns, kWarps, kStages>& shared,
    const AttentionParams& p, const Ranges& ranges, int index, int seq,
    int passes, int seq_first, int pass_steps) {
  const int first = index * ranges.size;
  const int last = first + ranges.size;
  int pass = max(first - seq_first, 0) / pass_steps;
#pragma unroll 1
  for (; pass < passes; ++pass) {
    const int start = seq_first + pass * pass_steps;
    if (start >= last) break;
    const int head_passes = passes / p.num_kv_heads;
    const SeenTokens seen(p, seq);
    const ExtendTiles tiles(seen);
    Segment segment;
    segment.seq = seq;
    segment.kv_head = pass / head_passes;
    segment.first_column = pass % head_passes * kBlockColumns;
    segment.cache = p.kv_cache + segment.kv_head * p.stride_cache_head;
    const int num_tiles = min((last - start) * kStepTiles, tiles.count);
    segment.first_tile = tiles.first + max(first - start, 0) * kStepTiles;
    segment.last_tile = tiles.first + num_tiles;
    segment.first_seen_tile = seen.first_tile();
    segment.num_tokens = seen.last;
    segment.split = index - start / ranges.size;
    segment.ends = num_tiles == tiles.count;
    attend_segment(shared, p, segment);
  }
}

// Attend to a range: to segments of any few passes.
template <int kBlockColumns, int kWarps, int kStages>
__device__ __forceinline__ void extend_range(
    ExtendShared<kBlockColumns, kWarps, kStages>& shared,
    const AttentionParams& p, const Ranges& ranges, int index) {
  const int lane = threadIdx.x % 32;
  const int first = index * ranges.size;
  const int last = first + ranges.size;
  int before = 0, base = 0, next = 0;
  // What a lane knows of its sequence is found anew for each of them: few
  // registers are left while one is attended to.
#pragma unroll 1
  while (base < p.num_seqs && before < last) {
    const Work work = work_of<kBlockColumns>(p, base + lane);
    const int counted = ranges.whole ? ranges.size : work.steps;
    const int end = before + inclusive_sum(counted * work.passes, lane);
    const int begin = end - counted * work.passes;
    const bool overlaps = begin < end && begin < last && end > first;
    const uint32_t overlapping = __ballot_sync(~0u, lane >= next && overlaps);
    if (overlapping == 0) {
      before = __shfl_sync(~0u, end, 31);
      base += 32;
      next = 0;
      continue;
    }
    const int i = __ffs(overlapping) - 1;
    next = i + 1;
    const int pass_steps = __shfl_sync(~0u, counted, i);
    attend_passes(shared, p, ranges, index, base + i,
                  __shfl_sync(~0u, work.passes, i), __shfl_sync(~0u, begin, i),
                  pass_steps);
  }
}

template <int kBlockColumns, int kWarps, int kStages>
__global__ void __launch_bounds__(32 * kWarps, kWarps > 4 ? 1 : 2)
    extend_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared =
      *reinterpret_cast<ExtendShared<kBlockColumns, kWarps, kStages>*>(
          shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Lengths are known before the kernel before this one, which stores the
  // queries, has ended, unless it writes them. Then it also writes what the
  // next kernel reads at once.
  if (p.lens_are_new) wait_for_previous_kernel();
  start_next_kernel();
  const Ranges cut = cut_ranges<kBlockColumns>(p, lane);
  if (threadIdx.x == 0) shared.ranges = cut;
  __syncthreads();
  const Ranges& ranges = shared.ranges;
  wait_for_previous_kernel();
#pragma unroll 1
  for (int index = blockIdx.x; index < ranges.count; index += int(gridDim.x))
    extend_range(shared, p, ranges, index);
  skip_empty<kWarps>(p, warp, lane);
}

}  // namespace turbo
