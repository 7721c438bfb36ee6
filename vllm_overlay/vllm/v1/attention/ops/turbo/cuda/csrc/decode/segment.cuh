// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention of warps to a segment of a sequence: the loop over its tiles, and
// the partial result.
#pragma once

#include "common/segment.cuh"
#include "decode/keys.cuh"
#include "decode/offset.cuh"
#include "decode/partition.cuh"
#include "decode/values.cuh"

namespace turbo {

// The warps of a block that work on a segment together.
struct Team {
  int first, size;

  __device__ __forceinline__ explicit Team(int size)
      : first(threadIdx.x / 32 / size * size), size(size) {}
  __device__ __forceinline__ int index() const {
    return threadIdx.x / 32 - first;
  }
  __device__ __forceinline__ void sync() const {
    sync_tile();
    if (size > kTileWarps) {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + first / kTeamWarps),
                   "n"(32 * kTeamWarps)
                   : "memory");
    }
  }
};

template <int kQueries, int kWarps>
struct alignas(128) DecodeShared {
  static constexpr int kTotalColumns = kAllColumns<kQueries>;
  // Memory of a warp, or of the warps that share tiles.
  union {
    uint8_t tiles[2][2][TILE_BYTES];             // two, and the next two
    float output[kTotalColumns][HEAD_SIZE + 4];  // padded for the banks
  } warps[kWarps / kTileWarps];
  KeptQueries<kQueries> queries[kWarps];
  float reference[kWarps][kTotalColumns];
  // While a warp attends to tiles, with KEY_OFFSET, it has the gains of Visible
  // here.
  float sum[kWarps][kTotalColumns];
  // The queries of columns in the sequence, or -1.
  int rows[kWarps][kTotalColumns];
  TokenLimits limits[kWarps][kTotalColumns];  // tokens that columns see
  KeyScales<kPaired<kQueries>> key_scales[kWarps];
  SharedScores scores[kTileWarps > 1 ? kWarps / kTileWarps : 1];
};

// Write the queries of a segment's columns, and the tokens that they see.
template <int kQueries, int kWarps>
__device__ __forceinline__ void note_columns(
    DecodeShared<kQueries, kWarps>& shared, const AttentionParams& p,
    const Segment& segment, int lane) {
  if (lane < shared.kTotalColumns) {
    const int warp = threadIdx.x / 32;
    const int column = segment.first_column + lane % kQueries;
    // The columns of the first query token need no division.
    const int token = column < p.heads_per_kv ? 0 : column / p.heads_per_kv;
    const int query_len = p.num_query_tokens(segment.seq);
    const int row = p.query_of(token, segment.kv_head, column);
    shared.rows[warp][lane] = token < query_len ? row : -1;
    const int end = min(segment.num_tokens, segment.last_tile * TILE_TOKENS);
    const int hidden = p.with_raw ? 0 : query_len - 1 - token;
    int first = p.first_seen(segment.seq, token);
    if constexpr (KEY_OFFSET != 0) {
      first = max(first, 0);
      shared.sum[warp][lane] = 0.0f;
    }
    shared.limits[warp][lane] = {first - end,
                                 min(segment.num_tokens - hidden - end, 0)};
  }
  __syncwarp();
}

// Leave the results of eight columns, from first_column on, to the team.
template <int kQueries, int kWarps>
__device__ __forceinline__ void leave_results(
    DecodeShared<kQueries, kWarps>& shared, DecodeAccumulator& acc,
    int first_column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = first_column + 2 * t + c;
    acc.sum[c] = column_sum(acc.sum[c]);
    if (g == 0) {
      shared.reference[warp][column] = acc.reference[c];
      shared.sum[warp][column] = acc.sum[c];
    }
    float* output = shared.warps[warp / kTileWarps].output[column];
#pragma unroll
    for (int i = 0; i < kNumOutputs; ++i) {
      output[output_coordinate(i, 0, lane)] = acc.output[i][c];
      output[output_coordinate(i, 1, lane)] = acc.output[i][2 + c];
    }
  }
}

// For a warp's queries, replace the sums of the team's results by the weights
// of these results in the joined one. Write the LSE of the joined result. A
// lane has a query.
template <int kQueries, int kWarps>
__device__ __forceinline__ void weigh_results(
    DecodeShared<kQueries, kWarps>& shared, const AttentionParams& p,
    const Team& team, int64_t first_row) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kQueryColumns = kPaired<kQueries> ? 2 : 1;
  const int query = team.index() + lane * team.size;
  const int own_row = query < kQueries ? shared.rows[warp][query] : -1;
  if (own_row >= 0) {
    const int end = team.first + team.size;
    float largest = kNoReference, total = 0.0f;
#pragma unroll 1
    for (int w = team.first; w < end; w += kTileWarps) {
#pragma unroll
      for (int c = 0; c < kQueryColumns; ++c)
        largest = fmaxf(largest, shared.reference[w][query + 4 * c]);
    }
#pragma unroll 1
    for (int w = team.first; w < end; w += kTileWarps) {
#pragma unroll
      for (int c = 0; c < kQueryColumns; ++c) {
        const int column = query + 4 * c;
        const float weight = exp2_approx(shared.reference[w][column] - largest);
        total += weight * shared.sum[w][column];
        shared.sum[w][column] = weight;
      }
    }
    const float inverse = 1.0f / total;
#pragma unroll 1
    for (int w = team.first; w < end; w += kTileWarps) {
#pragma unroll
      for (int c = 0; c < kQueryColumns; ++c)
        shared.sum[w][query + 4 * c] *= inverse;
    }
    p.partial_lse[first_row + own_row] = largest + log2f(total);
  }
  __syncwarp();
}

// Join the team's results and write them.
template <int kQueries, int kWarps>
__device__ void write_partial(DecodeShared<kQueries, kWarps>& shared,
                              DecodeAccumulator (&acc)[kColumnTiles<kQueries>],
                              const AttentionParams& p, const Segment& segment,
                              const Team& team) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  sync_tile();  // the warp's tiles have been read
#pragma unroll
  for (int m = 0; m < kColumnTiles<kQueries>; ++m)
    leave_results(shared, acc[m], kColumns * m);
  team.sync();
  const int num_queries = p.num_queries();
  const int64_t first_row =
      (int64_t(segment.seq) * p.num_splits + segment.split) * num_queries;
  weigh_results(shared, p, team, first_row);
  constexpr int kQueryColumns = kPaired<kQueries> ? 2 : 1;
  // Two queries hide each other's loads. With longer heads two would take too
  // many registers.
  constexpr int kSideBySide = HEAD_SIZE <= 128 ? 2 : 1;
#pragma unroll kSideBySide
  for (int query = team.index(); query < kQueries; query += team.size) {
    const int own_row = shared.rows[warp][query];
    if (own_row < 0) break;
    const int64_t partial_row = first_row + own_row;
    float2 output[HEAD_SIZE / 64] = {};
#pragma unroll 1
    for (int w = team.first; w < team.first + team.size; w += kTileWarps) {
#pragma unroll
      for (int c = 0; c < kQueryColumns; ++c) {
        const int column = query + 4 * c;
        const float weight = shared.sum[w][column];
        const float2* row = reinterpret_cast<const float2*>(
            shared.warps[w / kTileWarps].output[column]);
#pragma unroll
        for (int i = 0; i < HEAD_SIZE / 64; ++i) {
          const float2 x = row[32 * i + lane];
          output[i].x += weight * x.x, output[i].y += weight * x.y;
        }
      }
    }
    float2* row =
        reinterpret_cast<float2*>(p.partial + partial_row * HEAD_SIZE);
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 64; ++i) row[32 * i + lane] = output[i];
    if (segment.ends) {
#pragma unroll 1
      for (int s = segment.split + 1 + lane; s < p.num_splits; s += 32) {
        p.partial_lse[partial_row + int64_t(s - segment.split) * num_queries] =
            -INFINITY;
      }
    }
  }
  team.sync();  // before tiles are copied over the results that were read
}

// Zero the scales of V of the first of two tiles. Only the second has been
// copied.
__device__ __forceinline__ void clear_unseen(uint8_t* tiles, int lane) {
  if (lane < TILE_TOKENS) clear_value_scales(tiles, lane);
}

// Zero the scales of V of the tokens from num_tokens on, in two tiles. Lanes
// wait for each other before scales are read.
__device__ __forceinline__ void clear_missing(uint8_t* tiles, int num_tokens,
                                              int lane) {
  static_assert(2 * TILE_TOKENS == 32);
  if (lane >= num_tokens) clear_value_scales(tiles, lane);
}

// Add two tiles to the running result.
//
// scales: room for the scales of the tiles' keys.
// shared: room for scores, for warps that share the tiles.
template <int kQueries>
__device__ __forceinline__ void attend_tiles(
    DecodeAccumulator (&acc)[kColumnTiles<kQueries>], const uint8_t* tiles,
    KeyScales<kPaired<kQueries>>& scales, const KeyCodes& codes,
    SharedScores& shared, Query<kQueries> (&queries)[kColumnTiles<kQueries>],
    const KeptQueries<kQueries>& kept, const Visible& visible,
    const SoftCap& soft_cap, int lane) {
  constexpr int kAcross = kColumnTiles<kQueries>;
  KeyProducts<kQueries> products[2];
  float scores[2][kAcross][4];
  uint32_t weights[2][kAcross][2];
  const auto multiply = [&](int i) {
    multiply_keys(products[i], tiles + i * TILE_BYTES, codes, queries, kept,
                  lane);
  };
  // As many products as registers have room for come before lanes wait for
  // scales.
  scales.decode(tiles, lane);
  multiply(0);
  if constexpr (kPaired<kQueries>) multiply(1);
  __syncwarp();
  key_scores<kQueries>(scores[0], products[0], tiles, scales, 0, lane);
  if constexpr (!kPaired<kQueries>) multiply(1);
  key_scores<kQueries>(scores[1], products[1], tiles, scales, TILE_TOKENS,
                       lane);
#pragma unroll
  for (int m = 0; m < kAcross; ++m) {
    float own[2][4];
    uint32_t packed[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) own[i][c] = scores[i][m][c];
    }
    if constexpr (kTileWarps > 1) join_scores(own, shared, lane);
    weigh<kQueries>(packed, acc[m], own, queries[m],
                    visible.of_columns(kColumns * m), soft_cap, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      weights[i][m][0] = packed[i][0], weights[i][m][1] = packed[i][1];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    add_values(acc, tiles + i * TILE_BYTES, weights[i], lane);
}

template <int kQueries, int kWarps>
__device__ __forceinline__ void attend_segment(
    DecodeShared<kQueries, kWarps>& shared, const AttentionParams& p,
    const Segment& segment, const Team& team) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile_index = warp / kTileWarps;
  uint8_t* tiles = shared.warps[tile_index].tiles[0][0];
  // The bytes of two tiles: two are copied while two others are attended to.
  constexpr uint32_t kPairBytes = 2 * TILE_BYTES;
  TileCopies copies(p, segment, tiles, team.index() / kTileWarps,
                    team.size / kTileWarps, lane);
  copies.issue(0, 0);
  if constexpr (KEY_OFFSET != 0)
    prefetch_offsets(p, segment, copies.first, lane);

  note_columns(shared, p, segment, lane);
  constexpr int kAcross = kColumnTiles<kQueries>;
  static_assert(kAcross == 1 || kTileWarps == 1);
  Query<kQueries> queries[kAcross];
  DecodeAccumulator acc[kAcross];
  const int64_t first_query = p.first_query(segment.seq);
#pragma unroll
  for (int m = 0; m < kAcross; ++m) {
    load_query(queries[m], p.query + first_query * HEAD_SIZE,
               p.query_scale + first_query, shared.rows[warp] + kColumns * m,
               shared.scores[tile_index], lane);
    queries[m].keep(shared.queries[warp][m], lane);
    acc[m].clear();
  }

  const KeyCodes codes(lane);
  uint32_t offset = 0;
  int num_tokens = min(segment.num_tokens, segment.last_tile * TILE_TOKENS) -
                   copies.first * TILE_TOKENS;
  if constexpr (KEY_OFFSET != 0) {
    if (copies.first == 0) {
      write_gains<kQueries>(shared.sum[warp], p, segment, shared.rows[warp],
                            shared.limits[warp], num_tokens, lane);
    }
    if (copies.first < segment.first_seen_tile) clear_unseen(tiles, lane);
  }
#pragma unroll 1
  for (int first = 0, num_steps; first < copies.count; first += num_steps) {
    copies.load_addresses(first + 1);
    num_steps = min(TileCopies::kSteps, copies.count - first);
    if constexpr (KEY_OFFSET != 0) {
      const int tile = copies.first + first * copies.stride;
      num_steps =
          min(num_steps, copies.steps_before(next_offset_tile(p, tile), tile));
    }
#pragma unroll 1
    for (int i = 0; i < num_steps; ++i) {
      wait_copies<0>();
      sync_tile();
      // Copy to the place of the tiles before, which have been read.
      copies.copy(i, kPairBytes - offset);
      if (num_tokens < 2 * TILE_TOKENS)
        clear_missing(tiles + offset, num_tokens, lane);
      if constexpr (kAcross == 1)
        queries[0].recall(shared.queries[warp][0], lane);
      const Visible visible = {num_tokens, p.most_hidden, shared.limits[warp],
                               shared.sum[warp]};
      attend_tiles(acc, tiles + offset, shared.key_scales[warp], codes,
                   shared.scores[tile_index], queries, shared.queries[warp],
                   visible, p.soft_cap, lane);
      offset = kPairBytes - offset;
      num_tokens -= copies.stride * TILE_TOKENS;
    }
    if constexpr (KEY_OFFSET != 0) {
      // The rows of the offsets of these steps and of the next ones. They are
      // computed here again, so that they take no registers in the loop.
      const int tile = copies.first + of_turn(first) * copies.stride;
      const int next_tile = tile + num_steps * copies.stride;
      const bool goes_on = first + num_steps < copies.count;
      const int num_offsets = of_turn(p.num_offsets);
      const int own = offset_of_tile(num_offsets, tile);
      const int next =
          goes_on ? offset_of_tile(num_offsets, next_tile) : kNoOffset;
      if (own != next) {
        change_offset<kQueries>(acc, p, segment, shared.rows[warp], own, next,
                                lane);
      }
    }
  }
  write_partial(shared, acc, p, segment, team);
}

}  // namespace turbo
