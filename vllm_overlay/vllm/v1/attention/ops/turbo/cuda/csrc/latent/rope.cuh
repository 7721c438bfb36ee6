// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Rotary keys in int8 with a scale per group: see
// reference.latent.quantize_rope. A lane has four coordinates.
#pragma once

#include <cfloat>

#include "common/vectors.cuh"
#include "store/scales.cuh"

namespace turbo {

constexpr bool kHasRope = ROPE_SIZE != 0;
constexpr int kRopeLanes = kHasRope ? ROPE_SIZE / kVector : 32;
// Tokens whose rotary keys a warp has.
constexpr int kWarpRopes = 32 / kRopeLanes;
constexpr int kRopeParts = SCALE_GROUP / kVector;
static_assert(32 % kRopeLanes == 0);

// The code of the smallest scale that holds a magnitude.
__device__ __forceinline__ int smallest_scale(float largest) {
  constexpr float kInverse = 1.0f / ROPE_CODE_MAX;
  // The quotient is rounded, and its code may be off by one. The search begins
  // one code below it.
  int code = scale_floor(__fmul_rn(largest, kInverse)) - 1;
  code = min(max(code, 0), SCALE_CODE_MAX);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const bool holds = __fmul_rn(scale_value(code), ROPE_CODE_MAX) >= largest;
    code = holds ? code : min(code + 1, SCALE_CODE_MAX);
  }
  return code;
}

// The codes of four coordinates, and the code of their group's scale. All lanes
// call it.
__device__ __forceinline__ uint32_t quantize_rope(float4 x, int& scale_code) {
  float y[kVector] = {x.x, x.y, x.z, x.w};
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    y[i] = y[i] == y[i] ? fminf(fmaxf(y[i], -FLT_MAX), FLT_MAX) : 0.0f;
    largest = fmaxf(largest, fabsf(y[i]));
  }
  scale_code = smallest_scale(reduce_parts<Largest, kRopeParts>(largest));
  const float reciprocal =
      __frcp_rn(fmaxf(scale_value(scale_code), SMALLEST_SCALE));
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    float code = __fmul_rn(y[i], reciprocal);
    code = fminf(fmaxf(code, -float(ROPE_CODE_MAX)), float(ROPE_CODE_MAX));
    // Round to an integer, ties to even.
    const uint32_t bits = __float_as_uint(__fadd_rn(code, kMagic));
    word |= (bits & 0xFFu) << (8 * i);
  }
  return word;
}

// row: that of the lane's token, or null for zeros.
// tile: null to write nothing.
template <bool kIsBf16>
__device__ __forceinline__ void store_rope(const uint16_t* row, uint8_t* tile,
                                           int token) {
  const int lane = threadIdx.x % kRopeLanes;
  using T = std::conditional_t<kIsBf16, __nv_bfloat16, __half>;
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (row != nullptr)
    x = load_vector(reinterpret_cast<const T*>(row) + kVector * lane);
  int scale_code;
  const uint32_t word = quantize_rope(x, scale_code);
  if (tile == nullptr) return;
  uint8_t* codes = tile + ROPE_OFFSET + token * ROPE_SIZE;
  reinterpret_cast<uint32_t*>(codes)[lane] = word;
  if (lane % kRopeParts == 0) {
    uint8_t* scales =
        tile + ROPE_SCALES_OFFSET + token * (ROPE_SIZE / SCALE_GROUP);
    scales[lane / kRopeParts] = static_cast<uint8_t>(scale_code);
  }
}

}  // namespace turbo
