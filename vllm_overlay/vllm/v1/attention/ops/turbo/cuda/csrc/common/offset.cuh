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
__device__ __forceinline__ int offset_of_tile(int num_offsets, int tile) {
  return min(tile / kOffsetTiles + 1, num_offsets - 1);
}
__device__ __forceinline__ int offset_of_tile(const AttentionParams& p,
                                              int tile) {
  return offset_of_tile(p.num_offsets, tile);
}

// The first tile after `tile` that has another offset; INT_MAX for none.
__device__ __forceinline__ int next_offset_tile(const AttentionParams& p,
                                                int tile) {
  const int segment = tile / kOffsetTiles;
  return segment + 2 < p.num_offsets ? (segment + 1) * kOffsetTiles : INT_MAX;
}

// The parts of a column's scores that cached keys lack.
struct OffsetScores {
  float score;       // with an offset
  float first_gain;  // with the first token's offset, less that
};

// The four neighbouring lanes of a column all get its scores. All lanes of a
// warp call this function, but rarely: inlined it would take registers from the
// loops over tiles.
//
// row: the column's index among the sequence's queries; -1 for a column without
//   a query.
__device__ __noinline__ OffsetScores offset_scores(const AttentionParams& p,
                                                   int seq, int kv_head,
                                                   int offset, int row,
                                                   int lane) {
  constexpr int kColumnLanes = 4, kStep = kColumnLanes * kVector;
  constexpr int kInFlight = 8;
  const int num_heads = p.num_kv_heads * p.heads_per_kv;
  const int place = max(row, 0) / num_heads;
  const int first = lane % kColumnLanes * kVector;
  const auto* query =
      static_cast<const uint16_t*>(p.original_query) +
      (p.first_token(seq) + place) * p.original_strides.token +
      (max(row, 0) - place * num_heads) * p.original_strides.head + first;
  const float* m_first = p.key_offset + kv_head * HEAD_SIZE + first;
  const float* m = m_first + int64_t(offset) * p.num_kv_heads * HEAD_SIZE;
  float score = 0.0f, gain = 0.0f;
  if (row >= 0) {
#pragma unroll kInFlight
    for (int i = 0; i < HEAD_SIZE; i += kStep) {
      const float4 x =
          p.is_bf16
              ? load_vector(reinterpret_cast<const __nv_bfloat16*>(query + i))
              : load_vector(reinterpret_cast<const __half*>(query + i));
      const float4 y = __ldg(reinterpret_cast<const float4*>(m + i));
      const float4 z = __ldg(reinterpret_cast<const float4*>(m_first + i));
      score += x.x * y.x + x.y * y.y + (x.z * y.z + x.w * y.w);
      gain += x.x * (z.x - y.x) + x.y * (z.y - y.y) +
              (x.z * (z.z - y.z) + x.w * (z.w - y.w));
    }
  }
#pragma unroll
  for (int mask = 1; mask < kColumnLanes; mask *= 2) {
    score += __shfl_xor_sync(~0u, score, mask);
    gain += __shfl_xor_sync(~0u, gain, mask);
  }
  return {p.offset_factor * score, p.offset_factor * gain};
}

}  // namespace turbo
