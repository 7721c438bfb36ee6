// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Queries as an operand of the tensor core.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

__device__ __forceinline__ float2 pair_of(uint32_t bits, bool is_bf16) {
  if (is_bf16)
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
  return __half22float2(as_half2(bits));
}

// The place of a row's coordinate and the next.
template <typename Shared>
__device__ __forceinline__ __half2& query_pair(Shared& shared, int column,
                                               const DepthPlace& at) {
  return *reinterpret_cast<__half2*>(
      &shared.query[at.step][at.place / 8][column][at.place % 8]);
}

constexpr int kQueryPairs = LATENT_RANK / 64;  // of a lane

// A lane's pairs of a query's coordinates, of the latent and then of the rope.
struct LaneQuery {
  int token, head;
  bool is_there;
  uint32_t bits[kQueryPairs + 1];

  // Load a row of a segment, which may have no such row.
  __device__ __forceinline__ void load(const LatentParams& p,
                                       const LatentSegment& segment, int column,
                                       int lane) {
    const int row = segment.first_row + column;
    is_there = row < segment.num_rows;
    token = row / p.num_heads, head = row - token * p.num_heads;
#pragma unroll
    for (uint32_t& pair : bits) pair = 0;
    if (!is_there) return;
    const int64_t t = p.first_token(segment.seq) + token;
    const uint16_t* latent = static_cast<const uint16_t*>(p.query) +
                             t * p.query_strides.token +
                             head * p.query_strides.head + 2 * lane;
#pragma unroll
    for (int i = 0; i < kQueryPairs; ++i)
      bits[i] = *reinterpret_cast<const uint32_t*>(latent + 64 * i);
    if (ROPE_SIZE != 0) {
      const uint16_t* rope = static_cast<const uint16_t*>(p.query_rope) +
                             t * p.rope_strides.token +
                             head * p.rope_strides.head;
      bits[kQueryPairs] = *reinterpret_cast<const uint32_t*>(rope + 2 * lane);
    }
  }

  // Write the row, with the softmax scale and a power of two.
  template <typename Shared>
  __device__ __forceinline__ void store(Shared& shared, const LatentParams& p,
                                        const LatentSegment& segment,
                                        int column, int lane) {
    float2 x[kQueryPairs + 1];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i <= kQueryPairs; ++i) {
      x[i] = pair_of(bits[i], p.is_bf16);
      const float factor =
          p.score_factor * (i < kQueryPairs ? LATENT_GAIN : 1.0f);
      x[i].x *= factor, x[i].y *= factor;
      largest = fmaxf(largest, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    const int exponent = max(exponent_of(largest) + 1 - kQueryExponent, -100);
    const float scale = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i <= kQueryPairs; ++i) {
      if (i == kQueryPairs && ROPE_SIZE == 0) break;
      const DepthPlace at = i < kQueryPairs
                                ? place_of_latent(2 * (32 * i + lane))
                                : place_of_rope(2 * lane);
      query_pair(shared, column, at) =
          __floats2half2_rn(x[i].x * scale, x[i].y * scale);
    }
    if (lane != 0) return;
    shared.limits[column] =
        is_there
            ? segment.first_limit + (token - segment.first_row / p.num_heads)
            : segment.num_tokens;
#pragma unroll
    for (int set = 0; set < Shared::kSets; ++set) {
      float* own = reinterpret_cast<float*>(&shared.scaling[set][column / 2]) +
                   column % 2;
      own[0] = power_of_two(exponent);
      own[2] = kNoReference;
    }
  }
};

// Write the rows of a segment to shared memory, in fp16 and with the softmax
// scale, and the tokens that columns see. Columns without a row are zero.
//
// kAtOnce: rows that a warp loads at once.
template <int kAtOnce, typename Shared>
__device__ __forceinline__ void write_queries(Shared& shared,
                                              const LatentParams& p,
                                              const LatentSegment& segment) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  static_assert(kAtOnce == 1 ||
                Shared::kColumns % (Shared::kWarps * kAtOnce) == 0);
#pragma unroll 1
  for (int column = warp; column < Shared::kColumns;
       column += Shared::kWarps * kAtOnce) {
    LaneQuery rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      rows[i].load(p, segment, column + i * Shared::kWarps, lane);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      rows[i].store(shared, p, segment, column + i * Shared::kWarps, lane);
  }
}

// The same as a function of its own, so that a kernel's registers are free of
// it.
template <typename Shared>
__device__ __noinline__ void load_queries(Shared& shared, const LatentParams& p,
                                          const LatentSegment& segment) {
  write_queries<1>(shared, p, segment);
}

}  // namespace turbo
