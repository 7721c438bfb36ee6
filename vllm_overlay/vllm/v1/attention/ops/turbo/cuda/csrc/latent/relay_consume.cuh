// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The consumer: a warpgroup that sums values.
#pragma once

#include "latent/relay_layout.cuh"

namespace turbo {

template <typename Plan>
struct RelayConsumer {
  static constexpr int kColumns = Plan::kColumns;

  RelayShared<Plan>& shared;
  int warp, lane;  // of the warpgroup, of the warp
  int passed = 0;  // steps of the segments before

  __device__ __forceinline__ RelayConsumer(RelayShared<Plan>& shared, int warp,
                                           int lane)
      : shared(shared), warp(warp), lane(lane) {}

  // Multiply what is summed so far, where a step raised references.
  __device__ __forceinline__ void rescale(
      float (&output)[Plan::kOutputs][Plan::kScores], int index) const {
#pragma unroll
    for (int n = 0; n < Plan::kBlocks; ++n) {
      const float2 factor = shared.rescale[index][4 * n + lane % 4];
#pragma unroll
      for (int m = 0; m < Plan::kOutputs; ++m) {
        float* x = output[m] + 4 * n;
        x[0] *= factor.x, x[1] *= factor.y;
        x[2] *= factor.x, x[3] *= factor.y;
      }
    }
  }

  __device__ __forceinline__ void add_step(
      float (&output)[Plan::kOutputs][Plan::kScores], int number) const {
    const RelayStep<Plan::kValues> at(number);
    wait_for(shared.full[at.index], at.parity);
    if (shared.raises[at.index]) rescale(output, at.index);
    const uint32_t values = of_loop(
        wgmma_operand(shared_address(shared.values[at.index]), kValueBytes));
    const uint32_t weights =
        of_loop(wgmma_operand(shared_address(shared.weights[at.index]), 128));
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < Plan::kOutputs; ++m) {
#pragma unroll
      for (int k = 0; k < kStepTokens / 16; ++k) {
        wgmma_shared(
            output[m],
            wgmma_descriptor(values + (m * kValueBytes + k * 2048) / 16,
                             wgmma_layout<1>(1024)),
            wgmma_descriptor(weights + k * 256 / 16,
                             wgmma_layout<0>(16 * kStepTokens)));
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < Plan::kOutputs; ++m) hold(output[m]);
    arrive_warp(shared.summed[RelayStep<Plan::kSummed>(number).index], lane);
  }

  // Write the partial result of a segment.
  __device__ __forceinline__ void write(
      float (&output)[Plan::kOutputs][Plan::kScores], const LatentParams& p,
      const LatentSegment& segment) const {
    const int g = lane / 4, t = lane % 4;
    const int num_rows = p.most_rows();
    const int64_t first_row =
        (int64_t(segment.seq) * p.num_splits + segment.split) * num_rows +
        segment.first_row;
#pragma unroll
    for (int n = 0; n < Plan::kBlocks; ++n) {
      const int column = 8 * n + 2 * t;
      const int left = segment.num_rows - segment.first_row - column;
      float factor[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float sum = shared.sums[column + c].y;
        factor[c] = sum != 0.0f ? LATENT_GAIN / sum : 0.0f;
      }
      float* target = p.partial + (first_row + column) * LATENT_RANK;
#pragma unroll
      for (int m = 0; m < Plan::kOutputs; ++m) {
        const float* x = output[m] + 4 * n;
        float* to = target + output_coordinate(m, warp, g, 0);
        if (left > 0) to[0] = x[0] * factor[0], to[2] = x[2] * factor[0];
        if (left > 1) {
          to[LATENT_RANK] = x[1] * factor[1];
          to[LATENT_RANK + 2] = x[3] * factor[1];
        }
      }
    }
    const int column = 32 * warp + lane;
    if (column < kColumns && segment.first_row + column < segment.num_rows) {
      const float2 sum = shared.sums[column];
      float* lse = p.partial_lse + first_row + column;
      lse[0] = sum.x + log2f(sum.y);  // -inf where nothing is seen
      if (segment.ends) {
        for (int s = segment.split + 1; s < p.num_splits; ++s)
          lse[int64_t(s - segment.split) * num_rows] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void attend(const LatentParams& p,
                                         const LatentSegment& s) {
    float output[Plan::kOutputs][Plan::kScores];
#pragma unroll
    for (int m = 0; m < Plan::kOutputs; ++m) {
#pragma unroll
      for (int i = 0; i < Plan::kScores; ++i) output[m][i] = 0.0f;
    }
    __syncthreads();
    const int num_steps = s.last_step - s.first_step;
#pragma unroll 1
    for (int i = 0; i < num_steps; ++i) add_step(output, passed + i);
    passed += num_steps;
    __syncthreads();
    __syncthreads();  // the sums of weights are known
    write(output, p, s);
  }
};

}  // namespace turbo
