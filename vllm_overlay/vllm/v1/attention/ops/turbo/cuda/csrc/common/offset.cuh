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

#include "common/attention_params.cuh"
#include "common/vectors.cuh"

namespace turbo {

constexpr int kOffsetTiles = OFFSET_SEGMENT / TILE_TOKENS;

// The row of a tile's offset, also for the first tile: see first_token_gain.
__device__ __forceinline__ int offset_of_tile(const AttentionParams& p,
                                              int tile) {
  return min(tile / kOffsetTiles + 1, p.num_offsets - 1);
}

// The part of a column's scores that cached keys lack. The four neighbouring
// lanes of a column all get it. All lanes of a warp call this function, but
// rarely: inlined it would take registers from the loops over tiles.
//
// row: the column's index among the sequence's queries; -1 for a column without
//   a query.
__device__ __noinline__ float offset_score(const AttentionParams& p, int seq,
                                           int kv_head, int offset, int row,
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
  const float* m = p.key_offset +
                   (int64_t(offset) * p.num_kv_heads + kv_head) * HEAD_SIZE +
                   first;
  float score = 0.0f;
  if (row >= 0) {
#pragma unroll kInFlight
    for (int i = 0; i < HEAD_SIZE; i += kStep) {
      const float4 x =
          p.is_bf16
              ? load_vector(reinterpret_cast<const __nv_bfloat16*>(query + i))
              : load_vector(reinterpret_cast<const __half*>(query + i));
      const float4 y = __ldg(reinterpret_cast<const float4*>(m + i));
      score += x.x * y.x + x.y * y.y + (x.z * y.z + x.w * y.w);
    }
  }
#pragma unroll
  for (int mask = 1; mask < kColumnLanes; mask *= 2)
    score += __shfl_xor_sync(~0u, score, mask);
  return p.offset_factor * score;
}

// By how much the score of the first token lacks more than those of the other
// tokens of its tile, because its offset is row 0. It is called like
// offset_score, for a tile 0, and added to the score of that tile's token 0.
__device__ __noinline__ float first_token_gain(const AttentionParams& p,
                                               int seq, int kv_head, int row,
                                               int lane) {
  const int of_others = offset_of_tile(p, 0);
  if (of_others == 0) return 0.0f;
  return offset_score(p, seq, kv_head, 0, row, lane) -
         offset_score(p, seq, kv_head, of_others, row, lane);
}

}  // namespace turbo
