// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The part of scores that cached keys lack where an offset m was taken off
// them: q.m. It is computed from q as the model has it, in fp32, because scores
// may be in the thousands.
//
// Neighbouring tokens have the same m. Attention compares scores that lack the
// same q.m, and keeps its references relative to such scores. The references
// change where m changes. In the end they are made relative to whole scores.
#pragma once

#include <climits>

#include "common/attention_params.cuh"
#include "common/vectors.cuh"

namespace turbo {

constexpr int kOffsetTiles = OFFSET_SEGMENT / TILE_TOKENS;

// The row of a tile's offset. The first token of tile 0 has row 0.
__device__ __forceinline__ int offset_of_tile(const AttentionParams& p,
                                              int tile) {
  return min(tile / kOffsetTiles + 1, p.num_offsets - 1);
}

// The first tile after `tile` that has another offset; INT_MAX for none.
__device__ __forceinline__ int next_offset_tile(const AttentionParams& p,
                                                int tile) {
  const int segment = tile / kOffsetTiles;
  return segment + 2 < p.num_offsets ? (segment + 1) * kOffsetTiles : INT_MAX;
}

// Add kCount rows' numbers over 2 * kMask lanes. A lane ends with one row's
// sum, in sums[0]. Lanes of the same row are neighbours, and rows are in order.
template <int kMask, int kCount, int kSize>
__device__ __forceinline__ void add_over_lanes(float (&sums)[kSize], int lane) {
  if constexpr (kMask > 0) {
    if constexpr (kCount == 1) {
      sums[0] += __shfl_xor_sync(~0u, sums[0], kMask);
    } else {
      // A lane keeps half of the rows.
      const bool is_upper = (lane & kMask) != 0;
#pragma unroll
      for (int k = 0; k < kCount / 2; ++k) {
        const float low = sums[k], high = sums[k + kCount / 2];
        const float other = __shfl_xor_sync(~0u, is_upper ? low : high, kMask);
        sums[k] = (is_upper ? high : low) + other;
      }
    }
    add_over_lanes<kMask / 2, (kCount > 1 ? kCount / 2 : 1)>(sums, lane);
  }
}

// Products of eight rows' queries with m, less another vector unless that is
// null. Lanes 4 * i to 4 * i + 3 have row i.
//
// A lane multiplies neighbouring coordinates of all rows, so that their loads
// do not wait for each other.
//
// place: of the row's query behind `queries`; negative for a row without.
__device__ __forceinline__ float multiply_rows(const uint16_t* queries,
                                               int64_t place, const float* m,
                                               const float* less, bool is_bf16,
                                               int lane) {
  constexpr int kParts = HEAD_SIZE / kVector;
  constexpr int kRowLanes = kParts < 32 ? kParts : 32;
  constexpr int kSide = 32 / kRowLanes;  // rows side by side in a warp
  constexpr int kTurns = 8 / kSide;
  float sums[kTurns] = {};
#pragma unroll
  for (int part = 0; part < kParts; part += kRowLanes) {
    const int i = (part + lane % kRowLanes) * kVector;
    float4 y = __ldg(reinterpret_cast<const float4*>(m + i));
    if (less != nullptr) {
      const float4 z = __ldg(reinterpret_cast<const float4*>(less + i));
      y.x -= z.x, y.y -= z.y, y.z -= z.z, y.w -= z.w;
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = turn * kSide + lane / kRowLanes;
      const int64_t own = __shfl_sync(~0u, place, 4 * row);
      // A row without a query loads other numbers.
      const auto* x_bits =
          own >= 0 ? queries + own + i : reinterpret_cast<const uint16_t*>(m);
      const float4 x =
          is_bf16 ? load_vector(reinterpret_cast<const __nv_bfloat16*>(x_bits))
                  : load_vector(reinterpret_cast<const __half*>(x_bits));
      const float product = x.x * y.x + x.y * y.y + (x.z * y.z + x.w * y.w);
      sums[turn] += own >= 0 ? product : 0.0f;
    }
  }
  add_over_lanes<kRowLanes / 2, kTurns>(sums, lane);
  const int turn = lane / 4 / kSide, side = lane / 4 % kSide;
  return __shfl_sync(~0u, sums[0],
                     side * kRowLanes + turn * (kRowLanes / kTurns));
}

// The same for a loop over tiles, which calls it rarely: inlined it would take
// registers from that loop. Parameters come in registers, because those of the
// kernel would be loaded one after another.
__device__ __noinline__ float multiply_rows_rarely(const uint16_t* queries,
                                                   int64_t place,
                                                   const float* m,
                                                   const float* less,
                                                   bool is_bf16, int lane) {
  return multiply_rows(queries, place, m, less, is_bf16, lane);
}

// The part of eight rows' scores that cached keys lack where row `offset` was
// taken off, less the part for row `less` unless that is negative. Lanes 4 * i
// to 4 * i + 3 have row i.
//
// row: the row's query in the sequence; -1 for a row without.
template <bool kRarely>
__device__ __forceinline__ float offset_score(const AttentionParams& p, int seq,
                                              int kv_head, int offset, int less,
                                              int row, int lane) {
  const int num_heads = p.num_kv_heads * p.heads_per_kv;
  const int token = row / num_heads;
  const int64_t place =
      row < 0 ? -1
              : token * p.original_strides.token +
                    (row - token * num_heads) * p.original_strides.head;
  const int64_t stride = int64_t(p.num_kv_heads) * HEAD_SIZE;
  const float* first = p.key_offset + kv_head * HEAD_SIZE;
  const float* m = first + offset * stride;
  const float* m_less = less < 0 ? nullptr : first + less * stride;
  const auto* queries = static_cast<const uint16_t*>(p.original_query) +
                        p.first_token(seq) * p.original_strides.token;
  float score;
  if constexpr (kRarely) {
    score = multiply_rows_rarely(queries, place, m, m_less, p.is_bf16, lane);
  } else {
    score = multiply_rows(queries, place, m, m_less, p.is_bf16, lane);
  }
  return p.offset_factor * score;
}

}  // namespace turbo
