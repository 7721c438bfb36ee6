// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The shared memory of a block of the extend kernel, and the division of work
// among its warps.
//
// Queries are the rows of the tensor core's results, 16 per consumer: S = Q K^T
// and O = P V. Producers decode each tile once for all consumers, to fragments
// in shared memory.
#pragma once

#include "extend_mma/offset_rows.cuh"
#include "extend_mma/ranges.cuh"
#include "extend_mma/stages.cuh"
#include "extend_mma/weigh.cuh"

namespace turbo {

constexpr int kWarpRows = 16;
constexpr int kFragmentOutputs = HEAD_SIZE / 16;  // fragments of V of a tile

// kConsumers, kProducers: warps of a block.
// kBlocks: blocks per multiprocessor for which there are registers.
// kSplits: half of the producers decode K, and half V.
// kOverlaps: a consumer has the scores of two parts of steps: see
//   consume_segment.
// kStages: steps that are decoded and not yet attended to.
// kCopies: a producer's steps whose pages are being copied.
template <int kConsumers_, int kProducers_, int kBlocks_, bool kSplits_,
          bool kOverlaps_, int kStages_, int kCopies_>
struct ExtendPlan {
  static constexpr int kConsumers = kConsumers_, kProducers = kProducers_;
  static constexpr int kBlocks = kBlocks_, kStages = kStages_;
  static constexpr int kCopies = kCopies_;
  static constexpr bool kSplits = kSplits_, kOverlaps = kOverlaps_;
  static constexpr int kRows = kWarpRows * kConsumers;
  static constexpr int kThreads = 32 * (kConsumers + kProducers);
  // Tiles of a step. One producer decodes a tile, or one its K and another its
  // V.
  static constexpr int kTiles = kSplits ? kProducers / 2 : kProducers;
  // Tiles of a part. A consumer has registers to attend to so many at once.
  static constexpr int kPartTiles = 2;
  static constexpr int kParts = kTiles / kPartTiles;
  static_assert(kTiles == kParts * kPartTiles);
  static constexpr int kTokens = kPartTiles * TILE_TOKENS;
  using Cut = Cuts<kRows, kTiles>;
};

template <typename Plan>
struct alignas(128) ExtendShared {
  // B fragments, by lane. A fragment of keys has eight tokens and two times 16
  // coordinates. One of values has a tile's tokens and two times eight
  // coordinates.
  uint4 keys[Plan::kStages][2 * Plan::kTiles][kLaneUnits][32];
  uint4 values[Plan::kStages][Plan::kTiles][kFragmentOutputs][32];
  uint8_t tiles[Plan::kTiles][Plan::kCopies][TILE_BYTES];
  // Factors of tiles' scores. They are read after the stage of keys is free
  // again.
  float factors[2 * Plan::kStages][Plan::kTiles];
  // See RowNote.
  int queries[Plan::kRows];
  int firsts[Plan::kRows];
  int hidden[Plan::kRows];
  uint64_t full_keys[Plan::kStages];
  uint64_t full_values[Plan::kStages];
  uint64_t empty_keys[Plan::kStages];
  uint64_t empty_values[Plan::kStages];
  OffsetNotes<Plan::kRows> offsets;
  Ranges ranges;
};

}  // namespace turbo
