// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Warps that share a tile, each with a share of its coordinates. Scores are the
// sums over all shares, and the output is made share by share. Each of the
// warps computes the softmax, from the same scores.
#pragma once

#include "common/tile.cuh"

namespace turbo {

// Barrier 0 is the block's, and barriers 1 to 4 are those of teams.
constexpr int kFirstTileBarrier = 5;

// Wait for the lanes of the warps that share a tile.
__device__ __forceinline__ void sync_tile() {
  __syncwarp();
  if constexpr (kTileWarps > 1) {
    const int tile = threadIdx.x / 32 / kTileWarps;
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstTileBarrier + tile),
                 "n"(32 * kTileWarps)
                 : "memory");
  }
}

// Scores of two tiles by share and lane. The array is small if no tile is
// shared.
//
// Warps wait for each other between two uses of it.
using SharedScores = float4[kTileWarps][2][kTileWarps > 1 ? 32 : 1];

// The largest of a lane's numbers in all shares. None is negative, and NaN is
// above infinity.
__device__ __forceinline__ float largest_of_shares(float x,
                                                   SharedScores& shared,
                                                   int lane) {
  shared[share_of_warp()][0][lane].x = x;
  sync_tile();
#pragma unroll
  for (int share = 0; share < kTileWarps; ++share) {
    const float other = shared[share][0][lane].x;
    x = __int_as_float(max(__float_as_int(x), __float_as_int(other)));
  }
  return x;
}

// Add the scores of all shares, which gives those of the whole tiles. Each of
// the warps gets the same sums, because the order of two terms does not matter.
__device__ __forceinline__ void join_scores(float (&scores)[2][4],
                                            SharedScores& shared, int lane) {
  static_assert(kTileWarps == 1 || kTileWarps == 2 || kTileWarps == 4);
  const int share = share_of_warp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    shared[share][i][lane] = {scores[i][0], scores[i][1], scores[i][2],
                              scores[i][3]};
  }
  sync_tile();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float4 x = shared[share ^ 1][i][lane];
    scores[i][0] += x.x, scores[i][1] += x.y;
    scores[i][2] += x.z, scores[i][3] += x.w;
    if constexpr (kTileWarps == 4) {
      x = shared[share ^ 2][i][lane];
      const float4 y = shared[share ^ 3][i][lane];
      scores[i][0] += x.x + y.x, scores[i][1] += x.y + y.y;
      scores[i][2] += x.z + y.z, scores[i][3] += x.w + y.w;
    }
  }
}

}  // namespace turbo
