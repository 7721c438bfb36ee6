// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The shared memory and the registers of a block of decode attention to
// latents.
#pragma once

#include "common/wgmma.cuh"
#include "latent/partition.cuh"
#include "latent/tile.cuh"

namespace turbo {

// Bytes of a step's block of values: 64 coordinates of each token, in 128
// bytes.
constexpr int kValueBytes = 128 * kStepTokens;
// A score above the running reference by more than this raises it, because
// weights are fp16.
constexpr float kMaxScore = 8.0f;
constexpr float kNoReference = -1e30f;
// A query is scaled so that its largest coordinate is below 2 to this power.
constexpr int kQueryExponent = 10;

template <typename Plan>
struct LatentShared {
  static constexpr int kColumns = Plan::kColumns, kStages = Plan::kStages;
  static constexpr int kSets = Plan::kSets, kWarps = kBlockWarps;
  // A step's tokens in fp16, in blocks of 64 coordinates. A token's coordinates
  // are contiguous in a block, and its 16-byte chunks are swizzled.
  uint8_t values[kGroups][Plan::kOutputs][kValueBytes];
  // Core matrices of 16 bytes by eight columns, or by eight tokens. Queries are
  // by step of the depth, half of the step, and column. Weights are by block of
  // columns, and token.
  __half query[kSteps][2][kColumns][8];
  __half weights[kSets][Plan::kBlocks][kStepTokens][8];
  uint8_t tiles[4 * kSets][kStages][kTileSpace];
  // Scores that a warpgroup gives to the other one, which shares its tokens.
  float4 given[kGroups][Plan::kOwn][Plan::kShares ? kGroupThreads : 1];
  // Per pair of columns: the factors of scores, then the references.
  float4 scaling[kSets][kColumns / 2];
  float2 across[kSets][4][kColumns / 2];  // by warp
  float2 sums[kSets][kColumns];           // references and sums
  int limits[kColumns];                   // tokens that columns see
  uint64_t copied[4 * kSets][kStages];
};

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

// The running result of a warpgroup. Lane 4 * g + t of a warp has columns
// 8 * n + 2 * t and the next. It has rows 16 * warp + g and 16 * warp + g + 8,
// in blocks of 64 rows of its part: see output_coordinate.
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
