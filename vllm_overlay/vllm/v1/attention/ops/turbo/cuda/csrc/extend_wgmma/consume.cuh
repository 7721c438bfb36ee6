// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Consumers: warpgroups that attend with 64 queries each, or more, to decoded
// tiles.
#pragma once

#include <type_traits>

#include "extend_wgmma/queries.cuh"
#include "extend_wgmma/segments.cuh"
#include "extend_wgmma/write.cuh"

namespace turbo {

template <typename Params>
constexpr bool kWithOutputs = std::is_same_v<Params, OutputParams>;
template <typename Params>
using SegmentOf =
    std::conditional_t<kWithOutputs<Params>, OutputSegment, PassSegment>;

// Write the queries of a warpgroup's rows to shared memory. Returns whether it
// has any.
template <typename Plan, typename Params>
__device__ __forceinline__ bool note_rows(RowsShared<Plan>& shared,
                                          const Params& p,
                                          const SegmentOf<Params>& segment,
                                          int group) {
  const int thread = threadIdx.x % kGroupThreads;
  int query_len, known_len;
  if constexpr (kWithOutputs<Params>) {
    query_len = segment.query_len, known_len = segment.known_len;
  } else {
    query_len = p.num_query_tokens(segment.seq);
    known_len = p.known_lens[segment.seq];
  }
  constexpr int kGroupRows = Plan::kGroupRows;
  const int first = segment.first_column + kGroupRows * group;
  sync_group(group);  // until the queries written before are no longer read
  if (thread < kGroupRows) {
    const RowNote note(p, segment, first + thread, query_len, known_len);
    const int row = kGroupRows * group + thread;
    if constexpr (kNotesQueries) shared.rows[row] = note.query;
    shared.firsts[row] = note.first;
    shared.limits[row] =
        segment.num_tokens - note.hidden - limits_from(segment);
    if constexpr (kWithOutputs<Params>) {
      // A sequence may be shorter than its query tokens. No query sees the
      // padding.
      const int first_raw =
          max(note.token + 1 - p.sliding_window, query_len - known_len);
      shared.raw_firsts[row] = note.is_inside ? first_raw : 0;
      shared.raw_limits[row] = note.is_inside ? note.token + 1 : query_len;
    }
  }
  sync_group(group);
  return first < query_len * p.heads_per_kv;
}

// Issue the products that add a step's values.
template <typename Plan>
__device__ __forceinline__ void add_values(
    float (&output)[HEAD_SIZE / 2],
    const uint32_t (&weights)[Plan::kTokens / 4], uint32_t values) {
  constexpr uint32_t kValuePanel = HEAD_SIZE * kRowBytes / 16;
  constexpr int kColumns = HEAD_SIZE / Plan::kValueParts;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Plan::kTokens / 16; ++k) {
    const uint32_t panel = k / 4, place = k % 4 * 2;
#pragma unroll
    for (int part = 0; part < Plan::kValueParts; ++part) {
      const uint32_t rows = part * (kColumns * kRowBytes / 16);
      wgmma_registers(
          reinterpret_cast<float (&)[kColumns / 2]>(
              output[part * (kColumns / 2)]),
          weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
          weights[4 * k + 3],
          wgmma_descriptor(values + panel * kValuePanel + rows + place,
                           kOperandLayout),
          1);
    }
  }
  wgmma_commit();
}

// Attend to a segment with a warpgroup's rows.
//
// end_queries: is called when queries are no longer read.
template <typename Plan, typename Params, typename EndQueries>
__device__ __forceinline__ void consume_segment(
    RowsShared<Plan>& shared, Stage<Plan::kStages>& stage, OffsetSteps& offsets,
    const Params& p, const SegmentOf<Params>& segment, int group, int lane,
    const EndQueries& end_queries) {
  constexpr int kTokens = Plan::kTokens, kRowTiles = Plan::kRowTiles;
  const int num_steps = num_steps_of<Plan::kTiles>(segment);
  const int first_tile = segment.first_tile, raw_tile = segment.raw_tile;
  const int num_tokens = segment.num_tokens;
  offsets.begin(segment);
  if (!note_rows(shared, p, segment, group)) {
    pass_steps(shared, stage, num_steps, lane, [&](int step) {
      if constexpr (Plan::kNotesOffsets) {
        if (!offsets.is_next(p, first_tile + step * Plan::kTiles)) return;
        wait_for(shared.offsets.full, offsets.parity);
        release_offset_scores(shared.offsets, offsets, lane);
      }
    });
    end_queries();
    return;
  }
  const int warp = threadIdx.x / 32 % 4;
  const int first_row = Plan::kGroupRows * group + 16 * warp + lane / 4;
  RowsAccumulator accumulators[kRowTiles];
  RowQueries<Plan> queries;
  if constexpr (kWithOutputs<Params>) {
    wait_copies<0>();
    __syncwarp();
    queries.rotate(shared, accumulators, p, group, of_turn(lane));
  } else {
    const int64_t first_query = p.first_query(segment.seq);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row =
            query_of(shared, p, segment, first_row + kTileRows * m + 8 * r);
        accumulators[m].factor[r] =
            row >= 0 ? p.query_scale[first_query + row] : 0.0f;
      }
    }
    queries.load(shared, p, segment, p.query + first_query * HEAD_SIZE, group,
                 first_row, lane);
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) accumulators[m].clear();
  const uint32_t all_keys = wgmma_operand(shared_address(shared.keys), 16);
  const uint32_t all_values = wgmma_operand(shared_address(shared.values), 16);
  constexpr uint32_t kKeyStage = sizeof(shared.keys[0]) / 16;
  constexpr uint32_t kValueStage = sizeof(shared.values[0]) / 16;
  float scores[kTokens / 2];
  bool is_new = false;  // whether a step has another offset than the last
  // Weigh a step's scores of the m-th rows, which are complete. The values that
  // were issued last are being added meanwhile.
  const auto weigh = [&](uint32_t (&weights)[kTokens / 4], int m, int step) {
    hold(scores);
    if (m == kRowTiles - 1) arrive_warp(shared.empty_keys[stage.index], lane);
    RowsAccumulator& acc = accumulators[m];
    const int first = first_row + kTileRows * m;
    const float* factors = shared.factors[stage.of_both()];
    float sum[2];
    const bool is_done =
        weigh_rows(weights, sum, acc, scores, factors, p.soft_cap);
    if constexpr (Plan::kOverlaps) {
      wgmma_wait_after<0>(sum[0] + sum[1]);
    } else {
      wgmma_wait<0>();
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) hold(accumulators[i].output);
    const int tile = first_tile + step * Plan::kTiles;
    const bool is_raw = kWithOutputs<Params> && tile >= raw_tile;
    const int token = (tile - (is_raw ? raw_tile : 0)) * TILE_TOKENS;
    static_assert(kOffsetTiles % Plan::kTiles == 0);
    if (m == 0) is_new = offsets.is_next(p, tile);
    if (is_raw || is_new || !is_done ||
        num_tokens - token < kTokens + p.most_hidden) {
      float gains[2] = {};
      if constexpr (KEY_OFFSET != 0) {
        if (is_new) {
          const bool has_first = tile == 0 && !is_raw;
          LaneOffsets found;
          if constexpr (Plan::kNotesOffsets) {
            wait_for(shared.offsets.full, offsets.parity);
            found = read_offset_scores(shared.offsets, first);
          } else {
            found = find_offset_scores(p, segment, offset_of_tile(p, tile),
                                       first, lane);
          }
          change_offset(gains, acc, found, has_first, lane);
          if constexpr (Plan::kNotesOffsets) {
            if (m == kRowTiles - 1)
              release_offset_scores(shared.offsets, offsets, lane);
          }
        }
      }
      const int* firsts = is_raw ? shared.raw_firsts : shared.firsts;
      const RowLimit* lasts = is_raw ? shared.raw_limits : shared.limits;
      const int end = limits_from(segment) - token;
      RowLimits limits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        limits[r] = {firsts[first + 8 * r] - token, lasts[first + 8 * r] + end};
      }
      weigh_anew(weights, sum, acc, scores, factors, limits, gains, p.soft_cap,
                 lane);
    }
    acc.sum[0] += sum[0], acc.sum[1] += sum[1];
  };
  // Issue the products of a step's scores for the m-th rows. Then issue the
  // products of values for the rows before, or for the step before.
  const auto attend = [&](const uint32_t (&before)[kTokens / 4],
                          uint32_t (&weights)[kTokens / 4], int m, int step) {
    const Stage<Plan::kStages> last = stage;
    if (m == 0) {
      stage.advance();
      wait_for(shared.full_keys[stage.index], stage.parity);
    }
    queries.multiply(scores, m, all_keys + stage.index * kKeyStage);
    if (m == 1 || kRowTiles == 1)
      wait_for(shared.full_values[last.index], last.parity);
    add_values<Plan>(accumulators[(m + kRowTiles - 1) % kRowTiles].output,
                     before, all_values + last.index * kValueStage);
    wgmma_wait<1>();
    weigh(weights, m, step);
    if (m == 0) arrive_warp(shared.empty_values[last.index], lane);
  };
  const auto end = [&](const uint32_t (&weights)[kTokens / 4]) {
    RowsAccumulator& acc = accumulators[kRowTiles - 1];
    if (kRowTiles == 1) wait_for(shared.full_values[stage.index], stage.parity);
    add_values<Plan>(acc.output, weights,
                     all_values + stage.index * kValueStage);
    wgmma_wait<0>();
    hold(acc.output);
    arrive_warp(shared.empty_values[stage.index], lane);
    stage.advance();
  };
  uint32_t even[kTokens / 4], odd[kTokens / 4];
  wait_for(shared.full_keys[stage.index], stage.parity);
  queries.multiply(scores, 0, all_keys + stage.index * kKeyStage);
  wgmma_wait<0>();
  weigh(even, 0, 0);
  if constexpr (kRowTiles == 2) {
    attend(even, odd, 1, 0);
#pragma unroll 1
    for (int step = 1; step < num_steps; ++step) {
      attend(odd, even, 0, step);
      attend(even, odd, 1, step);
    }
    end(odd);
  } else {
    int step = 1;
#pragma unroll 1
    for (; step + 1 < num_steps; step += 2) {
      attend(even, odd, 0, step);
      attend(odd, even, 0, step + 1);
    }
    if (step < num_steps) {
      attend(even, odd, 0, step);
      end(odd);
    } else {
      end(even);
    }
  }
  end_queries();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    write(shared, accumulators[m], p, segment, first_row + kTileRows * m, lane);
  }
}

// Attend to segments of the ring. Queries are copied ahead.
template <typename Plan>
__device__ __forceinline__ void consume_ring(RowsShared<Plan>& shared,
                                             Stage<Plan::kStages>& stage,
                                             OffsetSteps& offsets,
                                             const OutputParams& p, int group,
                                             int lane) {
  SegmentRing<true>& ring = shared.ring;
  SegmentPlace place;
  const auto begin = [&](const SegmentPlace& of) {
    const bool is_there = wait_for_segment(ring, of);
    if (is_there)
      copy_queries(shared, p, ring.segments[of.index], group, of_turn(lane));
    return is_there;
  };
  bool is_there = begin(place);
#pragma unroll 1
  while (is_there) {
    SegmentPlace next = place;
    next.advance();
    consume_segment(shared, stage, offsets, p, ring.segments[place.index],
                    group, lane, [&] {
                      // Products of other warps also read queries.
                      if (!Plan::kHoldsQueries) sync_group(group);
                      is_there = begin(next);
                    });
    arrive_warp(ring.empty[place.index], lane);
    place = next;
  }
}

}  // namespace turbo
