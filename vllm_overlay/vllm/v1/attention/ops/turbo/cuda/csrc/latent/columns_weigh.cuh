// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Softmax of a step's scores.
#pragma once

#include "common/references.cuh"
#include "latent/columns_layout.cuh"

namespace turbo {

// Compute tokens' weights from scores less the references, and store them.
template <int kScores>
__device__ __forceinline__ void weigh(float (&weights)[kScores],
                                      const float (&exponents)[kScores],
                                      uint8_t* target) {
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* w = weights + 4 * n + 2 * r;
      w[0] = exp2_approx(exponents[4 * n + 2 * r]);
      w[1] = exp2_approx(exponents[4 * n + 2 * r + 1]);
      *reinterpret_cast<__half2*>(target + n * kScoreBytes + 128 * r) =
          __floats2half2_rn(w[0], w[1]);
    }
  }
}

// Raise the references to the largest scores that are seen, and rescale the
// running sums. The scores become exponents.
template <int columns>
__device__ __forceinline__ void raise(ColumnsShared<columns>& shared,
                                      ColumnsAccumulator<columns>& acc,
                                      float (&scores)[columns / 2],
                                      int first_token,
                                      const ColumnsPlace& own) {
  const int g = own.lane / 4, t = own.lane % 4;
  const int token = first_token + token_of_row(g);
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) {
    const int pair = 4 * n + t;
    const float4 scaling = acc.scaling(shared, n, t);
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
    if (g == 0) shared.across[0][own.warp][pair] = largest;
  }
  own.sync();
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) {
    const float4 scaling = acc.scaling(shared, n, t);
    const float2 reference = raised(shared, 0, 4 * n + t, scaling);
    const float rescale[2] = {exp2_approx(scaling.z - reference.x),
                              exp2_approx(scaling.w - reference.y)};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int m = 0; m < kOutputs; ++m) {
        acc.output[m][4 * n + c] *= rescale[c];
        acc.output[m][4 * n + 2 + c] *= rescale[c];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) {
    const float4 scaling = acc.scaling(shared, n, t);
    const float2 reference = raised(shared, 0, 4 * n + t, scaling);
    acc.sum[2 * n] *= exp2_approx(scaling.z - reference.x);
    acc.sum[2 * n + 1] *= exp2_approx(scaling.w - reference.y);
    float* s = scores + 4 * n;
    s[0] -= reference.x, s[1] -= reference.y;
    s[2] -= reference.x, s[3] -= reference.y;
    if constexpr (kKeepsScaling<columns>)
      acc.kept[n] = {scaling.x, scaling.y, reference.x, reference.y};
  }
  own.sync();
  if (own.warp == 0 && g == 0) {
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
      float4& scaling = shared.scaling[0][4 * n + t];
      const float2 reference = raised(shared, 0, 4 * n + t, scaling);
      scaling.z = reference.x, scaling.w = reference.y;
    }
  }
}

// Weigh a step's tokens.
//
// limit: tokens that all columns see.
// stored: where the weights go.
template <int columns>
__device__ __forceinline__ void weigh_step(ColumnsShared<columns>& shared,
                                           ColumnsAccumulator<columns>& acc,
                                           float (&scores)[columns / 2],
                                           int limit, int step,
                                           const ColumnsPlace& own,
                                           uint8_t* stored) {
  const int g = own.lane / 4, t = own.lane % 4;
  const int first_token = step * kStepTokens + own.warp * TILE_TOKENS;
  // Token g of the warp's core matrices. The token eight later follows.
  uint8_t* target = stored + own.warp * kWarpBytes + g * 16 + 4 * t;
  float exponents[columns / 2], weights[columns / 2];
  float above = 0.0f;
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) {
    const float4 scaling = acc.scaling(shared, n, t);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = fmaf(scores[4 * n + i], i % 2 ? scaling.y : scaling.x,
                           -(i % 2 ? scaling.w : scaling.z));
      exponents[4 * n + i] = x;
      above = fmaxf(above, x);
    }
  }
  weigh(weights, exponents, target);
  fence_async_proxy();
  const bool is_cut = (step + 1) * kStepTokens > limit;
  if (own.sync_or(above > kMaxScore || is_cut)) {
    raise(shared, acc, scores, first_token, own);
    weigh(weights, scores, target);
    fence_async_proxy();
    own.sync();
  }
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) {
    acc.sum[2 * n] += weights[4 * n] + weights[4 * n + 2];
    acc.sum[2 * n + 1] += weights[4 * n + 1] + weights[4 * n + 3];
  }
}

}  // namespace turbo
