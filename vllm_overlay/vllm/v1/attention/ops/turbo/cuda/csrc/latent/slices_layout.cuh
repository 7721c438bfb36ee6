// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What a block of decode attention by the tensor core's instructions of warps
// has: teams of four warps, each of which has a slice of all tokens'
// coordinates.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = 32 * kTeamWarps;
// Of shared memory, what blocks of all GPUs from 8.0 on can have.
constexpr int kLeastSharedBytes = 99 << 10;
// Words of codes of a token that a lane has, and steps of the depth that they
// are: of a slice. With a rope a slice has one more step, of that.
constexpr int kOwnWords = LATENT_RANK / (4 * kWordCodes * kTeamWarps);
constexpr int kOwnSteps = 2 * kOwnWords;
constexpr int kOwnRopes = kRopeSteps / kTeamWarps;
static_assert(kOwnWords == 2 || kOwnWords == 4);
static_assert(kOwnRopes <= 1 && kRopeSteps % kTeamWarps == 0);

// How a kernel is laid out.
//
// columns: query rows that attend at once, a multiple of 8. teams: of a block.
// tiles: that a team takes at once. stages: of so many tiles that it has or
// waits for. held: blocks of columns whose queries stay in registers. bulk:
// whether copies are bulk copies (sm_90).
template <int columns, int teams, int tiles, int stages, int held, bool bulk>
struct SlicePlan {
  static constexpr int kColumns = columns;
  static constexpr int kTeams = teams;
  static constexpr int kTiles = tiles;
  static constexpr int kStages = stages;
  static constexpr int kHeld = held;
  static constexpr bool kBulk = bulk;
  static constexpr int kBlocks = columns / 8;  // of columns
  // Of eight tokens and a block of columns.
  static constexpr int kPlanes = 2 * tiles * kBlocks;
  static constexpr int kOwnPlanes =
      (kPlanes + kTeamWarps - 1) / kTeamWarps;  // that a warp weighs, at most
  static_assert(columns % 8 == 0 && held <= kBlocks &&
                (kBlocks - held) % 2 == 0);
  static_assert(4 % tiles == 0, "steps are of 64 tokens");
};

// Floats of a column of a block's result: two steps are so far apart that
// neither the lanes that write nor those that read meet in a bank.
constexpr int kPairPitch = 36;
constexpr int kSlicePitch = kOwnSteps / 2 * kPairPitch;
constexpr int kJoinedPitch = kTeamWarps * kSlicePitch + 4;

template <typename Plan>
struct SliceShared {
  static constexpr int kColumns = Plan::kColumns;
  static constexpr int kWarps = kTeamWarps * Plan::kTeams;
  static constexpr int kSets = Plan::kTeams;
  // See LatentShared.
  __half query[kSteps][2][kColumns][8];
  union {
    uint8_t tiles[Plan::kTeams][Plan::kStages][Plan::kTiles][kTileSpace];
    float joined[Plan::kTeams][8][kJoinedPitch];
  };
  // Of slices. Plane 2 * (tile * kBlocks + n) + h has tokens of rows 8 * h + g,
  // and of lane 4 * g + t columns 8 * n + 2 * t and the next.
  float2 scores[Plan::kTeams][kTeamWarps][Plan::kPlanes][32];
  // Operands of all lanes, both planes of a tile and a block.
  uint32_t weights[Plan::kTeams][Plan::kPlanes / 2][32][2];
  float4 scaling[Plan::kTeams][kColumns / 2];
  float2 across[Plan::kTeams][Plan::kPlanes][4];  // of a plane's columns
  float2 sums[Plan::kTeams][kColumns];            // references and sums
  int limits[kColumns];                           // tokens that are seen
  uint64_t copied[Plan::kTeams][Plan::kStages];
};

// The running result of a warp. Lane 4 * g + t has, of columns 8 * n + 2 * t
// and the next, places g and g + 8 of its steps; and of the planes that it
// weighs the sums of its tokens.
template <typename Plan>
struct SliceAccumulator {
  float output[kOwnSteps][Plan::kBlocks][4];
  float2 sum[Plan::kOwnPlanes];
};

// Whose a thread is.
struct SlicePlace {
  int team, warp, lane;

  // The first of the planes that a warp weighs, every fourth: of teams others,
  // where not all have as many.
  __device__ __forceinline__ int first_plane() const {
    return (warp + 2 * team + team / 2) % kTeamWarps;
  }
  __device__ __forceinline__ void sync() const {
    sync_threads(1 + team, kTeamThreads);
  }
  __device__ __forceinline__ bool sync_or(bool condition) const {
    return sync_threads_or(1 + team, kTeamThreads, condition);
  }
};

}  // namespace turbo
