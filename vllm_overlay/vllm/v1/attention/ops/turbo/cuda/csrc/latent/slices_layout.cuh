// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The layout of a block of decode attention by instructions of warps. A block
// has teams of four warps. Each warp of a team has a slice of all tokens'
// coordinates.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = 32 * kTeamWarps;
// The shared memory that a block can have on every GPU from 8.0 on.
constexpr int kLeastSharedBytes = 99 << 10;
// A lane's words of codes of a token in a slice, and the steps of the depth
// that they make. With a rope, a slice has one more step.
constexpr int kOwnWords = LATENT_RANK / (4 * kWordCodes * kTeamWarps);
constexpr int kOwnSteps = 2 * kOwnWords;
constexpr int kOwnRopes = kRopeSteps / kTeamWarps;
static_assert(kOwnWords == 2 || kOwnWords == 4);
static_assert(kOwnRopes <= 1 && kRopeSteps % kTeamWarps == 0);

// The plan of a kernel.
//
// columns: query rows that attend at once, a multiple of 8.
// teams: teams of a block.
// tiles: tiles that a team takes at once.
// stages: stages of so many tiles that a team has or waits for.
// held: blocks of columns whose queries stay in registers.
// bulk: whether copies are bulk copies (sm_90).
template <int columns, int teams, int tiles, int stages, int held, bool bulk>
struct SlicePlan {
  static constexpr int kColumns = columns;
  static constexpr int kTeams = teams;
  static constexpr int kTiles = tiles;
  static constexpr int kStages = stages;
  static constexpr int kHeld = held;
  static constexpr bool kBulk = bulk;
  static constexpr int kBlocks = columns / 8;  // of eight columns
  // Planes of scores, each of eight tokens and a block of columns.
  static constexpr int kPlanes = 2 * tiles * kBlocks;
  static constexpr int kOwnPlanes =
      (kPlanes + kTeamWarps - 1) / kTeamWarps;  // the most that a warp weighs
  static_assert(columns % 8 == 0 && held <= kBlocks &&
                (kBlocks - held) % 2 == 0);
  static_assert(4 % tiles == 0, "steps are of 64 tokens");
};

// Floats of a column of a block's result. Two steps are kPairPitch apart, so
// that lanes that write together, or read together, have different banks.
constexpr int kPairPitch = 36;
constexpr int kSlicePitch = kOwnSteps / 2 * kPairPitch;
constexpr int kJoinedPitch = kTeamWarps * kSlicePitch + 4;

template <typename Plan>
struct SliceShared {
  static constexpr int kColumns = Plan::kColumns;
  static constexpr int kWarps = kTeamWarps * Plan::kTeams;
  static constexpr int kSets = Plan::kTeams;
  // Core matrices of 16 bytes by eight columns, by step of the depth and half
  // of the step.
  __half query[kSteps][2][kColumns][8];
  union {
    uint8_t tiles[Plan::kTeams][Plan::kStages][Plan::kTiles][kTileSpace];
    float joined[Plan::kTeams][8][kJoinedPitch];
  };
  // Scores by slice. Plane 2 * (tile * kBlocks + n) + h has the tokens of rows
  // 8 * h + g. Its lane 4 * g + t has columns 8 * n + 2 * t and the next.
  float2 scores[Plan::kTeams][kTeamWarps][Plan::kPlanes][32];
  // Operands by lane, from both planes of a tile and a block of columns.
  uint32_t weights[Plan::kTeams][Plan::kPlanes / 2][32][2];
  float4 scaling[Plan::kTeams][kColumns / 2];
  float2 across[Plan::kTeams][Plan::kPlanes][4];  // by plane
  float2 sums[Plan::kTeams][kColumns];            // references and sums
  int limits[kColumns];                           // tokens that columns see
  uint64_t copied[Plan::kTeams][Plan::kStages];
};

// The running result of a warp. Lane 4 * g + t has columns 8 * n + 2 * t and
// the next, and places g and g + 8 of the warp's steps. It also has the sums
// over its tokens in the planes that the warp weighs.
template <typename Plan>
struct SliceAccumulator {
  float output[kOwnSteps][Plan::kBlocks][4];
  float2 sum[Plan::kOwnPlanes];
};

// The place of a thread.
struct SlicePlace {
  int team, warp, lane;

  // The first of the planes that a warp weighs, which are every fourth. It
  // differs between teams, because a warp may have one plane more than another.
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
