// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The shared memory of a block of the kernel for many queries, and the division
// of work among its warps.
//
// Queries are the rows of the tensor core's results, 64 or more per warpgroup
// of consumers: S = Q K^T and O = P V. Producers decode each tile once for all
// consumers, to operands in shared memory.
#pragma once

#include <type_traits>

#include "common/bulk.cuh"
#include "common/segment.cuh"
#include "common/wgmma.cuh"
#include "extend_mma/offset_rows.cuh"
#include "extend_mma/ranges.cuh"
#include "extend_mma/stages.cuh"

namespace turbo {

constexpr int kTileRows = 64;  // queries of a warpgroup's product
constexpr int kGroupThreads = 128;
// Operands are in panels, whose rows have 64 numbers.
constexpr int kPanelColumns = 64;
constexpr int kRowBytes = 2 * kPanelColumns;
constexpr int kKeyPanels = HEAD_SIZE / kPanelColumns;
constexpr uint32_t kQueryPanelBytes = kTileRows * kRowBytes;
// The stride of operands is eight rows of a panel.
constexpr uint32_t kOperandLayout = wgmma_layout<1>(8 * kRowBytes);

// Segments of the ring: see segments.cuh.
constexpr int kSegments = 2;

// A segment as it is announced to consumers that write outputs.
struct OutputSegment : PassSegment {
  // The sequence's first query token among all, the number of its query tokens,
  // and its length, known before the previous kernel ends.
  int first_token, query_len, known_len;
};

// Whether shared memory has room for the rows' queries, and for limits of 32
// bits. Otherwise queries are found again when they are needed, and limits are
// counted from the sequence's end.
constexpr bool kNotesQueries = HEAD_SIZE <= 128;
using RowLimit = std::conditional_t<kNotesQueries, int, int16_t>;

// kConsumers, kProducers: warpgroups of a block. Producers take steps in turn.
// kBlocks: blocks per multiprocessor.
// kTiles: tiles of a step.
// kStages: steps that are decoded and not yet attended to.
// kCopies: a producer's steps whose pages are being copied.
// kRegisters: registers of a consumer. Producers have the others.
// kHoldsQueries: a consumer has its queries in registers, not in shared memory.
// kRowTiles: products of a consumer, each of other queries.
// kOverlaps: a consumer weighs scores while values are added, which takes more
//   registers.
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
  static_assert(kNotesQueries || !kEndsInOutputs,
                "outputs need 32-bit limits of rows");
  // Whether shared memory has room for queries. With OutputParams, queries that
  // registers hold are first copied there, as the model has them.
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
  // Parts of a product of values. For a product the compiler has no more
  // registers than a thread of the block has on average.
  static constexpr int kValueParts =
      HEAD_SIZE > 128 && 65536 / kBlocks / kThreads < 160 ? 2 : 1;
  // A producer has stages of its own.
  static_assert(kStages % kProducers == 0);
  // Whether shared memory has room for notes of offsets.
  static constexpr bool kNotesOffsets =
      KEY_OFFSET != 0 && (kNotesQueries || kRows < 128);
  using Cut = Cuts<kRows, kTiles>;
  static constexpr int kConsumerRegisters = kRegisters_;
  // Registers per lane, added over the block's warpgroups. Warps take multiples
  // of eight.
  static constexpr int kAllRegisters =
      65536 / kBlocks / kThreads / 8 * 8 * (kConsumers + kProducers);
  static constexpr int kLeftRegisters =
      (kAllRegisters - kConsumers * kConsumerRegisters) / kProducers / 8 * 8;
  static constexpr int kProducerRegisters =
      kLeftRegisters < 240 ? kLeftRegisters : 240;
};

// Operands are [panel][row][16-byte chunk, swizzled]. A row is a query, with
// its coordinates, or a token of K, with its coordinates, or a coordinate of V,
// with its tokens.
template <typename Plan, bool kHasQueries = Plan::kHasQueries>
struct alignas(1024) QueriesShared {
  uint8_t queries[Plan::kConsumers][Plan::kRowTiles][kKeyPanels][kTileRows]
                 [kRowBytes];
};
template <typename Plan>
struct QueriesShared<Plan, false> {};

// The segments that producers and consumers are at: see segments.cuh.
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
  // Factors of tiles' scores. They are read after the stage of keys is free
  // again.
  float factors[2 * Plan::kStages][Plan::kTiles];
  // See RowNote. A row sees the segment's tokens from its first to its limit.
  int rows[kNotesQueries ? Plan::kRows : 1];
  int firsts[Plan::kRows];
  RowLimit limits[Plan::kRows];
  // The same for raw tokens.
  int raw_firsts[Plan::kEndsInOutputs ? Plan::kRows : 1];
  RowLimit raw_limits[Plan::kEndsInOutputs ? Plan::kRows : 1];
  alignas(8) uint64_t full_keys[Plan::kStages];
  uint64_t full_values[Plan::kStages];
  uint64_t empty_keys[Plan::kStages];
  uint64_t empty_values[Plan::kStages];
  SegmentRing<Plan::kEndsInOutputs> ring;
  OffsetNotes<Plan::kRows, Plan::kNotesOffsets> offsets;
  Ranges ranges;
};

}  // namespace turbo
