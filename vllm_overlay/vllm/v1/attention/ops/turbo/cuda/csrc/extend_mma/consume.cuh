// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Consumers: warps that attend with 16 queries each to decoded tiles.
#pragma once

#include "extend_mma/multiply.cuh"
#include "extend_mma/rows.cuh"

namespace turbo {

// A part of a step, in the ring of stages.
template <typename Plan>
struct Part {
  Stage<Plan::kStages> stage;
  int index = 0;  // in the step

  __device__ __forceinline__ int tile() const {
    return Plan::kPartTiles * index;
  }
  // Advance to the next part, and release the stage after its last part.
  __device__ __forceinline__ void advance(uint64_t (&empty)[Plan::kStages],
                                          int lane) {
    if (++index < Plan::kParts) return;
    arrive_warp(empty[stage.index], lane);
    index = 0;
    stage.advance();
  }
};

// Write the queries of a warp's rows to shared memory. Returns whether it has
// any.
template <typename Plan>
__device__ __forceinline__ bool note_rows(ExtendShared<Plan>& shared,
                                          const AttentionParams& p,
                                          const Segment& segment, int warp,
                                          int lane) {
  const int first = segment.first_column + kWarpRows * warp;
  __syncwarp();  // until the queries written before are no longer read
  if (lane < kWarpRows) {
    const RowNote note(p, segment, first + lane);
    const int row = kWarpRows * warp + lane;
    shared.queries[row] = note.query;
    shared.firsts[row] = note.first;
    shared.hidden[row] = note.hidden;
  }
  __syncwarp();
  return first < p.num_query_tokens(segment.seq) * p.heads_per_kv;
}

// Turn a part's scores to weights.
//
// tile: the part's first tile.
// first_row: the first of the lane's two rows.
template <typename Plan>
__device__ __forceinline__ void weigh_part(
    uint32_t (&weights)[Plan::kTokens / 4], RowsAccumulator& acc,
    float (&scores)[Plan::kTokens / 2], ExtendShared<Plan>& shared,
    const float* factors, OffsetSteps& offsets, const AttentionParams& p,
    const Segment& segment, int tile, int first_row, int lane) {
  const int token = tile * TILE_TOKENS;
  float sum[2];
  const bool is_done =
      weigh_rows(weights, sum, acc, scores, factors, p.soft_cap);
  static_assert(kOffsetTiles % Plan::kTiles == 0);
  const bool is_new = offsets.is_next(p, tile);
  if (!is_done || is_new ||
      segment.num_tokens - token < Plan::kTokens + p.most_hidden) {
    float gains[2] = {};
    if constexpr (KEY_OFFSET != 0) {
      if (is_new) {
        wait_for(shared.offsets.full, offsets.parity);
        change_offset(gains, acc, read_offset_scores(shared.offsets, first_row),
                      tile == 0, lane);
        release_offset_scores(shared.offsets, offsets, lane);
      }
    }
    RowLimits limits[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      limits[r] = {shared.firsts[row] - token,
                   segment.num_tokens - shared.hidden[row] - token};
    }
    weigh_anew(weights, sum, acc, scores, factors, limits, gains, p.soft_cap,
               lane);
  }
  acc.sum[0] += sum[0], acc.sum[1] += sum[1];
}

// Attend to a segment with a warp's rows.
template <typename Plan>
__device__ __forceinline__ void consume_segment(ExtendShared<Plan>& shared,
                                                Stage<Plan::kStages>& stage,
                                                OffsetSteps& offsets,
                                                const AttentionParams& p,
                                                const PassSegment& segment,
                                                int warp, int lane) {
  using Scores = float[Plan::kTokens / 2];
  const int num_steps = num_steps_of<Plan::kTiles>(segment);
  offsets.begin(segment);
  if (!note_rows(shared, p, segment, warp, lane)) {
    pass_steps(shared, stage, num_steps, lane, [&](int step) {
      if constexpr (KEY_OFFSET != 0) {
        const int tile = segment.first_tile + step * Plan::kTiles;
        if (!offsets.is_next(p, tile)) return;
        wait_for(shared.offsets.full, offsets.parity);
        release_offset_scores(shared.offsets, offsets, lane);
      }
    });
    return;
  }
  const int first_row = kWarpRows * warp + lane / 4;
  const int64_t first_query = p.first_query(segment.seq);
  const LaneQueries own = {shared.queries[first_row],
                           shared.queries[first_row + 8]};
  uint32_t queries[HEAD_SIZE / 4];
  load_row_queries(queries, p.query + first_query * HEAD_SIZE, own, lane);
  RowsAccumulator acc;
  acc.clear();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = own.of_row[r];
    acc.factor[r] = query >= 0 ? p.query_scale[first_query + query] : 0.0f;
  }
  // The next part to be multiplied, and the part whose values are next.
  Part<Plan> next{stage}, part{stage};
  int tile = segment.first_tile;
  uint32_t weights[Plan::kTokens / 4];
  const auto weigh = [&](Scores& scores) {
    weigh_part<Plan>(weights, acc, scores, shared,
                     &shared.factors[part.stage.of_both()][part.tile()],
                     offsets, p, segment, tile, first_row, lane);
    tile += Plan::kPartTiles;
    if (part.index == 0)
      wait_for(shared.full_values[part.stage.index], part.stage.parity);
  };
  const auto keys = [&] {
    if (next.index == 0)
      wait_for(shared.full_keys[next.stage.index], next.stage.parity);
    return &shared.keys[next.stage.index][2 * next.tile()][0][lane];
  };
  const auto values = [&] {
    return &shared.values[part.stage.index][part.tile()][0][lane];
  };
  const auto multiply = [&](Scores& scores) {
    multiply_keys<Plan>(scores, queries, keys(), [](int) {});
    next.advance(shared.empty_keys, lane);
  };
  const auto attend = [&](Scores& scores) {
    weigh(scores);
    add_values<Plan>(acc.output, weights, values());
    part.advance(shared.empty_values, lane);
  };
  int parts = num_steps * Plan::kParts;
  Scores scores;
  multiply(scores);
  if constexpr (Plan::kOverlaps) {
    // The tensor core computes the next part's scores while a part's are
    // weighed.
    Scores others;
#pragma unroll 1
    for (; parts > 2; parts -= 2) {
      multiply(others);
      attend(scores);
      multiply(scores);
      attend(others);
    }
    if (parts == 2) {
      multiply(others);
      attend(scores);
      attend(others);
    } else {
      attend(scores);
    }
  } else {
    // The tensor core computes the next part's scores while values are added.
#pragma unroll 1
    for (; parts > 1; --parts) {
      weigh(scores);
      const uint4* next_keys = keys();
      multiply_and_add<Plan>(scores, queries, next_keys, acc.output, weights,
                             values());
      next.advance(shared.empty_keys, lane);
      part.advance(shared.empty_values, lane);
    }
    attend(scores);
  }
  stage = part.stage;
  const int64_t first = first_partial(p, segment);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = row_sum(acc.sum[r]);
    const int query = shared.queries[first_row + 8 * r];
    if (query < 0) continue;
    float* lse = write_partial(acc, p, first + query, r, total, lane);
    if (lane % 4 == 0) end_splits(lse, p, segment);
  }
}

}  // namespace turbo
