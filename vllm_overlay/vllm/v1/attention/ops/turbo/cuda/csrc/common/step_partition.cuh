// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The division of a batch's work among blocks, in steps of some tokens.
#pragma once

#include "common/warp.cuh"

namespace turbo {

// The cost of beginning and ending a segment, in steps.
constexpr int kSegmentSteps = 4;

// The steps of all sequences, and of each pass over a sequence, are cut in that
// order into ranges of one size. A block takes a range at a time. With one
// split, a result does not depend on the rest of the batch.
//
// kAtOnce: sequences whose lengths a lane loads before it needs one.
// aligned: whether ranges begin where passes do.
template <int kAtOnce>
struct StepPartition {
  int range;
  int num_ranges;
  bool aligned;

  // The steps that a pass takes up in the ranges.
  __device__ __forceinline__ int counted(int steps) const {
    return aligned ? (steps + range - 1) / range * range : steps;
  }

  // All lanes of a warp call it. Params has num_seqs and num_splits, and
  // steps_of returns the steps of a sequence.
  template <typename Params>
  __device__ __forceinline__ StepPartition(const Params& p, int num_passes,
                                           int num_blocks, int lane) {
    int total = 0, longest = 0;
#pragma unroll kAtOnce
    for (int seq = lane; seq < p.num_seqs; seq += 32) {
      const int steps = steps_of(p, seq);
      total += steps, longest = max(longest, steps);
    }
    total = __reduce_add_sync(~0u, total) * num_passes;
    longest = max(__reduce_max_sync(~0u, longest), 1);
    range = max((total + num_blocks - 1) / num_blocks, 1);
    // A range may begin inside a pass, so a pass may need one more split.
    range = p.num_splits == 1
                ? longest
                : max(range, (longest + p.num_splits - 2) / (p.num_splits - 1));
    const int splits = min(max(longest / range, 1), p.num_splits);
    const int even = (longest + splits - 1) / splits;
    int ranges = 0;
#pragma unroll kAtOnce
    for (int seq = lane; seq < p.num_seqs; seq += 32)
      ranges += (steps_of(p, seq) + even - 1) / even;
    ranges = __reduce_add_sync(~0u, ranges) * num_passes;
    aligned = p.num_splits == 1 ||
              (ranges <= num_blocks && even <= range + kSegmentSteps);
    if (aligned) range = even;
    num_ranges = aligned ? ranges : (total + range - 1) / range;
  }
};

}  // namespace turbo
