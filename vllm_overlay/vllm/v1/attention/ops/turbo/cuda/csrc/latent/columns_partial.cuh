// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The partial result of a segment.
#pragma once

#include "latent/columns_layout.cuh"

namespace turbo {

template <int columns>
__device__ __forceinline__ void write_partial(ColumnsShared<columns>& shared,
                                              ColumnsAccumulator<columns>& acc,
                                              const LatentParams& p,
                                              const LatentSegment& segment,
                                              const ColumnsPlace& own) {
  const int g = own.lane / 4, t = own.lane % 4;
#pragma unroll
  for (float& x : acc.sum) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
  }
  if (g == 0) {
#pragma unroll
    for (int n = 0; n < columns / 8; ++n)
      shared.across[0][own.warp][4 * n + t] = {acc.sum[2 * n],
                                               acc.sum[2 * n + 1]};
  }
  own.sync();
  const int num_rows = p.most_rows();
  const int64_t first_row =
      (int64_t(segment.seq) * p.num_splits + segment.split) * num_rows +
      segment.first_row;
  const int column = own.thread();
  if (column < columns) {
    const float* x = reinterpret_cast<const float*>(shared.across[0]);
    const float sum = x[column] + x[columns + column] +
                      x[2 * columns + column] + x[3 * columns + column];
    shared.sums[column] = sum;
    if (segment.first_row + column < segment.num_rows) {
      const float reference = reinterpret_cast<const float*>(
          &shared.scaling[0][column / 2])[2 + column % 2];
      float* lse = p.partial_lse + first_row + column;
      lse[0] = reference + log2f(sum);  // -inf if no token is seen
      if (segment.ends) {
        for (int s = segment.split + 1; s < p.num_splits; ++s)
          lse[int64_t(s - segment.split) * num_rows] = -INFINITY;
      }
    }
  }
  own.sync();
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) {
    const int first = 8 * n + 2 * t;
    const int left = segment.num_rows - segment.first_row - first;
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float sum = shared.sums[first + c];
      factor[c] = sum != 0.0f ? LATENT_GAIN / sum : 0.0f;
    }
    float* target = p.partial + (first_row + first) * LATENT_RANK;
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) {
      const float* x = acc.output[m] + 4 * n;
      float* to = target + output_coordinate(m, own.warp, g, 0);
      if (left > 0) to[0] = x[0] * factor[0], to[2] = x[2] * factor[0];
      if (left > 1) {
        to[LATENT_RANK] = x[1] * factor[1];
        to[LATENT_RANK + 2] = x[3] * factor[1];
      }
    }
  }
  own.sync();  // before the memory that was read is written again
}

}  // namespace turbo
