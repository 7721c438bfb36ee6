// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Softmax of producers. Steps settle in their order what references they have.
#pragma once

#include "latent/relay_layout.cuh"
#include "latent/weigh.cuh"

namespace turbo {

// The sums of a producer's weights, relative to references.
template <typename Plan>
struct RelaySums {
  float sum[2 * Plan::kBlocks], reference[2 * Plan::kBlocks];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2 * Plan::kBlocks; ++i)
      sum[i] = 0.0f, reference[i] = kNoReference;
  }
  __device__ __forceinline__ void refer(int i, float to) {
    if (reference[i] != to) sum[i] *= exp2_approx(reference[i] - to);
    reference[i] = to;
  }
};

// Raise references to the largest scores that are seen, and note by what the
// sum of values is to be multiplied. The scores become exponents.
template <typename Plan>
__device__ __forceinline__ void raise_references(RelayShared<Plan>& shared,
                                                 RelaySums<Plan>& sums,
                                                 float (&scores)[Plan::kScores],
                                                 int first_token, int index,
                                                 const Place<Plan>& own) {
  const int g = own.lane / 4, t = own.lane % 4;
  const int token = first_token + token_of_row(g);
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    const int pair = 4 * n + t;
    const float4 scaling = shared.scaling[0][pair];
    const int2 limits =
        *reinterpret_cast<const int2*>(&shared.limits[2 * pair]);
    float* s = scores + 4 * n;
    s[0] = token < limits.x ? s[0] * scaling.x : -INFINITY;
    s[1] = token < limits.y ? s[1] * scaling.y : -INFINITY;
    s[2] = token + 4 < limits.x ? s[2] * scaling.x : -INFINITY;
    s[3] = token + 4 < limits.y ? s[3] * scaling.y : -INFINITY;
    float2 largest = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      largest.x = fmaxf(largest.x, __shfl_xor_sync(~0u, largest.x, mask));
      largest.y = fmaxf(largest.y, __shfl_xor_sync(~0u, largest.y, mask));
    }
    if (g == 0) shared.across[own.group][own.warp][pair] = largest;
  }
  own.sync_group();
  float2 references[Plan::kBlocks];
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    const int pair = 4 * n + t;
    const float4 scaling = shared.scaling[0][pair];
    const float2 reference = raised(shared, own.group, pair, scaling);
    sums.refer(2 * n, reference.x);
    sums.refer(2 * n + 1, reference.y);
    float* s = scores + 4 * n;
    s[0] -= reference.x, s[1] -= reference.y;
    s[2] -= reference.x, s[3] -= reference.y;
    references[n] = reference;
  }
  own.sync_group();
  if (own.warp == 0 && g == 0) {
#pragma unroll
    for (int n = 0; n < Plan::kBlocks; ++n) {
      float4& scaling = shared.scaling[0][4 * n + t];
      const float2 reference = references[n];
      shared.rescale[index][4 * n + t] = {exp2_approx(scaling.z - reference.x),
                                          exp2_approx(scaling.w - reference.y)};
      scaling.z = reference.x, scaling.w = reference.y;
    }
  }
}

// Weigh a step's tokens, and let the consumer have it.
//
// number: of the block's steps.
template <typename Plan>
__device__ __forceinline__ void weigh_relayed(RelayShared<Plan>& shared,
                                              RelaySums<Plan>& sums,
                                              float (&scores)[Plan::kScores],
                                              const LatentSegment& segment,
                                              int step, int number,
                                              const Place<Plan>& own) {
  const int g = own.lane / 4, t = own.lane % 4;
  const RelayStep<Plan::kValues> at(number);
  const int first_token = step * kStepTokens + own.warp * TILE_TOKENS;
  uint8_t* target = reinterpret_cast<uint8_t*>(shared.weights[at.index][0]) +
                    (16 * own.warp + g) * 16 + 4 * t;
  if (step > segment.first_step) {
    const RelayStep<Plan::kValues> before(number - 1);
    wait_for(shared.referred[before.index], before.parity);
  }
  float exponents[Plan::kScores], weights[Plan::kScores];
  float above = 0.0f;
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    const float4 scaling = shared.scaling[0][4 * n + t];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = fmaf(scores[4 * n + i], i % 2 ? scaling.y : scaling.x,
                           -(i % 2 ? scaling.w : scaling.z));
      exponents[4 * n + i] = x;
      above = fmaxf(above, x);
    }
  }
  const bool is_cut = (step + 1) * kStepTokens > segment.first_limit;
  const bool raises = sync_threads_or(1 + own.group, kGroupThreads,
                                      above > kMaxScore || is_cut);
  if (raises) {
    raise_references(shared, sums, scores, first_token, at.index, own);
#pragma unroll
    for (int i = 0; i < Plan::kScores; ++i) exponents[i] = scores[i];
  }
  if (own.thread() == 0) shared.raises[at.index] = raises;
  if (!raises) {
#pragma unroll
    for (int n = 0; n < Plan::kBlocks; ++n) {
      const float4 scaling = shared.scaling[0][4 * n + t];
      sums.refer(2 * n, scaling.z);
      sums.refer(2 * n + 1, scaling.w);
    }
  }
  arrive_warp(shared.referred[at.index], own.lane);
  weigh<Plan>(weights, exponents, target);
  fence_async_proxy();
  arrive_warp(shared.full[at.index], own.lane);
#pragma unroll
  for (int n = 0; n < Plan::kBlocks; ++n) {
    sums.sum[2 * n] += weights[4 * n] + weights[4 * n + 2];
    sums.sum[2 * n + 1] += weights[4 * n + 1] + weights[4 * n + 3];
  }
}

}  // namespace turbo
