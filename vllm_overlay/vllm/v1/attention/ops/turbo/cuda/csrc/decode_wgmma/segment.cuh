// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention of a block to a segment of a sequence, for up to a few dozen
// queries of a KV head.
//
// Tokens are the rows of the tensor core's first product, and coordinates those
// of the second. Queries are the columns of both: S^T = K q^T, O^T = V^T P^T.
// Keys and values are decoded to fp16 in registers, as operands. A warp has the
// keys of one tile, and then a quarter of the coordinates of all tiles of its
// warpgroup. Warpgroups take steps of 64 tokens in turn, each on its own, so
// that the softmax of one overlaps the decoding of the others. Softmax is in
// base 2.
#pragma once

#include "common/offset.cuh"
#include "decode_wgmma/multiply.cuh"
#include "decode_wgmma/partial.cuh"
#include "decode_wgmma/queries.cuh"
#include "decode_wgmma/weigh.cuh"

namespace turbo {

// Adapt a warpgroup's references to the offset of K of its next step. Return
// the end of the steps that have it.
template <typename Plan>
__device__ __forceinline__ int change_offset(ColumnsShared<Plan>& shared,
                                             const AttentionParams& p,
                                             const ColumnsSegment& segment,
                                             int step, const Place& own) {
  static_assert(kOffsetTiles % kStepTiles == 0);
  if constexpr (KEY_OFFSET == 0) return segment.last_step;
  const int tile = segment.first_tile + step * kStepTiles;
  const int offset = offset_of_tile(p, tile), lane = own.lane;
  own.sync_set();  // until references have been raised and read
#pragma unroll 1
  for (int n = own.warp; n < Plan::kBlocks; n += 4) {
    const int column = 8 * n + lane / 4;
    // The query of a token that the sequence does not have may be NaN.
    const int row = shared.limits[column] > 0 ? shared.rows[column] : -1;
    const OffsetScores scores =
        offset_scores(p, segment.seq, segment.kv_head, offset, row, lane);
    if (lane % 4 == 0) {
      float& reference = reinterpret_cast<float*>(
          &shared.scaling[own.set][column / 2])[2 + column % 2];
      float& missing = shared.missing[own.set][column];
      if (reference != kNoReference) reference += missing - scores.score;
      missing = scores.score;
      shared.first_gains[own.set][column] = scores.first_gain;
    }
  }
  own.sync_set();
  return min((next_offset_tile(p, tile) - segment.first_tile) / kStepTiles,
             segment.last_step);
}

template <typename Plan>
__device__ __forceinline__ void attend_segment(ColumnsShared<Plan>& shared,
                                               StepQueue<Plan>& queue,
                                               const AttentionParams& p,
                                               const ColumnsSegment& segment,
                                               const Place& own) {
  queue.begin(segment, own);
#pragma unroll
  for (int stage = 0; stage < Plan::kStages - 1; ++stage) queue.issue(own);
  load_queries(shared, p, segment);
  fence_async_proxy();
  __syncthreads();
  ColumnsAccumulator<Plan> acc;
  acc.clear();
  const ValuePlace place(own.warp, own.lane);
  // A zero that the compiler takes for a lane's own number. It would load a
  // number that it knows to be uniform again for each look-up.
  const uint32_t zero = uint32_t(own.lane) & uint32_t(p.num_splits >> 31);
  const KeyTables tables = {KEY_FIRST_LOW ^ zero, KEY_SECOND_LOW ^ zero};
  int step = segment.first_step + own.set, parity = 0;
  do {
    const int last_step = change_offset(shared, p, segment, step, own);
#pragma unroll 1
    for (; step < last_step; step += Plan::kSets, parity ^= 1) {
      const int tile = segment.first_tile + step * kStepTiles;
      const uint8_t* tiles = shared.tiles[own.set] + queue.take();
      LaneKeys keys;
      keys.load(tiles + own.warp * kTileSpace, own.lane);
      const int own_tile = tile + own.warp;
      make_value_scales(shared.scales[own.set][parity],
                        tiles + own.warp * kTileSpace, own.warp,
                        !KEY_OFFSET || own_tile >= segment.first_seen_tile,
                        segment.num_tokens - own_tile * TILE_TOKENS, own.lane);
      // Wait until the last step's values have been added and its fragments are
      // free.
      wgmma_wait<0>();
      acc.hold_outputs();
      float scores[Plan::kScores];
      multiply_keys(shared, scores, keys, tables);
      weigh_step(shared, acc, scores, segment, step, parity, p.soft_cap, own);
      queue.issue(own);  // all warps have read the last step's tiles
      add_values(shared, acc, tiles, parity, place, own);
    }
    wgmma_wait<0>();
    acc.hold_outputs();
  } while (KEY_OFFSET != 0 && step < segment.last_step);
  leave_result(shared, acc, place, own);
  write_partial(shared, p, segment);
}

}  // namespace turbo
