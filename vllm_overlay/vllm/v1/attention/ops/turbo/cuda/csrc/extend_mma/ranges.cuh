// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The division of work into ranges of one size, for attention of sequences'
// last tokens. The blocks are then evenly busy, whatever the lengths.
#pragma once

#include "common/segment.cuh"

namespace turbo {

// Ranges of the steps of all passes, in order. If there are more ranges than
// blocks, a block has several.
struct Ranges {
  int size;  // steps
  int count;
  bool whole;  // a range is a pass, which counts as `size` steps
};

// The work for a sequence: passes of so many steps, each for the queries of a
// KV head that attend at once.
struct Work {
  int steps, passes;
};

// A range's share of a pass. The tiles of the sequence's raw tokens come after
// its cached tiles, and begin with a whole step.
struct PassSegment : Segment {
  int raw_tile;  // the first tile of raw tokens
  int range;
  bool begins;  // whether it has the pass's first tile
};

// The steps of a segment, of kStepTiles tiles each.
template <int kStepTiles>
__device__ __forceinline__ int num_steps_of(const Segment& segment) {
  return (segment.last_tile - segment.first_tile + kStepTiles - 1) / kStepTiles;
}

// The place of a step among all steps.
struct PassPlace {
  int seq;
  int pass;         // in the sequence
  int head_passes;  // passes of a KV head
  int first, last;  // steps of the pass, among all steps
};

// Cuts by passes of kQueries queries, and steps of kStepTiles tiles.
template <int kQueries, int kStepTiles>
struct Cuts {
  // The seen tiles of a sequence. With KEY_OFFSET they begin with a whole step,
  // because a step has one offset of K.
  using Tiles = SeenTiles<KEY_OFFSET != 0 ? kStepTiles : 1>;

  static __device__ __forceinline__ int steps_of(int tiles) {
    return (tiles + kStepTiles - 1) / kStepTiles;
  }

  template <typename Params>
  static __device__ __forceinline__ Work work_of(const Params& p, int seq) {
    const int steps = steps_of(Tiles(SeenTokens(p, seq)).count) +
                      steps_of(p.num_raw_tiles(seq));
    if (steps == 0) return {0, 0};
    const int queries = p.num_query_tokens(seq) * p.heads_per_kv;
    const int head_passes = (queries + kQueries - 1) / kQueries;
    return {steps, head_passes * p.num_kv_heads};
  }

  // With one split, a result does not depend on the rest of the batch.
  template <typename Params>
  static __device__ __forceinline__ Ranges ranges(const Params& p, int lane) {
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
    const int most = p.max_ranges();
    int size = max((total + most - 1) / most, 1);
    // A range may begin inside a pass, so a pass may need one more split.
    if (p.num_splits > 0)
      size = max(size, (longest + p.num_splits - 2) / (p.num_splits - 1));
    return {size, (total + size - 1) / size, false};
  }

  // Call `attend` with a range's segments of a sequence. The sequence's passes
  // begin at step seq_first.
  template <typename Params, typename F>
  static __device__ __forceinline__ void for_each_pass(
      const Params& p, const Ranges& ranges, int index, int seq, int passes,
      int seq_first, int pass_steps, const F& attend) {
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
      const int raw_tile = tiles.first + steps_of(tiles.count) * kStepTiles;
      const int num_raw = p.num_raw_tiles(seq);
      const int end =
          num_raw > 0 ? raw_tile + num_raw : tiles.first + tiles.count;
      PassSegment segment;
      segment.seq = seq;
      segment.kv_head = pass / head_passes;
      segment.first_column = pass % head_passes * kQueries;
      segment.cache = p.kv_cache + segment.kv_head * p.stride_cache_head;
      segment.first_tile = tiles.first + max(first - start, 0) * kStepTiles;
      segment.last_tile = min(tiles.first + (last - start) * kStepTiles, end);
      segment.first_seen_tile = seen.first_tile();
      segment.num_tokens = seen.last;
      segment.split = index - start / ranges.size;
      segment.begins = start >= first;
      segment.ends = segment.last_tile == end;
      segment.raw_tile = raw_tile;
      segment.range = index;
      attend(segment);
    }
  }

  // Call `attend` with a range's segments, of one or more passes.
  template <typename Params, typename F>
  static __device__ __forceinline__ void for_each_segment(const Params& p,
                                                          const Ranges& ranges,
                                                          int index,
                                                          const F& attend) {
    const int lane = threadIdx.x % 32;
    const int first = index * ranges.size;
    const int last = first + ranges.size;
    int before = 0, base = 0, next = 0;
    // A lane finds its sequence's work again for each segment, because few
    // registers are left while a segment is attended to.
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

  // Find a step, which is not past the last. All lanes of a warp call it.
  template <typename Params>
  static __device__ __forceinline__ PassPlace place_of(const Params& p,
                                                       int step) {
    const int lane = threadIdx.x % 32;
    int before = 0;
#pragma unroll 1
    for (int base = 0;; base += 32) {
      const Work work = work_of(p, base + lane);
      const int end = before + inclusive_sum(work.steps * work.passes, lane);
      const uint32_t behind = __ballot_sync(~0u, end > step);
      before = __shfl_sync(~0u, end, 31);
      if (behind == 0) continue;
      const int i = __ffs(behind) - 1;
      const int steps = __shfl_sync(~0u, work.steps, i);
      const int passes = __shfl_sync(~0u, work.passes, i);
      const int begin = __shfl_sync(~0u, end, i) - steps * passes;
      const int pass = (step - begin) / steps;
      const int first = begin + pass * steps;
      return {base + i, pass, passes / p.num_kv_heads, first, first + steps};
    }
  }
};

}  // namespace turbo
