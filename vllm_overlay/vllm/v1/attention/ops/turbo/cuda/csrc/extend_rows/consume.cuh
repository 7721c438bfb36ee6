// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Consumers: warpgroups that attend with 64 queries each to what is decoded.
#pragma once

#include <type_traits>

#include "common/offset.cuh"
#include "extend_rows/decode_tile.cuh"
#include "extend_rows/weigh.cuh"

namespace turbo {

// Barrier 0 is the block's, and the next are the consumers'.
__device__ __forceinline__ void sync_group(int group) {
  sync_threads(1 + group, kGroupThreads);
}

// Note which queries a warpgroup's rows are. Returns whether it has any.
template <typename Plan>
__device__ __forceinline__ bool note_rows(RowsShared<Plan>& shared,
                                          const AttentionParams& p,
                                          const Segment& segment, int group) {
  const int thread = threadIdx.x % kGroupThreads;
  const int query_len = p.num_query_tokens(segment.seq);
  const int first = segment.first_column + kGroupRows * group;
  sync_group(group);  // what was noted before is not read any more
  if (thread < kGroupRows) {
    const int column = first + thread;
    const int token = column / p.heads_per_kv;
    const bool inside = token < query_len;
    const int row = kGroupRows * group + thread;
    const int hidden = p.with_newest ? 0 : query_len - 1 - token;
    shared.rows[row] = inside ? p.query_of(token, segment.kv_head, column) : -1;
    // A row without a query sees all, of which nothing comes.
    shared.firsts[row] = inside ? p.first_seen(segment.seq, token) : 0;
    shared.limits[row] = segment.num_tokens - (inside ? hidden : 0);
  }
  sync_group(group);
  return first < query_len * p.heads_per_kv;
}

// A warpgroup's queries in shared memory, coordinates in the order of K's.
template <typename Plan>
struct SharedQueries {
  uint32_t operand;

  __device__ __forceinline__ SharedQueries(RowsShared<Plan>& shared,
                                           const __half* p_queries, int group,
                                           int) {
    constexpr uint32_t kPanelBytes = kGroupRows * kRowBytes;
    constexpr int kPairs = HEAD_SIZE / 16;  // of chunks
    const int thread = threadIdx.x % kGroupThreads;
    uint8_t* target = shared.queries[group][0][0];
#pragma unroll 2
    for (int index = thread; index < kGroupRows * kPairs;
         index += kGroupThreads) {
      const int row = index / kPairs, i = index % 4, j = index % kPairs / 4 * 2;
      const int query = shared.rows[kGroupRows * group + row];
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
        *reinterpret_cast<uint4*>(target + chunk / 8 * kPanelBytes +
                                  swizzled(row, chunk % 8)) = {
            chunks[k][0], chunks[k][1], chunks[k][2], chunks[k][3]};
      }
    }
    fence_async_proxy();
    sync_group(group);
    operand = wgmma_operand(shared_address(shared.queries[group]), 16);
  }

  // Add to the scores what 16 coordinates have of them.
  __device__ __forceinline__ void multiply(float (&scores)[Plan::kTokens / 2],
                                           int k, uint64_t keys) const {
    constexpr uint32_t kQueryPanel = kGroupRows * kRowBytes / 16;
    wgmma_deep(scores,
               wgmma_descriptor(operand + k / 4 * kQueryPanel + k % 4 * 2,
                                kOperandLayout),
               keys, k > 0);
  }
};

// The same as A fragments.
template <typename Plan>
struct HeldQueries {
  uint32_t words[HEAD_SIZE / 4];

  __device__ __forceinline__ HeldQueries(const RowsShared<Plan>& shared,
                                         const __half* p_queries, int,
                                         int first_row) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = shared.rows[first_row + 8 * r];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __half* own = p_queries + int64_t(query) * HEAD_SIZE +
                            2 * i * NUM_UNITS + kLaneUnits * key_place(t);
#pragma unroll
        for (int j = 0; j < kLaneUnits; j += 2) {
          uint32_t x = 0, y = 0;
          if (query >= 0) {
            x = *reinterpret_cast<const uint32_t*>(own + j);
            y = *reinterpret_cast<const uint32_t*>(own + NUM_UNITS + j);
          }
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int chunk = 4 * (j + k) + i;
            words[chunk / 2 * 4 + chunk % 2 * 2 + r] =
                __byte_perm(x, y, k == 0 ? 0x5410 : 0x7632);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&scores)[Plan::kTokens / 2],
                                           int k, uint64_t keys) const {
    wgmma_registers(scores, words[4 * k], words[4 * k + 1], words[4 * k + 2],
                    words[4 * k + 3], keys, k > 0);
  }
};

template <typename Plan>
using RowsQueries = std::conditional_t<Plan::kHoldsQueries, HeldQueries<Plan>,
                                       SharedQueries<Plan>>;

// Write a warpgroup's results.
template <typename Plan>
__device__ __forceinline__ void write_rows(const RowsShared<Plan>& shared,
                                           RowsAccumulator& acc,
                                           const AttentionParams& p,
                                           const Segment& segment,
                                           int first_row, int lane) {
  const int t = lane % 4;
  const int num_queries = p.num_queries();
  const int64_t first =
      (int64_t(segment.seq) * p.num_splits + segment.split) * num_queries;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = row_sum(acc.sum[r]);
    const int row = shared.rows[first_row + 8 * r];
    if (row < 0) continue;
    if (t == 0) {
      float* lse = p.partial_lse + first + row;
      *lse = acc.reference[r] + acc.missing[r] + log2f(total);
      if (segment.ends) {
#pragma unroll 1
        for (int s = segment.split + 1; s < p.num_splits; ++s)
          lse[int64_t(s - segment.split) * num_queries] = -INFINITY;
      }
    }
    const float factor = 1.0f / total;
    float* output = p.partial + (first + row) * HEAD_SIZE;
#pragma unroll
    for (int n = 0; n < HEAD_SIZE / 8; ++n) {
      const float2 x = {acc.output[4 * n + 2 * r] * factor,
                        acc.output[4 * n + 2 * r + 1] * factor};
      *reinterpret_cast<float2*>(output + value_coordinate(8 * n) + 2 * t) = x;
    }
  }
}

// Go on to tokens with another offset of K.
__device__ __forceinline__ void change_offset(
    RowsAccumulator& acc, const int* rows, const int* limits,
    const AttentionParams& p, const Segment& segment, int offset, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Of a token that the sequence does not have the query may be NaN.
    const int row = limits[8 * r] > 0 ? rows[8 * r] : -1;
    const float score =
        offset_score(p, segment.seq, segment.kv_head, offset, row, lane);
    // A row that has seen no token keeps none, also if its query is NaN.
    if (acc.reference[r] != kNoRowReference)
      acc.reference[r] += acc.missing[r] - score;
    acc.missing[r] = score;
  }
}

// Let steps go that are decoded for other warpgroups.
template <typename Plan>
__device__ __forceinline__ void pass_steps(RowsShared<Plan>& shared,
                                           Stage<Plan::kStages>& stage,
                                           int num_steps, int lane) {
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    wait_for(shared.full_keys[stage.index], stage.parity);
    arrive_warp(shared.empty_keys[stage.index], lane);
    wait_for(shared.full_values[stage.index], stage.parity);
    arrive_warp(shared.empty_values[stage.index], lane);
    stage.advance();
  }
}

// Ask for a step's scores.
template <typename Plan>
__device__ __forceinline__ void multiply_keys(
    float (&scores)[Plan::kTokens / 2], const RowsQueries<Plan>& queries,
    uint32_t keys) {
  constexpr uint32_t kKeyPanel = Plan::kTokens * kRowBytes / 16;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < HEAD_SIZE / 16; ++k) {
    const uint32_t panel = k / 4, place = k % 4 * 2;
    queries.multiply(
        scores, k,
        wgmma_descriptor(keys + panel * kKeyPanel + place, kOperandLayout));
  }
  wgmma_commit();
}

// Ask for the sum of a step's values.
template <typename Plan>
__device__ __forceinline__ void add_values(
    float (&output)[HEAD_SIZE / 2],
    const uint32_t (&weights)[Plan::kTokens / 4], uint32_t values) {
  constexpr uint32_t kValuePanel = HEAD_SIZE * kRowBytes / 16;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Plan::kTokens / 16; ++k) {
    const uint32_t panel = k / 4, place = k % 4 * 2;
    wgmma_registers(
        output, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
        weights[4 * k + 3],
        wgmma_descriptor(values + panel * kValuePanel + place, kOperandLayout),
        1);
  }
  wgmma_commit();
}

// Attend to a segment with a warpgroup's rows.
template <typename Plan>
__device__ __forceinline__ void consume_segment(RowsShared<Plan>& shared,
                                                Stage<Plan::kStages>& stage,
                                                const AttentionParams& p,
                                                const Segment& segment,
                                                int group, int lane) {
  constexpr int kTokens = Plan::kTokens;
  const int num_steps =
      (segment.last_tile - segment.first_tile + Plan::kTiles - 1) /
      Plan::kTiles;
  if (!note_rows(shared, p, segment, group)) {
    pass_steps(shared, stage, num_steps, lane);
    return;
  }
  const int64_t first_query = p.first_query(segment.seq);
  const int warp = threadIdx.x / 32 % 4;
  const int first_row = kGroupRows * group + 16 * warp + lane / 4;
  RowsAccumulator acc;
  acc.clear();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = shared.rows[first_row + 8 * r];
    acc.factor[r] = row >= 0 ? p.query_scale[first_query + row] : 0.0f;
  }
  const RowsQueries<Plan> queries(shared, p.query + first_query * HEAD_SIZE,
                                  group, first_row);
  const uint32_t all_keys = wgmma_operand(shared_address(shared.keys), 16);
  const uint32_t all_values = wgmma_operand(shared_address(shared.values), 16);
  constexpr uint32_t kKeyStage = sizeof(shared.keys[0]) / 16;
  constexpr uint32_t kValueStage = sizeof(shared.values[0]) / 16;
  float scores[kTokens / 2];
  // Weigh a step's scores, which are there, while the values of the one before
  // are being added.
  const auto weigh = [&](uint32_t (&weights)[kTokens / 4], int step) {
    hold(scores);
    arrive_warp(shared.empty_keys[stage.index], lane);
    const float* factors = shared.factors[stage.of_both()];
    float sum[2];
    bool is_done = weigh_rows(weights, sum, acc, scores, factors, p.soft_cap);
    wgmma_wait<0>();
    hold(acc.output);
    const int tile = segment.first_tile + step * Plan::kTiles;
    const int token = tile * TILE_TOKENS;
    if constexpr (KEY_OFFSET != 0) {
      static_assert(kOffsetTiles % Plan::kTiles == 0);
      const int offset = offset_of_tile(p, tile);
      if (step == 0 || offset != offset_of_tile(p, tile - Plan::kTiles)) {
        change_offset(acc, shared.rows + first_row, shared.limits + first_row,
                      p, segment, offset, lane);
        is_done = false;
      }
    }
    if (!is_done || segment.num_tokens - token < kTokens + p.most_hidden) {
      RowLimits limits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        limits[r] = {shared.firsts[first_row + 8 * r] - token,
                     shared.limits[first_row + 8 * r] - token};
      }
      weigh_anew(weights, sum, acc, scores, factors, limits, p.soft_cap, lane);
    }
    acc.sum[0] += sum[0], acc.sum[1] += sum[1];
  };
  // Ask for a step's scores, and then for the sum of the values before it.
  const auto attend = [&](const uint32_t (&before)[kTokens / 4],
                          uint32_t (&weights)[kTokens / 4], int step) {
    const Stage<Plan::kStages> last = stage;
    stage.advance();
    wait_for(shared.full_keys[stage.index], stage.parity);
    multiply_keys<Plan>(scores, queries, all_keys + stage.index * kKeyStage);
    wait_for(shared.full_values[last.index], last.parity);
    add_values<Plan>(acc.output, before, all_values + last.index * kValueStage);
    wgmma_wait<1>();
    weigh(weights, step);
    arrive_warp(shared.empty_values[last.index], lane);
  };
  const auto end = [&](const uint32_t (&weights)[kTokens / 4]) {
    wait_for(shared.full_values[stage.index], stage.parity);
    add_values<Plan>(acc.output, weights,
                     all_values + stage.index * kValueStage);
    wgmma_wait<0>();
    hold(acc.output);
    arrive_warp(shared.empty_values[stage.index], lane);
    stage.advance();
  };
  uint32_t even[kTokens / 4], odd[kTokens / 4];
  wait_for(shared.full_keys[stage.index], stage.parity);
  multiply_keys<Plan>(scores, queries, all_keys + stage.index * kKeyStage);
  wgmma_wait<0>();
  weigh(even, 0);
  int step = 1;
#pragma unroll 1
  for (; step + 1 < num_steps; step += 2) {
    attend(even, odd, step);
    attend(odd, even, step + 1);
  }
  if (step < num_steps) {
    attend(even, odd, step);
    end(odd);
  } else {
    end(even);
  }
  write_rows(shared, acc, p, segment, first_row, lane);
}

}  // namespace turbo
