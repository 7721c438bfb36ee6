// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The plan of a kernel of decode attention to latents.
#pragma once

#include "common/bulk.cuh"
#include "turbo_constants.h"

namespace turbo {

constexpr int kGroups = 2;  // warpgroups
constexpr int kGroupThreads = 128;
constexpr int kBlockThreads = kGroups * kGroupThreads;
constexpr int kBlockWarps = kBlockThreads / 32;

// kColumns: query rows that attend at once, a multiple of 8.
// kStages: tiles that a warp has or waits for.
// kEarly: whether a lane has all of a tile in registers before it is decoded.
//   The next tile may then be copied during the decoding.
// kShares: whether the warpgroups share a step's tokens, each with half of
//   their coordinates. They otherwise take steps in turn. Half of the
//   coordinates leave registers for more columns, but scores are then sums over
//   both halves.
template <int columns, int stages, bool early, bool shares>
struct LatentPlan {
  static constexpr int kColumns = columns;
  static constexpr int kStages = stages;
  static constexpr bool kEarly = early;
  static constexpr bool kShares = shares;
  static_assert(early || !shares);
  static constexpr int kScores = columns / 2;  // of a lane
  static constexpr int kBlocks = columns / 8;  // of eight columns
  // Steps at a time, and warpgroups that share a step.
  static constexpr int kSets = shares ? 1 : kGroups;
  static constexpr int kParts = kGroups / kSets;
  // Blocks of columns whose softmax a warpgroup does. If the number is odd,
  // both do the middle one, with the same result.
  static constexpr int kOwn = (kBlocks + kParts - 1) / kParts;
  // Units of a warpgroup's coordinates: blocks of 64 rows of O^T, a lane's runs
  // of words, and steps of the depth. A run is over 128 coordinates. The latent
  // and the rope have steps of their own.
  static constexpr int kOutputs = LATENT_RANK / 64 / kParts;
  static constexpr int kRuns = LATENT_RANK / 128 / kParts;
  static constexpr int kLatentSteps = LATENT_RANK / 16 / kParts;
  static constexpr int kRopeSteps = ROPE_SIZE / 16 / kParts;
};

// The place of a thread.
template <typename Plan>
struct Place {
  int group, warp, lane;  // in the block, in the group, in the warp

  // The index of the thread's step among the steps at a time, and of its
  // warpgroup among those that share the step.
  __device__ __forceinline__ int set() const {
    return Plan::kShares ? 0 : group;
  }
  __device__ __forceinline__ int part() const {
    return Plan::kShares ? group : 0;
  }
  // The first block of columns whose softmax the warpgroup does.
  __device__ __forceinline__ int first_block() const {
    return part() * (Plan::kBlocks - Plan::kOwn);
  }
  __device__ __forceinline__ int thread() const { return 32 * warp + lane; }

  __device__ __forceinline__ void sync_group() const {
    sync_threads(1 + group, kGroupThreads);
  }
  // Wait for the threads that have the same tokens.
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
