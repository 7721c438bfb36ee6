// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The steps of a sequence, of 64 tokens each.
#pragma once

#include "common/step_partition.cuh"
#include "latent/params.cuh"

namespace turbo {

// Tokens that a warpgroup multiplies at once: its 64 rows.
constexpr int kStepTokens = 64;

__device__ __forceinline__ int steps_of(const LatentParams& p, int seq) {
  if (seq >= p.num_seqs) return 0;
  return (p.seq_lens[seq] + kStepTokens - 1) / kStepTokens;
}

using LatentPartition = StepPartition<4>;

}  // namespace turbo
