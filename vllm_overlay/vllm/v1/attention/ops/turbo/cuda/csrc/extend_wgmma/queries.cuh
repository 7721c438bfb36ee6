// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A warpgroup's queries, and their products with keys. Coordinates are in the
// order of K's: see decode_tile.cuh.
#pragma once

#include "extend_mma/rows.cuh"
#include "extend_wgmma/original_queries.cuh"

namespace turbo {

// Barrier 0 is the block's. Barriers from 1 on are those of consumers.
__device__ __forceinline__ void sync_group(int group) {
  sync_threads(1 + group, kGroupThreads);
}

// The query of a block's row, by its index in the sequence, or -1.
template <typename Plan>
__device__ __forceinline__ int query_of(const RowsShared<Plan>& shared,
                                        const AttentionParams& p,
                                        const Segment& segment, int row) {
  if constexpr (kNotesQueries) return shared.rows[row];
  return RowNote(p, segment, segment.first_column + row).query;
}

// The queries of a lane's two rows, of which `row` is the first.
template <typename Plan>
__device__ __forceinline__ LaneQueries
queries_of(const RowsShared<Plan>& shared, const AttentionParams& p,
           const Segment& segment, int row) {
  return {query_of(shared, p, segment, row),
          query_of(shared, p, segment, row + 8)};
}

// The token that rows' limits are counted from.
__device__ __forceinline__ int limits_from(const Segment& segment) {
  return kNotesQueries ? 0 : segment.num_tokens;
}

template <typename Plan, bool kAreHeld = Plan::kHoldsQueries>
struct RowQueries;

// Queries in registers, as A fragments. Products then read half as much shared
// memory.
template <typename Plan>
struct RowQueries<Plan, true> {
  static_assert(Plan::kRowTiles * HEAD_SIZE <= 128);
  uint32_t fragments[Plan::kRowTiles][HEAD_SIZE / 4];

  // queries: those of the sequence.
  // first_row: the first of the lane's rows.
  __device__ __forceinline__ void load(RowsShared<Plan>& shared,
                                       const AttentionParams& p,
                                       const Segment& segment,
                                       const __half* queries, int,
                                       int first_row, int lane) {
#pragma unroll
    for (int m = 0; m < Plan::kRowTiles; ++m) {
      load_row_queries(
          fragments[m], queries,
          queries_of(shared, p, segment, first_row + kTileRows * m), lane);
    }
  }

  // Rotate the queries that have been copied.
  __device__ __forceinline__ void rotate(
      RowsShared<Plan>& shared,
      RowsAccumulator (&accumulators)[Plan::kRowTiles], const OutputParams& p,
      int group, int lane) {
#pragma unroll
    for (int m = 0; m < Plan::kRowTiles; ++m) {
      rotate_queries(fragments[m], accumulators[m].factor,
                     shared.queries[group][m][0][0], p, lane);
    }
  }

  // Issue the products of a step's scores for the m-th rows.
  __device__ __forceinline__ void multiply(float (&scores)[Plan::kTokens / 2],
                                           int m, uint32_t keys) const {
    constexpr uint32_t kKeyPanel = Plan::kTokens * kRowBytes / 16;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_SIZE / 16; ++k) {
      const uint32_t panel = k / 4, place = k % 4 * 2;
      const uint32_t* own = fragments[m] + 4 * k;
      wgmma_registers(
          scores, own[0], own[1], own[2], own[3],
          wgmma_descriptor(keys + panel * kKeyPanel + place, kOperandLayout),
          k > 0);
    }
    wgmma_commit();
  }
};

// Queries in shared memory.
template <typename Plan>
struct RowQueries<Plan, false> {
  uint32_t operand;

  __device__ __forceinline__ void load(RowsShared<Plan>& shared,
                                       const AttentionParams& p,
                                       const Segment& segment,
                                       const __half* p_queries, int group, int,
                                       int) {
    constexpr int kPairs = HEAD_SIZE / 16;  // of chunks
    const int thread = threadIdx.x % kGroupThreads;
#pragma unroll 2
    for (int index = thread; index < Plan::kGroupRows * kPairs;
         index += kGroupThreads) {
      const int row = index / kPairs, i = index % 4, j = index % kPairs / 4 * 2;
      uint8_t* target = shared.queries[group][row / kTileRows][0][0];
      const int query =
          query_of(shared, p, segment, Plan::kGroupRows * group + row);
      uint32_t chunks[2][4] = {};
      if (query >= 0) {
        const __half* p_query =
            p_queries + int64_t(query) * HEAD_SIZE + 2 * i * NUM_UNITS + j;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const __half* own = p_query + kLaneUnits * key_place(t);
          const uint32_t x = *reinterpret_cast<const uint32_t*>(own);
          const uint32_t y =
              *reinterpret_cast<const uint32_t*>(own + NUM_UNITS);
          chunks[0][t] = __byte_perm(x, y, 0x5410);
          chunks[1][t] = __byte_perm(x, y, 0x7632);
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int chunk = 4 * (j + k) + i;
        *reinterpret_cast<uint4*>(target + chunk / 8 * kQueryPanelBytes +
                                  swizzled(row % kTileRows, chunk % 8)) = {
            chunks[k][0], chunks[k][1], chunks[k][2], chunks[k][3]};
      }
    }
    begin(shared, group);
  }

  // Rotate the queries that have been copied, in place.
  __device__ __forceinline__ void rotate(
      RowsShared<Plan>& shared,
      RowsAccumulator (&accumulators)[Plan::kRowTiles], const OutputParams& p,
      int group, int lane) {
#pragma unroll
    for (int m = 0; m < Plan::kRowTiles; ++m) {
      uint8_t* queries = shared.queries[group][m][0][0];
      uint32_t fragments[HEAD_SIZE / 4];
      rotate_queries(fragments, accumulators[m].factor, queries, p, lane);
      store_queries(queries, fragments, lane);
    }
    begin(shared, group);
  }

  __device__ __forceinline__ void begin(RowsShared<Plan>& shared, int group) {
    fence_async_proxy();
    sync_group(group);
    operand = wgmma_operand(shared_address(shared.queries[group]), 16);
  }

  // Issue the products of a step's scores for the m-th rows.
  __device__ __forceinline__ void multiply(float (&scores)[Plan::kTokens / 2],
                                           int m, uint32_t keys) const {
    constexpr uint32_t kTileQueries = kKeyPanels * kQueryPanelBytes / 16;
    const uint32_t queries = operand + m * kTileQueries;
    constexpr uint32_t kQueryPanel = kQueryPanelBytes / 16;
    constexpr uint32_t kKeyPanel = Plan::kTokens * kRowBytes / 16;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_SIZE / 16; ++k) {
      const uint32_t panel = k / 4, place = k % 4 * 2;
      wgmma_deep(
          scores,
          wgmma_descriptor(queries + panel * kQueryPanel + place,
                           kOperandLayout),
          wgmma_descriptor(keys + panel * kKeyPanel + place, kOperandLayout),
          k > 0);
    }
    wgmma_commit();
  }
};

}  // namespace turbo
