// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A consumer's products: scores of queries in registers and decoded keys, and
// sums of decoded values by weights in registers.
#pragma once

#include "common/mma.cuh"
#include "extend_mma/layout.cuh"

namespace turbo {

// Four neighbouring numbers of a lane's results, which a product adds to.
using Quad = float (&)[4];
__device__ __forceinline__ Quad quad_of(float* numbers) {
  return *reinterpret_cast<float (*)[4]>(numbers);
}

// Load a unit of a part's keys.
//
// keys: the part's fragments, from the lane's first on.
template <typename Plan>
__device__ __forceinline__ void load_unit(uint4 (&k)[2 * Plan::kPartTiles],
                                          const uint4* keys, int unit) {
#pragma unroll
  for (int n = 0; n < 2 * Plan::kPartTiles; ++n)
    k[n] = keys[(n * kLaneUnits + unit) * 32];
}

// Add the products of half of a unit to scores.
//
// q: the queries' fragments of the unit.
template <typename Plan>
__device__ __forceinline__ void multiply_unit(
    float (&scores)[Plan::kTokens / 2], const uint32_t* q,
    const uint4 (&k)[2 * Plan::kPartTiles], int half) {
#pragma unroll
  for (int n = 0; n < 2 * Plan::kPartTiles; ++n) {
    mma_f16(quad_of(scores + 4 * n), q[4 * half], q[4 * half + 1],
            q[4 * half + 2], q[4 * half + 3], half == 0 ? k[n].x : k[n].z,
            half == 0 ? k[n].y : k[n].w);
  }
}

// Scores of a part of a step.
//
// keys: the part's fragments, from the lane's first on.
// between: is called after each half of a unit, with the half's number.
template <typename Plan, typename F>
__device__ __forceinline__ void multiply_keys(
    float (&scores)[Plan::kTokens / 2],
    const uint32_t (&queries)[HEAD_SIZE / 4], const uint4* keys,
    const F& between) {
#pragma unroll
  for (int i = 0; i < Plan::kTokens / 2; ++i) scores[i] = 0.0f;
#pragma unroll
  for (int j = 0; j < kLaneUnits; ++j) {
    uint4 k[2 * Plan::kPartTiles];
    load_unit<Plan>(k, keys, j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      multiply_unit<Plan>(scores, queries + 8 * j, k, half);
      between(2 * j + half);
    }
  }
}

// Add two fragments of values of a part of a step, from fragment `first` on.
//
// values: the part's fragments, from the lane's first on.
template <typename Plan>
__device__ __forceinline__ void add_fragments(
    float (&output)[HEAD_SIZE / 2],
    const uint32_t (&weights)[Plan::kTokens / 4], const uint4* values,
    int first) {
#pragma unroll
  for (int i = first; i < first + 2; ++i) {
    const int n = i % kFragmentOutputs;
    const uint32_t* w = weights + i / kFragmentOutputs * 4;
    const uint4 v = values[i * 32];
    mma_f16(quad_of(output + 8 * n), w[0], w[1], w[2], w[3], v.x, v.z);
    mma_f16(quad_of(output + 8 * n + 4), w[0], w[1], w[2], w[3], v.y, v.w);
  }
}

// Add the values of a part of a step.
template <typename Plan>
__device__ __forceinline__ void add_values(
    float (&output)[HEAD_SIZE / 2],
    const uint32_t (&weights)[Plan::kTokens / 4], const uint4* values) {
#pragma unroll
  for (int i = 0; i < Plan::kPartTiles * kFragmentOutputs; i += 2)
    add_fragments<Plan>(output, weights, values, i);
}

// Compute a part's scores, and add the values of the part before. The products
// of a score depend on each other, and products of values come between them.
template <typename Plan>
__device__ __forceinline__ void multiply_and_add(
    float (&scores)[Plan::kTokens / 2],
    const uint32_t (&queries)[HEAD_SIZE / 4], const uint4* keys,
    float (&output)[HEAD_SIZE / 2],
    const uint32_t (&weights)[Plan::kTokens / 4], const uint4* values) {
  constexpr int kHalfFragments =
      Plan::kPartTiles * kFragmentOutputs / kLaneUnits / 2;
  static_assert(kHalfFragments % 2 == 0);
  multiply_keys<Plan>(scores, queries, keys, [&](int half) {
#pragma unroll
    for (int i = 0; i < kHalfFragments; i += 2) {
      add_fragments<Plan>(output, weights, values, half * kHalfFragments + i);
    }
  });
}

}  // namespace turbo
