// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Softmax of a team's tokens. Its warps divide the planes of scores, and write
// weights to shared memory for all.
#pragma once

#include "common/mma.cuh"
#include "latent/slices_layout.cuh"

namespace turbo {

// The scores of a plane, added over slices.
template <typename Plan>
__device__ __forceinline__ float2 whole_scores(const SliceShared<Plan>& shared,
                                               const SlicePlace& own,
                                               int plane) {
  float2 sum = shared.scores[own.team][0][plane][own.lane];
#pragma unroll
  for (int w = 1; w < kTeamWarps; ++w) {
    const float2 x = shared.scores[own.team][w][plane][own.lane];
    sum.x += x.x, sum.y += x.y;
  }
  return sum;
}

// Compute a plane's weights from scores less the references, and store them.
template <typename Plan>
__device__ __forceinline__ float2 weigh_plane(SliceShared<Plan>& shared,
                                              const SlicePlace& own, int plane,
                                              float x, float y) {
  const float2 w = {exp2_approx(x), exp2_approx(y)};
  shared.weights[own.team][plane / 2][own.lane][plane % 2] =
      transposed(as_bits(__floats2half2_rn(w.x, w.y)));
  return w;
}

// Call f(i, plane) for the planes that a warp weighs.
template <typename Plan, typename F>
__device__ __forceinline__ void for_own_planes(const SlicePlace& own, F f) {
#pragma unroll
  for (int i = 0; i < Plan::kOwnPlanes; ++i) {
    const int plane = own.first_plane() + kTeamWarps * i;
    if (Plan::kPlanes % kTeamWarps == 0 || plane < Plan::kPlanes) f(i, plane);
  }
}

// The references of a pair of a block's columns, raised to the largest scores.
template <typename Plan>
__device__ __forceinline__ float2 raised(const SliceShared<Plan>& shared,
                                         const SlicePlace& own, int n) {
  const int t = own.lane % 4;
  const float4 scaling = shared.scaling[own.team][4 * n + t];
  float2 reference = {scaling.z, scaling.w};
#pragma unroll
  for (int i = 0; i < 2 * Plan::kTiles; ++i) {
    const float2 x =
        shared.across[own.team][2 * (i / 2 * Plan::kBlocks + n) + i % 2][t];
    reference.x = fmaxf(reference.x, x.x);
    reference.y = fmaxf(reference.y, x.y);
  }
  return reference;
}

// Raise a team's references to the largest scores that are seen, rescale the
// running sums, and weigh the tokens again.
template <typename Plan>
__device__ __forceinline__ void raise(SliceShared<Plan>& shared,
                                      SliceAccumulator<Plan>& acc,
                                      float2 (&weights)[Plan::kOwnPlanes],
                                      int first_token, const SlicePlace& own) {
  constexpr int kBlocks = Plan::kBlocks;
  const int g = own.lane / 4, t = own.lane % 4;
  for_own_planes<Plan>(own, [&](int i, int plane) {
    const int n = plane / 2 % kBlocks;
    const int token = first_token + plane / 2 / kBlocks * TILE_TOKENS +
                      plane % 2 * 4 + token_of_row(g);
    const float4 scaling = shared.scaling[own.team][4 * n + t];
    const int2 limits =
        *reinterpret_cast<const int2*>(&shared.limits[8 * n + 2 * t]);
    float2 s = whole_scores(shared, own, plane);
    s.x = token < limits.x ? s.x * scaling.x : -INFINITY;
    s.y = token < limits.y ? s.y * scaling.y : -INFINITY;
    weights[i] = s;
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      s.x = fmaxf(s.x, __shfl_xor_sync(~0u, s.x, mask));
      s.y = fmaxf(s.y, __shfl_xor_sync(~0u, s.y, mask));
    }
    if (g == 0) shared.across[own.team][plane][t] = s;
  });
  own.sync();
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const float4 scaling = shared.scaling[own.team][4 * n + t];
    const float2 reference = raised(shared, own, n);
    const float rescale[2] = {exp2_approx(scaling.z - reference.x),
                              exp2_approx(scaling.w - reference.y)};
#pragma unroll
    for (int s = 0; s < kOwnSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc.output[s][n][i] *= rescale[i % 2];
    }
  }
  for_own_planes<Plan>(own, [&](int i, int plane) {
    const int n = plane / 2 % kBlocks;
    const float4 scaling = shared.scaling[own.team][4 * n + t];
    const float2 reference = raised(shared, own, n);
    acc.sum[i].x *= exp2_approx(scaling.z - reference.x);
    acc.sum[i].y *= exp2_approx(scaling.w - reference.y);
    weights[i] = weigh_plane(shared, own, plane, weights[i].x - reference.x,
                             weights[i].y - reference.y);
  });
  own.sync();
  if (own.warp == 0 && g == 0) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float2 reference = raised(shared, own, n);
      float4& scaling = shared.scaling[own.team][4 * n + t];
      scaling.z = reference.x, scaling.w = reference.y;
    }
  }
}

// Weigh a team's tokens, from scores that all warps have stored.
//
// is_cut: whether there are tokens that columns do not see.
// meanwhile: is called before the warp waits for its team.
template <typename Plan, typename F>
__device__ __forceinline__ void weigh_tiles(SliceShared<Plan>& shared,
                                            SliceAccumulator<Plan>& acc,
                                            int first_token, bool is_cut,
                                            const SlicePlace& own,
                                            F meanwhile) {
  const int t = own.lane % 4;
  float2 weights[Plan::kOwnPlanes] = {};
  float above = 0.0f;
  for_own_planes<Plan>(own, [&](int i, int plane) {
    const float4 scaling =
        shared.scaling[own.team][plane / 2 % Plan::kBlocks * 4 + t];
    const float2 s = whole_scores(shared, own, plane);
    const float x = fmaf(s.x, scaling.x, -scaling.z);
    const float y = fmaf(s.y, scaling.y, -scaling.w);
    above = fmaxf(above, fmaxf(x, y));
    weights[i] = weigh_plane(shared, own, plane, x, y);
  });
  meanwhile();
  if (own.sync_or(above > kMaxScore || is_cut))
    raise(shared, acc, weights, first_token, own);
#pragma unroll
  for (int i = 0; i < Plan::kOwnPlanes; ++i) {
    acc.sum[i].x += weights[i].x;
    acc.sum[i].y += weights[i].y;
  }
}

}  // namespace turbo
