// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// How a kernel of decode attention to latents is laid out.
#pragma once

#include "common/bulk.cuh"
#include "turbo_constants.h"

namespace turbo {

constexpr int kGroups = 2;  // warpgroups
constexpr int kGroupThreads = 128;
constexpr int kBlockThreads = kGroups * kGroupThreads;
constexpr int kBlockWarps = kBlockThreads / 32;

// kColumns: query rows that attend at once, a multiple of 8. kStages: tiles
// that a warp has or waits for. kEarly: whether a lane has all of a tile in
// registers before it is decoded; then the next may come while it is. kShares:
// whether the warpgroups share a step's tokens, each with half of their
// coordinates; else they take steps in turn. Half of the coordinates leave
// registers for more columns, but scores are then sums of both halves'.
template <int columns, int stages, bool early, bool shares>
struct LatentPlan {
  static constexpr int kColumns = columns;
  static constexpr int kStages = stages;
  static constexpr bool kEarly = early;
  static constexpr bool kShares = shares;
  static_assert(early || !shares);
  static constexpr int kScores = columns / 2;  // of a lane
  static constexpr int kBlocks = columns / 8;  // of columns
  // Steps at a time, and warpgroups that share one.
  static constexpr int kSets = shares ? 1 : kGroups;
  static constexpr int kParts = kGroups / kSets;
  // Blocks of columns whose softmax a warpgroup does: of an odd number both do
  // the middle one, alike.
  static constexpr int kOwn = (kBlocks + kParts - 1) / kParts;
  // Of a warpgroup's coordinates: rows of products of O^T, in 64s; runs of
  // words of a lane, of 128; and steps of the depth, of the latent and the
  // rope.
  static constexpr int kOutputs = LATENT_RANK / 64 / kParts;
  static constexpr int kRuns = LATENT_RANK / 128 / kParts;
  static constexpr int kLatentSteps = LATENT_RANK / 16 / kParts;
  static constexpr int kRopeSteps = ROPE_SIZE / 16 / kParts;
};

// Who a thread is.
template <typename Plan>
struct Place {
  int group, warp, lane;  // of the block, of the group, of the warp

  // Of the steps at a time, and of the warpgroups that share one.
  __device__ __forceinline__ int set() const {
    return Plan::kShares ? 0 : group;
  }
  __device__ __forceinline__ int part() const {
    return Plan::kShares ? group : 0;
  }
  // Of the columns whose softmax the warpgroup does, in blocks.
  __device__ __forceinline__ int first_block() const {
    return part() * (Plan::kBlocks - Plan::kOwn);
  }
  __device__ __forceinline__ int thread() const { return 32 * warp + lane; }

  __device__ __forceinline__ void sync_group() const {
    sync_threads(1 + group, kGroupThreads);
  }
  // Of the threads that have the same tokens.
  __device__ __forceinline__ void sync_set() const {
    if constexpr (Plan::kShares)
      __syncthreads();
    else
      sync_group();
  }
  __device__ __forceinline__ bool sync_set_or(bool x) const {
    return Plan::kShares ? sync_threads_or(0, kBlockThreads, x)
                         : sync_threads_or(1 + group, kGroupThreads, x);
  }
};

}  // namespace turbo
