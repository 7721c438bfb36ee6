// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What a block of the kernel for many queries has in shared memory, and how its
// warps share the work.
//
// Queries are the rows of the tensor core's results, 64 of them or more a
// warpgroup of consumers: S = Q K^T and O = P V. Producers decode each tile
// once, for all of them, to operands in shared memory.
#pragma once

#include <type_traits>

#include "common/bulk.cuh"
#include "common/segment.cuh"
#include "common/wgmma.cuh"
#include "extend/ranges.cuh"
#include "extend/stages.cuh"

namespace turbo {

constexpr int kTileRows = 64;  // queries of a warpgroup's product
constexpr int kGroupThreads = 128;
// Operands have rows of 64 numbers in panels.
constexpr int kPanelColumns = 64;
constexpr int kRowBytes = 2 * kPanelColumns;
constexpr int kKeyPanels = HEAD_SIZE / kPanelColumns;
constexpr uint32_t kQueryPanelBytes = kTileRows * kRowBytes;
// Eight rows of a panel: the stride of operands.
constexpr uint32_t kOperandLayout = wgmma_layout<1>(8 * kRowBytes);

// Segments that are known to consumers.
constexpr int kSegments = 2;

// What is announced of one to those that end in outputs.
struct OutputSegment : PassSegment {
  // Of the sequence: where its query tokens begin among all, how many these
  // are, and its length as it is known early.
  int first_token, query_len, known_len;
};

// Whether there is room for the rows' queries, which else are found anew, and
// for what they see up to, which else is counted from the sequence's end.
constexpr bool kNotesQueries = HEAD_SIZE <= 128;
using RowLimit = std::conditional_t<kNotesQueries, int, int16_t>;

// kConsumers, kProducers: warpgroups of a block, of whose steps producers take
// turns. kBlocks: of a multiprocessor. kTiles: of a step. kStages: steps that
// are decoded and not yet attended to. kCopies: a producer's steps whose pages
// are being copied. kRegisters: of a consumer, of which producers have what is
// left. kHoldsQueries: a consumer has its queries in registers, not in shared
// memory. kRowTiles: products of a consumer, each of other queries. kOverlaps:
// a consumer weighs scores while values are added, which takes more registers.
// kEndsInOutputs: whether there are OutputParams.
template <int kConsumers_, int kProducers_, int kBlocks_, int kTiles_,
          int kStages_, int kCopies_, int kRegisters_, bool kHoldsQueries_,
          int kRowTiles_, bool kOverlaps_, bool kEndsInOutputs_>
struct RowsPlan {
  static constexpr int kConsumers = kConsumers_, kProducers = kProducers_;
  static constexpr int kBlocks = kBlocks_, kTiles = kTiles_;
  static constexpr int kStages = kStages_, kCopies = kCopies_;
  static constexpr bool kHoldsQueries = kHoldsQueries_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr bool kOverlaps = kOverlaps_;
  static constexpr bool kEndsInOutputs = kEndsInOutputs_;
  static_assert(kNotesQueries || !kEndsInOutputs, "their limits are no others");
  // Whether there is room for queries in shared memory: also those that are
  // held are copied there first, as the model has them.
  static constexpr bool kHasQueries = !kHoldsQueries || kEndsInOutputs;
  static constexpr int kGroupRows = kTileRows * kRowTiles;
  static_assert(kGroupRows <= kGroupThreads);
  static constexpr int kRows = kGroupRows * kConsumers;
  static constexpr int kThreads = kGroupThreads * (kConsumers + kProducers);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kTokens = kTiles * TILE_TOKENS;
  static constexpr int kWarpTiles = kTiles / 4;
  static_assert(kWarpTiles * 4 == kTiles);
  static constexpr int kValuePanels = kTokens / kPanelColumns;
  // Products of values, for the compiler has as many registers as the block
  // has a thread for one of them.
  static constexpr int kValueParts =
      HEAD_SIZE > 128 && 65536 / kBlocks / kThreads < 160 ? 2 : 1;
  // A producer has stages of its own.
  static_assert(kStages % kProducers == 0);
  using Cut = Cuts<kRows, kTiles>;
  static constexpr int kConsumerRegisters = kRegisters_;
  // Those of a block, of which warps take multiples of eight a lane.
  static constexpr int kAllRegisters =
      65536 / kBlocks / kThreads / 8 * 8 * (kConsumers + kProducers);
  static constexpr int kLeftRegisters =
      (kAllRegisters - kConsumers * kConsumerRegisters) / kProducers / 8 * 8;
  static constexpr int kProducerRegisters =
      kLeftRegisters < 240 ? kLeftRegisters : 240;
};

// Operands are [panel][row][16-byte chunk, swizzled]: queries by coordinates,
// tokens by coordinates, and coordinates by tokens.
template <typename Plan, bool kHasQueries = Plan::kHasQueries>
struct alignas(1024) QueriesShared {
  uint8_t queries[Plan::kConsumers][Plan::kRowTiles][kKeyPanels][kTileRows]
                 [kRowBytes];
};
template <typename Plan>
struct QueriesShared<Plan, false> {};

// What producers are at, and what consumers are: see segments.cuh.
template <bool kExists>
struct SegmentRing {
  OutputSegment segments[kSegments];
  alignas(8) uint64_t full[kSegments];
  uint64_t empty[kSegments];
};
template <>
struct SegmentRing<false> {};

template <typename Plan>
struct alignas(1024) RowsShared : QueriesShared<Plan> {
  uint8_t keys[Plan::kStages][kKeyPanels][Plan::kTokens][kRowBytes];
  uint8_t values[Plan::kStages][Plan::kValuePanels][HEAD_SIZE][kRowBytes];
  alignas(128) uint8_t
      tiles[4 * Plan::kProducers][Plan::kCopies][Plan::kWarpTiles][TILE_BYTES];
  // Of tiles' scores: they are read after the keys' place is free again.
  float factors[2 * Plan::kStages][Plan::kTiles];
  // See RowNote. The segment's tokens are up to a limit.
  int rows[kNotesQueries ? Plan::kRows : 1];
  int firsts[Plan::kRows];
  RowLimit limits[Plan::kRows];
  // The same of the query tokens as they are.
  int own_firsts[Plan::kEndsInOutputs ? Plan::kRows : 1];
  RowLimit own_limits[Plan::kEndsInOutputs ? Plan::kRows : 1];
  alignas(8) uint64_t full_keys[Plan::kStages];
  uint64_t full_values[Plan::kStages];
  uint64_t empty_keys[Plan::kStages];
  uint64_t empty_values[Plan::kStages];
  SegmentRing<Plan::kEndsInOutputs> ring;
  Ranges ranges;
};

}  // namespace turbo
