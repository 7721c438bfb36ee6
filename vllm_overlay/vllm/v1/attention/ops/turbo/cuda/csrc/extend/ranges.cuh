// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// How attention of sequences' last tokens is cut into ranges of work of one
// size, so that the blocks are evenly busy whatever the lengths.
#pragma once

#include "common/segment.cuh"

namespace turbo {

// The steps of all passes, in order. If there are more ranges than blocks, a
// block has several.
struct Ranges {
  int size;  // steps
  int count;
  bool whole;  // a pass each, which counts as so many steps
};

// What there is to do for a sequence: passes, each for as many queries of a KV
// head as attend at once, of so many steps.
struct Work {
  int steps, passes;
};

// Cuts by passes of kQueries, and steps of kStepTiles.
template <int kQueries, int kStepTiles>
struct Cuts {
  // Of a sequence: steps have one offset of K.
  using Tiles = SeenTiles<KEY_OFFSET != 0 ? kStepTiles : 1>;

  static __device__ __forceinline__ Work work_of(const AttentionParams& p,
                                                 int seq) {
    const int tiles = Tiles(SeenTokens(p, seq)).count;
    if (tiles == 0) return {0, 0};
    const int queries = p.num_query_tokens(seq) * p.heads_per_kv;
    const int head_passes = (queries + kQueries - 1) / kQueries;
    return {(tiles + kStepTiles - 1) / kStepTiles,
            head_passes * p.num_kv_heads};
  }

  // With one split, a result does not depend on what else is in the batch.
  static __device__ __forceinline__ Ranges ranges(const AttentionParams& p,
                                                  int lane) {
    int total = 0, longest = 0, passes = 0;
#pragma unroll 1
    for (int seq = lane; seq < p.num_seqs; seq += 32) {
      const Work work = work_of(p, seq);
      total += work.steps * work.passes;
      longest = max(longest, work.steps);
      passes += work.passes;
    }
    longest = max(__reduce_max_sync(~0u, longest), 1);
    if (p.num_splits == 1)
      return {longest, __reduce_add_sync(~0u, passes), true};
    total = __reduce_add_sync(~0u, total);
    // A range may begin inside a pass, so a pass may need one more split.
    const int least = (longest + p.num_splits - 2) / (p.num_splits - 1);
    const int blocks = int(gridDim.x);
    const int size = max((total + blocks - 1) / blocks, least);
    return {size, (total + size - 1) / size, false};
  }

  // Call attend with what a range has of a sequence, whose passes begin at step
  // seq_first.
  template <typename F>
  static __device__ __forceinline__ void for_each_pass(
      const AttentionParams& p, const Ranges& ranges, int index, int seq,
      int passes, int seq_first, int pass_steps, const F& attend) {
    const int first = index * ranges.size;
    const int last = first + ranges.size;
    int pass = max(first - seq_first, 0) / pass_steps;
#pragma unroll 1
    for (; pass < passes; ++pass) {
      const int start = seq_first + pass * pass_steps;
      if (start >= last) break;
      const int head_passes = passes / p.num_kv_heads;
      const SeenTokens seen(p, seq);
      const Tiles tiles(seen);
      Segment segment;
      segment.seq = seq;
      segment.kv_head = pass / head_passes;
      segment.first_column = pass % head_passes * kQueries;
      segment.cache = p.kv_cache + segment.kv_head * p.stride_cache_head;
      const int num_tiles = min((last - start) * kStepTiles, tiles.count);
      segment.first_tile = tiles.first + max(first - start, 0) * kStepTiles;
      segment.last_tile = tiles.first + num_tiles;
      segment.first_seen_tile = seen.first_tile();
      segment.num_tokens = seen.last;
      segment.split = index - start / ranges.size;
      segment.ends = num_tiles == tiles.count;
      attend(segment);
    }
  }

  // Call attend with a range's segments, of any few passes.
  template <typename F>
  static __device__ __forceinline__ void for_each_segment(
      const AttentionParams& p, const Ranges& ranges, int index,
      const F& attend) {
    const int lane = threadIdx.x % 32;
    const int first = index * ranges.size;
    const int last = first + ranges.size;
    int before = 0, base = 0, next = 0;
    // What a lane knows of its sequence is found anew for each of them: few
    // registers are left while one is attended to.
#pragma unroll 1
    while (base < p.num_seqs && before < last) {
      const Work work = work_of(p, base + lane);
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
      for_each_pass(p, ranges, index, base + i,
                    __shfl_sync(~0u, work.passes, i),
                    __shfl_sync(~0u, begin, i), pass_steps, attend);
    }
  }
};

}  // namespace turbo
