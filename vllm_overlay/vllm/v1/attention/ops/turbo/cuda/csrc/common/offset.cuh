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

// The place of a query behind p.original_query, in vectors of kVector numbers.
//
// token: among the tokens of all sequences.
// head: among all query heads.
__device__ __forceinline__ int place_of_query(const AttentionParams& p,
                                              int token, int head) {
  const Strides& strides = p.original_strides;
  return int((token * strides.token + head * strides.head) / kVector);
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

// Products of eight rows' queries with m. Lanes 4 * i to 4 * i + 3 have row i.
//
// A lane multiplies neighbouring coordinates of all rows. So it needs few
// registers, and the rows' loads do not wait for each other. Inlined it would
// take registers from the loop over steps. Parameters come in registers,
// because the kernel's would be loaded one after another.
//
// place: of the row's query behind `queries`, in vectors of kVector numbers.
template <typename T>
__device__ __noinline__ float multiply_rows(const T* queries, int place,
                                            const float* m, int lane) {
  constexpr int kParts = HEAD_SIZE / kVector;
  constexpr int kRowLanes = kParts < 32 ? kParts : 32;
  constexpr int kSide = 32 / kRowLanes;  // rows side by side in a warp
  constexpr int kTurns = 8 / kSide;
  float sums[kTurns] = {};
#pragma unroll
  for (int part = 0; part < kParts; part += kRowLanes) {
    const int own = part + lane % kRowLanes;
    uint2 bits[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = turn * kSide + lane / kRowLanes;
      const int vector = __shfl_sync(~0u, place, 4 * row) + own;
      bits[turn] = reinterpret_cast<const uint2*>(queries)[vector];
    }
    const float4 y = __ldg(reinterpret_cast<const float4*>(m) + own);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const float4 x = load_vector(reinterpret_cast<const T*>(&bits[turn]));
      sums[turn] += x.x * y.x + x.y * y.y + (x.z * y.z + x.w * y.w);
    }
  }
  add_over_lanes<kRowLanes / 2, kTurns>(sums, lane);
  const int turn = lane / 4 / kSide, side = lane / 4 % kSide;
  return __shfl_sync(~0u, sums[0],
                     side * kRowLanes + turn * (kRowLanes / kTurns));
}

// The part of eight queries' scores that cached keys lack where a row of
// offsets was taken off. Lanes 4 * i to 4 * i + 3 have query i.
//
// place: see place_of_query; negative for none.
__device__ __forceinline__ float offset_score(const AttentionParams& p,
                                              int kv_head, int offset,
                                              int place, int lane) {
  const float* m =
      p.key_offset + (int64_t(offset) * p.num_kv_heads + kv_head) * HEAD_SIZE;
  const auto multiply = [&](const auto* queries) {
    return multiply_rows(queries, max(place, 0), m, lane);
  };
  const float score =
      p.is_bf16 ? multiply(static_cast<const __nv_bfloat16*>(p.original_query))
                : multiply(static_cast<const __half*>(p.original_query));
  return place < 0 ? 0.0f : p.offset_factor * score;
}

// Begin to bring a row of offsets to the L2 cache, which other layers' pages
// have displaced.
__device__ __forceinline__ void prefetch_offset(const AttentionParams& p,
                                                int kv_head, int offset,
                                                int lane) {
  constexpr int kLine = 128 / sizeof(float);
  const int place = kLine * lane;
  if (offset < p.num_offsets && place < HEAD_SIZE) {
    const float* m =
        p.key_offset + (int64_t(offset) * p.num_kv_heads + kv_head) * HEAD_SIZE;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(m + place));
  }
}

}  // namespace turbo
