// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The shared memory and the registers of a block of decode attention by
// columns.
#pragma once

#include "common/segment.cuh"
#include "common/wgmma.cuh"
#include "decode_wgmma/values.cuh"

namespace turbo {

// Tokens that a warpgroup multiplies at once: its 64 rows.
constexpr int kStepTiles = 4;
constexpr int kStepTokens = kStepTiles * TILE_TOKENS;
constexpr int kGroupThreads = 128;
// A score above the running reference by more than this raises it, because
// weights are fp16.
constexpr float kMaxScore = 8.0f;
constexpr float kNoReference = -1e30f;

// kColumns: queries of a KV head that attend at once, a multiple of 8.
// kSets: warpgroups, which take steps in turn.
// kStages: steps that a warpgroup has or waits for.
template <int columns, int sets, int stages>
struct ColumnsPlan {
  static constexpr int kColumns = columns, kSets = sets, kStages = stages;
  static constexpr int kScores = columns / 2;  // of a lane
  static constexpr int kBlocks = columns / 8;  // of eight columns
  static constexpr int kThreads = kGroupThreads * sets;
};

// The place of a thread.
struct Place {
  int set, warp, lane;  // in the block, in the set, in the warp

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
  // The stride of a result's columns, padded for the banks that a warp writes.
  static constexpr int kResultStride = HEAD_SIZE + 1;
  static constexpr int kTileBytes = Plan::kStages * kStepTiles * kTileSpace;
  static constexpr int kResultBytes =
      (kColumns * kResultStride * 4 + 127) / 128 * 128;
  // Tiles of a set, and in the end its result.
  uint8_t tiles[kSets][kTileBytes > kResultBytes ? kTileBytes : kResultBytes];
  // Core matrices of eight columns and 16 bytes: [step of the depth][half of
  // the step][column].
  __half query[kSteps][2][kColumns][8];
  // Core matrices of eight tokens and 16 bytes. One set of weights is that of a
  // step, the other that of the step before, which is still read.
  __half weights[kSets][2][Plan::kBlocks][kStepTokens][8];
  ValueScales scales[kSets][2];
  // Per pair of columns: the factors of scores, then the references.
  float4 scaling[kSets][kColumns / 2];
  float2 across[kSets][4][kColumns / 2];  // by warp
  float2 sums[kSets][kColumns];           // references and sums
  int rows[kColumns];  // the queries of columns in the sequence, or -1
  // Tokens that columns see: from firsts to limits (exclusive).
  int firsts[kColumns];
  int limits[kColumns];
  // q.m, which is missing in the scores behind the references: see offset.cuh.
  float missing[KEY_OFFSET ? kSets : 1][kColumns];
  float first_gains[KEY_OFFSET ? kSets : 1][kColumns];  // see OffsetScores
  uint64_t copied[kSets][Plan::kStages];
};

// Some steps of a sequence, and some queries of a KV head.
struct ColumnsSegment {
  int seq;
  int kv_head;
  int first_column;     // column 0, among the KV head's queries
  int first_tile;       // the tile of step 0, in the sequence
  int first_seen_tile;  // tiles before it are not read
  int first_step;
  int last_step;
  int num_tokens;  // in the sequence
  // The largest of the columns' firsts, and the least of their limits.
  int last_first;
  int first_limit;
  int split;
  bool ends;  // whether it has the sequence's last step
};

// The running result of a warpgroup. Lane 4 * g + t of a warp has columns
// 8 * n + 2 * t and the next. It has the coordinates of rows g and g + 8 of the
// warp's fragments: see ValuePlace.
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
