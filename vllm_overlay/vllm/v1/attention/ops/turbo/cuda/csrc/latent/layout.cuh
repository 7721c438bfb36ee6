// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The part of a sequence that a block attends to, and constants of its kernels.
#pragma once

#include "common/wgmma.cuh"
#include "latent/partition.cuh"
#include "latent/tile.cuh"

namespace turbo {

constexpr int kGroupThreads = 128;  // of a warpgroup
// A score above the running reference by more than this raises it, because
// weights are fp16.
constexpr float kMaxScore = 8.0f;
constexpr float kNoReference = -1e30f;
// A query is scaled so that its largest coordinate is below 2 to this power.
constexpr int kQueryExponent = 10;

// Some steps of a sequence, and some of its rows.
struct LatentSegment {
  int seq;
  int first_row;   // column 0, among the sequence's rows
  int num_rows;    // of the sequence
  int first_step;  // the segment has steps up to last_step
  int last_step;
  int num_tokens;   // of the sequence
  int first_limit;  // tokens that column 0 sees: others see no fewer
  int split;
  bool ends;  // whether it has the sequence's last step
};

}  // namespace turbo
