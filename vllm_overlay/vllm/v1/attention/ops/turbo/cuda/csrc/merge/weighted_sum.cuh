// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A row's sum of vectors, weighted by the softmax of their scores. Vectors and
// scores come one after the other.
#pragma once

#include "common/numbers.cuh"
#include "merge/inverse_rotation.cuh"

namespace turbo {

// An LSE as a reference for others; zero for -inf.
__device__ __forceinline__ float or_zero(float lse) {
  return lse == -INFINITY ? 0.0f : lse;
}

// Load 16 bytes, bypassing L1, if the condition holds; zeros otherwise.
__device__ __forceinline__ float4 load_if(bool condition, const float* p) {
  float4 x;
  asm volatile(
      "{\n"
      ".reg .pred is_loaded;\n"
      "setp.ne.s32 is_loaded, %4, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@is_loaded ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%5];\n"
      "}"
      : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w)
      : "r"(int(condition)), "l"(p));
  return x;
}

// A row's attention to the tokens added so far, and to a sink, which has no
// value.
struct WeightedSum {
  float largest = -INFINITY;   // score
  float total = 0.0f;          // of the weights, relative to `largest`
  float4 value[kChunks] = {};  // sum, with these weights

  __device__ __forceinline__ void begin_with(float sink) {
    largest = sink;
    total = 1.0f;
  }

  // Add a token, or several tokens as one. `v` is then the sum of their values,
  // and `weights` that of their weights, relative to `score`.
  __device__ __forceinline__ void add(float score, const float4 (&v)[kChunks],
                                      float weights = 1.0f) {
    const float larger = fmaxf(largest, score);
    const float reference = or_zero(larger);
    const float rescale = exp2_approx(largest - reference);
    const float weight = exp2_approx(score - reference);
    largest = larger;
    total = fmaf(total, rescale, weight * weights);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      value[j].x = fmaf(weight, v[j].x, value[j].x * rescale);
      value[j].y = fmaf(weight, v[j].y, value[j].y * rescale);
      value[j].z = fmaf(weight, v[j].z, value[j].z * rescale);
      value[j].w = fmaf(weight, v[j].w, value[j].w * rescale);
    }
  }

  // Make weights relative to a larger score.
  __device__ __forceinline__ void raise(float larger) {
    const float rescale = exp2_approx(largest - or_zero(larger));
    largest = larger;
    total *= rescale;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      value[j].x *= rescale;
      value[j].y *= rescale;
      value[j].z *= rescale;
      value[j].w *= rescale;
    }
  }
};

}  // namespace turbo
