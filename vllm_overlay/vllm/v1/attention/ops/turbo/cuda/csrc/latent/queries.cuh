// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Queries as an operand of the tensor core.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

__device__ __forceinline__ float2 load_pair(const void* p, bool is_bf16) {
  const uint32_t bits = *static_cast<const uint32_t*>(p);
  if (is_bf16)
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
  return __half22float2(as_half2(bits));
}

// Write the rows of a segment to shared memory, in fp16 and with the softmax
// scale, and the tokens that columns see. Columns without a row are zero.
template <typename Shared>
__device__ __noinline__ void load_queries(Shared& shared, const LatentParams& p,
                                          const LatentSegment& segment) {
  constexpr int kColumns = Shared::kColumns;
  constexpr int kPairs = LATENT_RANK / 64, kAllPairs = kPairs + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int column = warp; column < kColumns; column += Shared::kWarps) {
    const int row = segment.first_row + column;
    const bool is_there = row < segment.num_rows;
    const int token = row / p.num_heads, head = row - token * p.num_heads;
    float2 x[kAllPairs] = {};
    float largest = 0.0f;
    if (is_there) {
      const int64_t t = p.first_token(segment.seq) + token;
      const uint16_t* latent = static_cast<const uint16_t*>(p.query) +
                               t * p.query_strides.token +
                               head * p.query_strides.head;
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        x[i] = load_pair(latent + 2 * (32 * i + lane), p.is_bf16);
      if (ROPE_SIZE != 0) {
        const uint16_t* rope = static_cast<const uint16_t*>(p.query_rope) +
                               t * p.rope_strides.token +
                               head * p.rope_strides.head;
        x[kPairs] = load_pair(rope + 2 * lane, p.is_bf16);
      }
#pragma unroll
      for (int i = 0; i < kAllPairs; ++i) {
        const float factor = p.score_factor * (i < kPairs ? LATENT_GAIN : 1.0f);
        x[i].x *= factor, x[i].y *= factor;
        largest = fmaxf(largest, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));
      }
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    const int exponent = max(exponent_of(largest) + 1 - kQueryExponent, -100);
    const float scale = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < kAllPairs; ++i) {
      if (i == kPairs && ROPE_SIZE == 0) break;
      const DepthPlace at = i < kPairs ? place_of_latent(2 * (32 * i + lane))
                                       : place_of_rope(2 * lane);
      *reinterpret_cast<__half2*>(
          &shared.query[at.step][at.place / 8][column][at.place % 8]) =
          __floats2half2_rn(x[i].x * scale, x[i].y * scale);
    }
    if (lane == 0) {
      shared.limits[column] =
          is_there
              ? segment.first_limit + (token - segment.first_row / p.num_heads)
              : segment.num_tokens;
#pragma unroll
      for (int set = 0; set < Shared::kSets; ++set) {
        float* own =
            reinterpret_cast<float*>(&shared.scaling[set][column / 2]) +
            column % 2;
        own[0] = power_of_two(exponent);
        own[2] = kNoReference;
      }
    }
  }
}

}  // namespace turbo
