// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What a block of decode attention to latents has, in shared memory and in
// registers.
#pragma once

#include "common/wgmma.cuh"
#include "latent/partition.cuh"
#include "latent/tile.cuh"

namespace turbo {

// Rows of a product of O^T: 64 coordinates of each token, in 128 bytes.
constexpr int kValueBytes = 128 * kStepTokens;
// Scores above the running reference by more than this raise it: the
// accumulators of weights are fp16's.
constexpr float kMaxScore = 8.0f;
constexpr float kNoReference = -1e30f;
// Queries are scaled to have their largest coordinate below 2 to this.
constexpr int kQueryExponent = 10;

template <typename Plan>
struct LatentShared {
  static constexpr int kColumns = Plan::kColumns, kStages = Plan::kStages;
  static constexpr int kSets = Plan::kSets, kWarps = kBlockWarps;
  // fp16 of a step's tokens, coordinates contiguous, in blocks of 64 with the
  // 16-byte chunks of a token swizzled.
  uint8_t values[kGroups][Plan::kOutputs][kValueBytes];
  // In core matrices of eight columns or tokens and 16 bytes: steps of the
  // depth, its halves, and columns; columns, and tokens.
  __half query[kSteps][2][kColumns][8];
  __half weights[kSets][Plan::kBlocks][kStepTokens][8];
  uint8_t tiles[4 * kSets][kStages][kTileSpace];
  // Scores that a warpgroup gives to the other, which shares its tokens.
  float4 given[kGroups][Plan::kOwn][Plan::kShares ? kGroupThreads : 1];
  // Pairs of columns: factors of scores, and the references.
  float4 scaling[kSets][kColumns / 2];
  float2 across[kSets][4][kColumns / 2];  // of a warp's columns
  float2 sums[kSets][kColumns];           // references and sums
  int limits[kColumns];                   // tokens that are seen
  uint64_t copied[4 * kSets][kStages];
};

// Some steps of a sequence, and some of its rows.
struct LatentSegment {
  int seq;
  int first_row;   // of the sequence's rows, that of column 0
  int num_rows;    // of the sequence
  int first_step;  // its steps, and those up to which
  int last_step;
  int num_tokens;   // of the sequence
  int first_limit;  // tokens that column 0 sees: others see no fewer
  int split;
  bool ends;  // whether the last step is the sequence's
};

// The running result of a warpgroup. Lane 4 * g + t of a warp has, of columns
// 8 * n + 2 * t and the next, coordinates g and g + 8 of 16 * warp in blocks of
// 64 of its part: see output_coordinate.
template <typename Plan>
struct LatentAccumulator {
  float output[Plan::kOutputs][Plan::kScores];
  float sum[2 * Plan::kOwn];

  __device__ __forceinline__ void hold_outputs() {
#pragma unroll
    for (int m = 0; m < Plan::kOutputs; ++m) hold(output[m]);
  }
};

__device__ __forceinline__ int output_coordinate(int m, int warp, int g,
                                                 int later) {
  return 128 * (m / 2) + 32 * (g / 2) + 16 * (m % 2) + 8 * (warp / 2) +
         4 * (warp % 2) + 2 * later + g % 2;
}

}  // namespace turbo
