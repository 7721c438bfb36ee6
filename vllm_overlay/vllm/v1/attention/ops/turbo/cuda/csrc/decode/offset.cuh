// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The offset of K in decodes: see common/offset.cuh.
//
// A warp needs q.m late: where m changes, as the difference, and at the end. It
// copies m to L2 in time, because the tiles of all warps would delay m's loads.
// Only the sequence's first token needs a difference at once.
#pragma once

#include "common/offset.cuh"
#include "common/segment.cuh"
#include "common/warp.cuh"
#include "decode/values.cuh"

namespace turbo {

// No row of offsets.
constexpr int kNoOffset = -1;

// Lanes that multiply a query by m. With kPaired columns 4 to 7 have the
// queries of columns 0 to 3.
template <int kQueries>
constexpr int kQueryLanes = kPaired<kQueries> ? 8 : 4;

// A row of offsets of a segment's KV head, from a coordinate on. The compiler
// would hold parts of the address in registers during the loop over tiles.
__device__ __forceinline__ const float* offset_row(const AttentionParams& p,
                                                   const Segment& segment,
                                                   int offset, uint32_t first) {
  const int row = offset * of_turn(p.num_kv_heads) + segment.kv_head;
  return p.key_offset + int64_t(row) * HEAD_SIZE + first;
}

// Copy a tile's m to L2, and the next one if the segment has it. Half of the
// lanes copy each.
__device__ __forceinline__ void prefetch_offsets(const AttentionParams& p,
                                                 const Segment& segment,
                                                 int tile, int lane) {
  constexpr int kRowLanes = 16, kSector = 32 / int(sizeof(float));
  const uint32_t own = of_turn(lane);
  const int own_tile =
      min(tile + int(own) / kRowLanes * kOffsetTiles, segment.last_tile - 1);
  const float* m = offset_row(p, segment, offset_of_tile(p, own_tile),
                              own % kRowLanes * kSector);
#pragma unroll
  for (int i = 0; i < HEAD_SIZE; i += kRowLanes * kSector) {
    if (i + own % kRowLanes * kSector < HEAD_SIZE) prefetch(m + i);
  }
}

// Add products of a lane's coordinates to four sums.
template <typename T, int kVectors>
__device__ __forceinline__ void add_products(float4& sums,
                                             const uint2 (&query)[kVectors],
                                             const float4 (&m)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float4 x = load_vector(reinterpret_cast<const T*>(&query[i]));
    sums.x += x.x * m[i].x, sums.y += x.y * m[i].y;
    sums.z += x.z * m[i].z, sums.w += x.w * m[i].w;
  }
}

// q.m of kLanes neighbouring lanes, which all get it, or q.(m - other). All
// lanes of a warp call this function, but rarely: inlined it would take
// registers from the loop over tiles.
//
// Pointers are to a lane's first coordinates. `query` may be null. `other` is
// null in all lanes or in none.
template <int kLanes>
__device__ __noinline__ float multiply_offset(const uint16_t* query,
                                              bool is_bf16, const float* m,
                                              const float* other) {
  constexpr int kStep = kLanes * kVector, kVectors = HEAD_SIZE / kStep;
  constexpr int kInFlight = kVectors < 8 ? kVectors : 8;
  float4 sums = {};
  if (query != nullptr) {
#pragma unroll 1
    for (int first = 0; first < HEAD_SIZE; first += kInFlight * kStep) {
      uint2 x[kInFlight];
      float4 y[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int own = first + i * kStep;
        x[i] = *reinterpret_cast<const uint2*>(query + own);
        y[i] = __ldg(reinterpret_cast<const float4*>(m + own));
      }
      if (other != nullptr) {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const float4 z =
              __ldg(reinterpret_cast<const float4*>(other + first + i * kStep));
          y[i].x -= z.x, y[i].y -= z.y, y[i].z -= z.z, y[i].w -= z.w;
        }
      }
      if (is_bf16) {
        add_products<__nv_bfloat16>(sums, x, y);
      } else {
        add_products<__half>(sums, x, y);
      }
    }
  }
  float score = sums.x + sums.y + (sums.z + sums.w);
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2)
    score += __shfl_xor_sync(~0u, score, mask);
  return score;
}

// The part of scores that keys lack where a row of offsets was taken off, less
// that of another row, if there is one. Each kQueryLanes lanes get a query's.
//
// rows: the queries of eight columns, in the sequence; -1 for none.
template <int kQueries>
__device__ __forceinline__ float offset_part(const AttentionParams& p,
                                             const Segment& segment,
                                             const int* rows, int offset,
                                             int other, uint32_t lane) {
  constexpr int kLanes = kQueryLanes<kQueries>;
  const int row = rows[lane / kLanes];
  const int num_heads = of_turn(p.num_kv_heads) * p.heads_per_kv;
  // The queries of the first token need no division.
  const int token = row < num_heads ? 0 : row / num_heads;
  const uint32_t first = lane % kLanes * kVector;
  const uint32_t place = p.first_token(segment.seq) + token;
  const uint32_t head = row - token * num_heads;
  const uint16_t* query = static_cast<const uint16_t*>(p.original_query) +
                          place * p.original_strides.token +
                          head * p.original_strides.head + first;
  const float* other_m =
      other < 0 ? nullptr : offset_row(p, segment, other, first);
  return p.offset_factor * multiply_offset<kLanes>(
                               row < 0 ? nullptr : query,
                               of_turn(p.is_bf16) != 0,
                               offset_row(p, segment, offset, first), other_m);
}

// Make references that lack q.m of a row of offsets lack that of another row,
// or none.
//
// rows: the queries of all columns.
template <int kQueries>
__device__ __forceinline__ void change_offset(
    DecodeAccumulator (&acc)[kColumnTiles<kQueries>], const AttentionParams& p,
    const Segment& segment, const int* rows, int offset, int other, int lane) {
  constexpr int kLanes = kQueryLanes<kQueries>;
  const uint32_t own = of_turn(lane);
  const int source = 2 * kLanes * (own % (16 / kLanes));
#pragma unroll
  for (int m = 0; m < kColumnTiles<kQueries>; ++m) {
    const float part = offset_part<kQueries>(p, segment, rows + kColumns * m,
                                             offset, other, lane);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float less = __shfl_sync(~0u, part, source + c * kLanes);
      float& reference = acc[m].reference[c];
      // A column that has seen no token keeps kNoReference, even if its query
      // is NaN.
      if (reference != kNoReference) reference += less;
    }
  }
}

// Write what the scores of the sequence's first token lack beside those of its
// tile. A column that does not see the token keeps a gain of zero.
//
// end: the end of the segment's tokens.
template <int kQueries>
__device__ __forceinline__ void write_gains(
    float* gains, const AttentionParams& p, const Segment& segment,
    const int* rows, const TokenLimits* limits, int end, int lane) {
  constexpr int kLanes = kQueryLanes<kQueries>;
  const uint32_t own = of_turn(lane);
#pragma unroll
  for (int m = 0; m < kColumnTiles<kQueries>; ++m) {
    const float gain = offset_part<kQueries>(p, segment, rows + kColumns * m, 0,
                                             offset_of_tile(p, 0), own);
    const int column = kColumns * m + own / kLanes;
    if (own % kLanes == 0 && limits[column].first == -end) gains[column] = gain;
  }
}

}  // namespace turbo
