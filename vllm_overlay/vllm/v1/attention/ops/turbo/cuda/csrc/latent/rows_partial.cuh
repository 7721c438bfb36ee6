// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The partial result of a segment, from both consumers.
#pragma once

#include "latent/rows_layout.cuh"

namespace turbo {

// Write a lane's coordinates of a row. In two steps of the depth they are eight
// neighbours: see place_of_latent.
//
// target: the row's first coordinate.
// output: the accumulator's numbers of the row.
__device__ __forceinline__ void write_row(float* target, const float* output,
                                          float factor, const RowsPlace& own) {
  constexpr int kWords = LATENT_RANK / kWordCodes / 4 / kConsumers;
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    const int run = own.group * (kWords / kRunWords) + u / kRunWords;
    const int word = 16 * run + kRunWords * (own.lane % 4) + u % kRunWords;
    float4* to = reinterpret_cast<float4*>(target + kWordCodes * word);
    const float* x = output + 16 * u;
    to[0] = {x[0] * factor, x[1] * factor, x[4] * factor, x[5] * factor};
    to[1] = {x[8] * factor, x[9] * factor, x[12] * factor, x[13] * factor};
  }
}

__device__ __forceinline__ void write_rows(RowsShared& shared,
                                           RowsAccumulator& acc,
                                           const LatentParams& p,
                                           const LatentSegment& segment,
                                           const RowsPlace& own) {
  const int first = own.first_row();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2)
      acc.sum[r] += __shfl_xor_sync(~0u, acc.sum[r], mask);
    if (own.lane % 4 == 0) shared.sums[own.group][first + 8 * r] = acc.sum[r];
  }
  own.sync_all();
  const int num_rows = p.most_rows();
  const int64_t first_row =
      (int64_t(segment.seq) * p.num_splits + segment.split) * num_rows +
      segment.first_row;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    if (segment.first_row + row >= segment.num_rows) continue;
    const float total = shared.sums[0][row] + shared.sums[1][row];
    const float factor = total != 0.0f ? LATENT_GAIN / total : 0.0f;
    write_row(p.partial + (first_row + row) * LATENT_RANK, acc.output + 2 * r,
              factor, own);
    if (own.group != 0 || own.lane % 4 != 0) continue;
    float* lse = p.partial_lse + first_row + row;
    lse[0] = acc.reference[r] + log2f(total);  // -inf if no token is seen
    if (segment.ends) {
      for (int s = segment.split + 1; s < p.num_splits; ++s)
        lse[int64_t(s - segment.split) * num_rows] = -INFINITY;
    }
  }
}

}  // namespace turbo
