// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What a block that relays latents has in shared memory, and how its warpgroups
// share the work.
//
// Producers take steps of 64 tokens in turn: they decode them, multiply them by
// the queries and weigh them. What they have decoded and the weights a consumer
// multiplies, which has the sum of values. So no warpgroup waits for its own
// products alone.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

// columns: query rows that attend at once, a multiple of 8. producers:
// warpgroups that decode. values: steps that are decoded and not yet summed.
// registers: of a consumer's lane, of which producers have what is left.
template <int columns, int producers, int values, int registers>
struct RelayPlan {
  static constexpr int kColumns = columns, kProducers = producers;
  static constexpr int kValues = values;
  // Steps of which producers may not know yet that they are summed.
  static constexpr int kSummed = producers > values ? producers : values;
  static constexpr int kThreads = (producers + 1) * kGroupThreads;
  static constexpr int kProducerWarps = 4 * producers;
  // As LatentPlan has them.
  static constexpr bool kEarly = true, kShares = false;
  static constexpr int kScores = columns / 2, kBlocks = columns / 8;
  static constexpr int kSets = producers, kOwn = kBlocks;
  static constexpr int kOutputs = LATENT_RANK / 64, kRuns = LATENT_RANK / 128;
  static constexpr int kRopeSteps = ROPE_SIZE / 16;
  // Those of a block, of which warps take multiples of eight a lane.
  static constexpr int kAllRegisters =
      65536 / kThreads / 8 * 8 * (producers + 1);
  static constexpr int kConsumerRegisters = registers;
  static constexpr int kLeftRegisters =
      (kAllRegisters - registers) / producers / 8 * 8;
  static constexpr int kProducerRegisters =
      kLeftRegisters < 240 ? kLeftRegisters : 240;
};

template <typename Plan>
struct RelayShared {
  static constexpr int kColumns = Plan::kColumns;
  static constexpr int kSets = 1, kWarps = Plan::kProducerWarps;
  // See LatentShared.
  uint8_t values[Plan::kValues][Plan::kOutputs][kValueBytes];
  __half query[kSteps][2][kColumns][8];
  __half weights[Plan::kValues][Plan::kBlocks][kStepTokens][8];
  float4 scaling[1][kColumns / 2];
  float2 across[Plan::kProducers][4][kColumns / 2];
  float2 sums[kColumns];  // references and sums
  // Of steps that raised references: what is summed so far is multiplied by.
  float2 rescale[Plan::kValues][kColumns / 2];
  int raises[Plan::kValues];
  alignas(8) int limits[kColumns];
  // Of a step: its references are known, it is decoded and weighed, and summed.
  uint64_t referred[Plan::kValues], full[Plan::kValues];
  uint64_t summed[Plan::kSummed];
};

// Where a step, of those that a block has had, is in a ring.
template <int size>
struct RelayStep {
  int index, parity;

  __device__ __forceinline__ explicit RelayStep(int number)
      : index(number % size), parity(number / size & 1) {}
};

}  // namespace turbo
