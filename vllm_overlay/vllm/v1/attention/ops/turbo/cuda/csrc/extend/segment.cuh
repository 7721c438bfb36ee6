// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention of a block to a segment of a sequence, for many queries of a KV
// head: the loop over its tiles, and the partial result.
//
// A step takes kStepTiles tiles. First each warp has tiles of its own and makes
// their scores and weights, for all queries; then each has coordinates of its
// own and adds the values of all tiles. So a code is decoded once a block.
#pragma once

#include "common/cap_scores.cuh"
#include "common/offset.cuh"
#include "extend/keys.cuh"
#include "extend/ranges.cuh"
#include "extend/values.cuh"

namespace turbo {

constexpr int kStepTiles = 8;
constexpr int kStepTokens = kStepTiles * TILE_TOKENS;
// Warps that copy tiles, two each: see TileCopies.
constexpr int kCopyWarps = kStepTiles / 2;

template <int kBlockColumns, int kWarps, int kStages>
struct alignas(128) ExtendShared {
  static constexpr int kColumnTiles = kBlockColumns / kColumns;
  static constexpr int kWarpTiles = kStepTiles / kWarps;
  static constexpr int kWarpOutputs = kNumOutputs / kWarps;
  static_assert(kWarpTiles * kWarps == kStepTiles);
  static_assert(kWarpOutputs * kWarps == kNumOutputs);
  static_assert(kTileWarps == 1);
  static_assert(kWarps >= kCopyWarps && kBlockColumns <= 32 * kWarps);

  uint8_t tiles[kStages][kStepTiles][TILE_BYTES];
  ColumnQueries<kColumnTiles> queries;
  ColumnWeights<kColumnTiles> weights[kStepTiles];
  // Of two columns each: factors of scores, and the running references.
  float4 references[kBlockColumns / 2];
  // By how much the references were raised, and by what that multiplies sums.
  float4 raises[kBlockColumns / 2];
  float of_warps[kWarps][kBlockColumns];
  int rows[kBlockColumns];  // the columns' queries of the sequence, or -1
  // The segment's tokens that they see: from the first, and up to a limit.
  int firsts[kBlockColumns];
  int limits[kBlockColumns];
  // Here, to leave registers to the scores.
  Segment segment;
  int last_first;  // the largest of firsts
  Ranges ranges;
  // What the scores that the references are of lack.
  float missing[KEY_OFFSET ? kBlockColumns : 1];
};

// A lane's columns 2 * t and 2 * t + 1 of each tile of columns.
template <int kBlockColumns, int kWarps, int kStages>
struct ExtendAccumulator {
  using Block = ExtendShared<kBlockColumns, kWarps, kStages>;
  float output[Block::kWarpOutputs][Block::kColumnTiles][4];
  float sum[Block::kColumnTiles][2];  // of the warp's own tiles

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < Block::kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < Block::kWarpOutputs; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) output[i][n][c] = 0.0f;
      }
      sum[n][0] = sum[n][1] = 0.0f;
    }
  }

  __device__ __forceinline__ void rescale(int n, float first, float second) {
    sum[n][0] *= first, sum[n][1] *= second;
#pragma unroll
    for (int i = 0; i < Block::kWarpOutputs; ++i) {
      output[i][n][0] *= first, output[i][n][1] *= second;
      output[i][n][2] *= first, output[i][n][3] *= second;
    }
  }
};

// Note which queries a segment's columns are, and their factors.
template <int kBlockColumns, int kWarps, int kStages>
__device__ __forceinline__ void note_queries(
    ExtendShared<kBlockColumns, kWarps, kStages>& shared,
    const AttentionParams& p, const Segment& segment, int64_t first_query) {
  const int thread = threadIdx.x;
  if (thread >= kBlockColumns) return;
  const int column = segment.first_column + thread;
  const int token = column / p.heads_per_kv;
  const int query_len = p.num_query_tokens(segment.seq);
  const bool inside = token < query_len;
  const int row = p.query_of(token, segment.kv_head, column);
  const int hidden = p.with_newest ? 0 : query_len - 1 - token;
  shared.rows[thread] = inside ? row : -1;
  const int begin = segment.first_tile * TILE_TOKENS;
  shared.firsts[thread] = max(p.first_seen(segment.seq, token), begin);
  shared.limits[thread] = inside ? segment.num_tokens - hidden : 0;
  if (thread == 0) {
    shared.last_first = max(p.first_seen(segment.seq, query_len - 1), begin);
  }
  float* reference =
      reinterpret_cast<float*>(&shared.references[thread / 2]) + thread % 2;
  reference[0] = inside ? p.query_scale[first_query + row] : 0.0f;
  reference[2] = 0.0f;
}

// Have a block go on to a token with another offset of K, or begin with such.
template <int kBlockColumns, int kWarps, int kStages>
__device__ __forceinline__ void change_offset(
    ExtendShared<kBlockColumns, kWarps, kStages>& shared,
    const AttentionParams& p, const Segment& segment, int offset, int token) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int n = warp; n < kBlockColumns / kColumns; n += kWarps) {
    const int column = kColumns * n + lane / 4;
    // Of a token that the sequence does not have the query may be NaN.
    const int row = shared.limits[column] > 0 ? shared.rows[column] : -1;
    const float score =
        offset_score(p, segment.seq, segment.kv_head, offset, row, lane);
    if (lane % 4 == 0) {
      if (shared.firsts[column] < token) {
        reinterpret_cast<float*>(
            &shared.references[column / 2])[2 + column % 2] +=
            shared.missing[column] - score;
      }
      shared.missing[column] = score;
    }
  }
}

// Raise the references to the largest scores of a step, from a token on. Those
// of columns that have seen none before may fall.
template <int kBlockColumns, int kWarps, int kStages, int kTiles>
__device__ void raise_references(
    ExtendShared<kBlockColumns, kWarps, kStages>& shared,
    ExtendAccumulator<kBlockColumns, kWarps, kStages>& acc,
    float (&exponents)[kTiles][kBlockColumns / kColumns][4], int token) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kBlockColumns / kColumns; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float largest = fmaxf(exponents[0][n][c], exponents[0][n][2 + c]);
#pragma unroll
      for (int i = 1; i < kTiles; ++i) {
        largest =
            fmaxf(largest, fmaxf(exponents[i][n][c], exponents[i][n][2 + c]));
      }
      largest = column_max(largest);
      if (g == 0) shared.of_warps[warp][kColumns * n + 2 * t + c] = largest;
    }
  }
  __syncthreads();
  if (const int column = threadIdx.x; column < kBlockColumns) {
    float largest = shared.of_warps[0][column];
#pragma unroll
    for (int w = 1; w < kWarps; ++w)
      largest = fmaxf(largest, shared.of_warps[w][column]);
    const bool is_new = shared.firsts[column] >= token;
    // A column that sees none of the tokens keeps its reference.
    if (largest == -INFINITY || !is_new) largest = fmaxf(largest, 0.0f);
    float* raised =
        reinterpret_cast<float*>(&shared.raises[column / 2]) + column % 2;
    raised[0] = largest;
    raised[2] = is_new ? 1.0f : exp2_approx(-largest);
    reinterpret_cast<float*>(&shared.references[column / 2])[2 + column % 2] +=
        largest;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kBlockColumns / kColumns; ++n) {
    const float4 raised = shared.raises[4 * n + t];
    acc.rescale(n, raised.z, raised.w);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      exponents[i][n][0] -= raised.x, exponents[i][n][1] -= raised.y;
      exponents[i][n][2] -= raised.x, exponents[i][n][3] -= raised.y;
    }
  }
}

// Make the weights of a warp's own tiles of a step, from tile first_tile of the
// sequence. All warps call it: it raises the block's references.
//
// soft_cap: of scores, with SOFT_CAP.
template <int kBlockColumns, int kWarps, int kStages>
__device__ __forceinline__ void weigh_tiles(
    ExtendShared<kBlockColumns, kWarps, kStages>& shared,
    ExtendAccumulator<kBlockColumns, kWarps, kStages>& acc,
    const uint8_t* tiles, int first_tile, bool ends, const SoftCap& soft_cap) {
  using Block = ExtendShared<kBlockColumns, kWarps, kStages>;
  constexpr int kTiles = Block::kWarpTiles,
                kTilesOfColumns = Block::kColumnTiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  float exponents[kTiles][kTilesOfColumns][4];
  column_scores<kTilesOfColumns>(exponents, tiles + warp * kTiles * TILE_BYTES,
                                 shared.queries, lane);
  // Whether some column has seen no token so far.
  const int step_token = first_tile * TILE_TOKENS;
  const bool begins = step_token <= shared.last_first;
  float above = -INFINITY;
#pragma unroll
  for (int n = 0; n < kTilesOfColumns; ++n) {
    const float4 r = shared.references[4 * n + t];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float (&x)[4] = exponents[i][n];
      if constexpr (SOFT_CAP != 0) {
        x[0] = soft_cap(x[0] * r.x) - r.z, x[1] = soft_cap(x[1] * r.y) - r.w;
        x[2] = soft_cap(x[2] * r.x) - r.z, x[3] = soft_cap(x[3] * r.y) - r.w;
      } else {
        x[0] = fmaf(x[0], r.x, -r.z), x[1] = fmaf(x[1], r.y, -r.w);
        x[2] = fmaf(x[2], r.x, -r.z), x[3] = fmaf(x[3], r.y, -r.w);
      }
      if (ends || begins) {
        const int token = step_token + (warp * kTiles + i) * TILE_TOKENS + g;
        const int2 first = *reinterpret_cast<const int2*>(
            &shared.firsts[kColumns * n + 2 * t]);
        const int2 limit = *reinterpret_cast<const int2*>(
            &shared.limits[kColumns * n + 2 * t]);
        x[0] = token >= first.x && token < limit.x ? x[0] : -INFINITY;
        x[1] = token >= first.y && token < limit.y ? x[1] : -INFINITY;
        x[2] = token + 8 >= first.x && token + 8 < limit.x ? x[2] : -INFINITY;
        x[3] = token + 8 >= first.y && token + 8 < limit.y ? x[3] : -INFINITY;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) above = fmaxf(above, x[c]);
    }
  }
  if (__syncthreads_or(begins || above > kMaxExponent))
    raise_references(shared, acc, exponents, step_token);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kTilesOfColumns; n += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float (&x)[4] = exponents[i][n + k / 2];
        const float weight[2] = {exp2_approx(x[k % 2 * 2]),
                                 exp2_approx(x[k % 2 * 2 + 1])};
        acc.sum[n + k / 2][0] += weight[0];
        acc.sum[n + k / 2][1] += weight[1];
        packed[k] =
            transposed(as_bits(__floats2half2_rn(weight[0], weight[1])));
      }
      shared.weights[warp * kTiles + i][n / 2][lane] = {packed[0], packed[1],
                                                        packed[2], packed[3]};
    }
  }
}

// Join the warps' sums and write the columns' results.
template <int kBlockColumns, int kWarps, int kStages>
__device__ void write_columns(
    ExtendShared<kBlockColumns, kWarps, kStages>& shared,
    ExtendAccumulator<kBlockColumns, kWarps, kStages>& acc,
    const AttentionParams& p, const Segment& segment) {
  using Block = ExtendShared<kBlockColumns, kWarps, kStages>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < Block::kColumnTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = acc.sum[n][c];
      sum = column_sum(sum);
      if (g == 0) shared.of_warps[warp][kColumns * n + 2 * t + c] = sum;
    }
  }
  __syncthreads();
  const int num_queries = p.num_queries();
  const int64_t first_row =
      (int64_t(segment.seq) * p.num_splits + segment.split) * num_queries;
  if (const int column = threadIdx.x; column < kBlockColumns) {
    float total = shared.of_warps[0][column];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += shared.of_warps[w][column];
    reinterpret_cast<float*>(&shared.raises[column / 2])[column % 2] =
        1.0f / total;
    if (const int row = shared.rows[column]; row >= 0) {
      float reference = reinterpret_cast<const float*>(
          &shared.references[column / 2])[2 + column % 2];
      if constexpr (KEY_OFFSET != 0) reference += shared.missing[column];
      float* lse = p.partial_lse + first_row + row;
      *lse = reference + log2f(total);
      if (segment.ends) {
#pragma unroll 1
        for (int s = segment.split + 1; s < p.num_splits; ++s)
          lse[int64_t(s - segment.split) * num_queries] = -INFINITY;
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < Block::kColumnTiles; ++n) {
    const float4 inverse = shared.raises[4 * n + t];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = shared.rows[kColumns * n + 2 * t + c];
      if (row < 0) continue;
      const float factor = c == 0 ? inverse.x : inverse.y;
      float* output = p.partial + (first_row + row) * HEAD_SIZE;
#pragma unroll
      for (int i = 0; i < Block::kWarpOutputs; ++i) {
        const int index = warp * Block::kWarpOutputs + i;
        output[output_coordinate(index, 0, lane)] =
            acc.output[i][n][c] * factor;
        output[output_coordinate(index, 1, lane)] =
            acc.output[i][n][2 + c] * factor;
      }
    }
  }
}

// Zero the scales of V of a step's tokens, which are of tiles that are not
// read.
__device__ __forceinline__ void clear_unseen(uint8_t* tiles, int num_tiles) {
  const int token = threadIdx.x;
  if (token < num_tiles * TILE_TOKENS) clear_value_scales(tiles, token);
}

// Zero the scales of V of a step's tokens from num_tokens.
__device__ __forceinline__ void clear_missing(uint8_t* tiles, int num_tokens) {
  const int token = threadIdx.x;
  if (token >= num_tokens && token < kStepTokens)
    clear_value_scales(tiles, token);
}

// Attend to a segment, whose first tile is the first of a step.
template <int kBlockColumns, int kWarps, int kStages>
__device__ __forceinline__ void attend_segment(
    ExtendShared<kBlockColumns, kWarps, kStages>& shared,
    const AttentionParams& p, const Segment& own_segment) {
  using Block = ExtendShared<kBlockColumns, kWarps, kStages>;
  static_assert(kStepTokens <= 32 * kWarps);
  constexpr uint32_t kStageBytes = kStepTiles * TILE_BYTES;
  // Steps whose copies are under way while one is attended to.
  constexpr int kAhead = kStages - 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint8_t* tiles = shared.tiles[0][0];
  // All threads are past the last barrier of the segment before this one, after
  // which only its columns' rows and factors are read: the next guards those.
  if (threadIdx.x == 0) shared.segment = own_segment;
  __syncthreads();
  const Segment& segment = shared.segment;
  TileCopies copies(p, segment, tiles + 2 * warp * TILE_BYTES, warp, kCopyWarps,
                    lane);
  if (warp >= kCopyWarps) copies.count = 0;
#pragma unroll 1
  for (int stage = 0; stage < kAhead; ++stage)
    copies.issue(stage, stage * kStageBytes);

  const int64_t first_query = p.first_query(segment.seq);
  note_queries(shared, p, segment, first_query);
  __syncthreads();
  load_columns<Block::kColumnTiles, kWarps>(shared.queries,
                                            p.query + first_query * HEAD_SIZE,
                                            shared.rows, warp, lane);
  ExtendAccumulator<kBlockColumns, kWarps, kStages> acc;
  acc.clear();

  uint32_t offset = 0, next = kAhead * kStageBytes;
  int step = 0;
#pragma unroll 1
  for (int tile = segment.first_tile; tile < segment.last_tile;
       tile += kStepTiles, ++step) {
    if constexpr (KEY_OFFSET != 0) {
      static_assert(kOffsetTiles % kStepTiles == 0);
      const bool is_first = tile == segment.first_tile;
      const int key_offset = offset_of_tile(p, tile);
      // The barrier after this comes before references are read, and that
      // before it after they were.
      if (is_first || key_offset != offset_of_tile(p, tile - kStepTiles))
        change_offset(shared, p, segment, key_offset, tile * TILE_TOKENS);
    }
    if constexpr (kAhead == 0) {
      __syncthreads();  // the step before this one has been attended to
      copies.issue(step, 0);
      wait_copies<0>();
      __syncthreads();
    } else {
      wait_copies<kAhead - 1>();
      __syncthreads();
      copies.issue(step + kAhead, next);
      next =
          next + kStageBytes == kStages * kStageBytes ? 0 : next + kStageBytes;
    }
    uint8_t* stage = tiles + offset;
    offset = offset + kStageBytes == kStages * kStageBytes
                 ? 0
                 : offset + kStageBytes;
    const int num_tokens = segment.num_tokens - tile * TILE_TOKENS;
    if (num_tokens < kStepTokens) clear_missing(stage, num_tokens);
    if constexpr (KEY_OFFSET != 0)
      clear_unseen(stage, segment.first_seen_tile - tile);
    weigh_tiles(shared, acc, stage, tile,
                num_tokens < kStepTokens + p.most_hidden, p.soft_cap);
    __syncthreads();
    const int num_tiles = min(segment.last_tile - tile, kStepTiles);
#pragma unroll 2
    for (int i = 0; i < num_tiles; ++i) {
      add_tile_values(acc.output, stage + i * TILE_BYTES, shared.weights[i],
                      warp * Block::kWarpOutputs, lane);
    }
  }
  write_columns(shared, acc, p, segment);
}

}  // namespace turbo
