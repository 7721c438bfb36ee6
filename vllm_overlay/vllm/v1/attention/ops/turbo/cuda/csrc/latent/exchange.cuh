// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Exchange of scores between warpgroups that share tokens. Each has scores over
// half of the coordinates, and the sum of both is the score. Each warpgroup
// does the softmax of half of the columns.
#pragma once

#include "latent/layout.cuh"

namespace turbo {

// Give the other warpgroup the scores of its columns.
template <typename Plan>
__device__ __forceinline__ void give_scores(LatentShared<Plan>& shared,
                                            const float (&s)[Plan::kScores],
                                            const Place<Plan>& own) {
#pragma unroll
  for (int n = 0; n < Plan::kOwn; ++n) {
    const int a = 4 * n, b = 4 * (n + Plan::kBlocks - Plan::kOwn);
    float4 x;
    x.x = own.part() ? s[a] : s[b];
    x.y = own.part() ? s[a + 1] : s[b + 1];
    x.z = own.part() ? s[a + 2] : s[b + 2];
    x.w = own.part() ? s[a + 3] : s[b + 3];
    shared.given[own.group][n][own.thread()] = x;
  }
}

// Add both warpgroups' scores, for the columns whose softmax this one does.
template <typename Plan>
__device__ __forceinline__ void take_scores(const LatentShared<Plan>& shared,
                                            float (&sums)[4 * Plan::kOwn],
                                            const float (&s)[Plan::kScores],
                                            const Place<Plan>& own) {
#pragma unroll
  for (int n = 0; n < Plan::kOwn; ++n) {
    const int a = 4 * n, b = 4 * (n + Plan::kBlocks - Plan::kOwn);
    const float4 x = shared.given[1 - own.group][n][own.thread()];
    sums[a] = (own.part() ? s[b] : s[a]) + x.x;
    sums[a + 1] = (own.part() ? s[b + 1] : s[a + 1]) + x.y;
    sums[a + 2] = (own.part() ? s[b + 2] : s[a + 2]) + x.z;
    sums[a + 3] = (own.part() ? s[b + 3] : s[a + 3]) + x.w;
  }
}

}  // namespace turbo
