// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What a block of decode attention by columns has, in shared memory and in
// registers.
#pragma once

#include "common/segment.cuh"
#include "common/wgmma.cuh"
#include "decode_columns/values.cuh"

namespace turbo {

// Tokens that a warpgroup multiplies at once: its 64 rows.
constexpr int kStepTiles = 4;
constexpr int kStepTokens = kStepTiles * TILE_TOKENS;
constexpr int kGroupThreads = 128;
// Scores above the running reference by more than this raise it: weights are
// fp16.
constexpr float kMaxScore = 8.0f;
constexpr float kNoReference = -1e30f;

// kColumns: queries of a KV head that attend at once, a multiple of 8. kSets:
// warpgroups, which take steps in turn. kStages: steps that a warpgroup has or
// waits for.
template <int columns, int sets, int stages>
struct ColumnsPlan {
  static constexpr int kColumns = columns, kSets = sets, kStages = stages;
  static constexpr int kScores = columns / 2;  // of a lane
  static constexpr int kBlocks = columns / 8;  // of columns
  static constexpr int kThreads = kGroupThreads * sets;
};

// Who a thread is.
struct Place {
  int set, warp, lane;  // of the block, of the set, of the warp

  __device__ __forceinline__ int thread() const { return 32 * warp + lane; }
  __device__ __forceinline__ void sync_set() const {
    sync_threads(1 + set, kGroupThreads);
  }
  __device__ __forceinline__ bool sync_set_or(bool x) const {
    return sync_threads_or(1 + set, kGroupThreads, x);
  }
};

template <typename Plan>
struct ColumnsShared {
  static constexpr int kColumns = Plan::kColumns, kSets = Plan::kSets;
  // A result's columns: padded for the banks that a warp writes.
  static constexpr int kResultStride = HEAD_SIZE + 1;
  static constexpr int kTileBytes = Plan::kStages * kStepTiles * kTileSpace;
  static constexpr int kResultBytes =
      (kColumns * kResultStride * 4 + 127) / 128 * 128;
  // Tiles of a set, and in the end its result.
  uint8_t tiles[kSets][kTileBytes > kResultBytes ? kTileBytes : kResultBytes];
  // In core matrices of eight columns or tokens and 16 bytes: steps of the
  // depth, its halves, and columns; columns, and tokens.
  __half query[kSteps][2][kColumns][8];
  // Of a step and the one before, which is still read.
  __half weights[kSets][2][Plan::kBlocks][kStepTokens][8];
  ValueScales scales[kSets][2];
  // Pairs of columns: factors of scores, and the references.
  float4 scaling[kSets][kColumns / 2];
  float2 across[kSets][4][kColumns / 2];  // of a warp's columns
  float2 sums[kSets][kColumns];           // references and sums
  int rows[kColumns];  // the columns' queries of the sequence, or -1
  // Tokens that they see: from the first, and up to a limit.
  int firsts[kColumns];
  int limits[kColumns];
  // What the scores that the references are of lack.
  float missing[KEY_OFFSET ? kSets : 1][kColumns];
  uint64_t copied[kSets][Plan::kStages];
};

// Some steps of a sequence, and some queries of a KV head.
struct ColumnsSegment {
  int seq;
  int kv_head;
  int first_column;     // of the KV head's queries, that of column 0
  int first_tile;       // of the sequence, that of step 0
  int first_seen_tile;  // those before it are not read
  int first_step;
  int last_step;
  int num_tokens;  // of the sequence
  // Of the columns: the largest of their firsts, and the least of their limits.
  int last_first;
  int first_limit;
  int split;
  bool ends;  // whether the last step is the sequence's
};

// The running result of a warpgroup. Lane 4 * g + t of a warp has, of columns
// 8 * n + 2 * t and the next, coordinates of rows g and g + 8 of the warp's
// fragments: see ValuePlace.
template <typename Plan>
struct ColumnsAccumulator {
  float output[kOutputs][Plan::kScores];
  float sum[2 * Plan::kBlocks];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) {
#pragma unroll
      for (int i = 0; i < Plan::kScores; ++i) output[m][i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2 * Plan::kBlocks; ++i) sum[i] = 0.0f;
  }
  __device__ __forceinline__ void hold_outputs() {
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) hold(output[m]);
  }
};

}  // namespace turbo
