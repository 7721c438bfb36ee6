// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Producers: warpgroups that decode latents, and have their scores and weights.
#pragma once

#include "latent/queries.cuh"
#include "latent/relay_tiles.cuh"
#include "latent/relay_weigh.cuh"

namespace turbo {

// Multiply a tile by the queries while it is decoded, and put its values to the
// ring, where there is room.
template <typename Plan>
__device__ __forceinline__ void multiply_relayed(RelayShared<Plan>& shared,
                                                 float (&scores)[Plan::kScores],
                                                 LaneTile<Plan>& taken,
                                                 RelayTiles<Plan>& tiles,
                                                 int number,
                                                 const Place<Plan>& own) {
  constexpr int kStepOperand = 2 * Plan::kColumns;  // of a step of the depth
  const RelayStep<Plan::kValues> at(number);
  const uint32_t query =
      of_loop(wgmma_operand(shared_address(shared.query), 16 * Plan::kColumns));
  // Of some steps from the first.
  const auto multiply = [&](const Fragments& f, uint32_t first, int steps,
                            bool adds_scores) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      wgmma_registers(
          scores, f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3],
          wgmma_descriptor(first + i * kStepOperand, wgmma_layout<0>(128)),
          adds_scores || i > 0);
    }
    wgmma_commit();
  };
  Fragments fragments[2];
  decode_first(fragments, taken);
  tiles.load_ropes(taken);
  if constexpr (ROPE_SIZE != 0) {
    multiply(fragments[1], query + kLatentSteps * kStepOperand,
             Plan::kRopeSteps, false);
  }
  // See multiply.cuh.
  const int lane = own.lane;
  const uint32_t values = shared_address(shared.values[at.index]) +
                          (16 * own.warp + 8 * (lane / 8 % 2) + lane % 8) * 128;
  const uint32_t chunk = ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
  for (int j = 0; j < Plan::kRuns; ++j) {
    const RunScales scales[2] = {scales_of(taken, 0, j),
                                 scales_of(taken, 1, j)};
    if (j + 1 == Plan::kRuns) tiles.load_scales(taken);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block = 2 * j + half;
      Fragments& f = fragments[half];
      if (block > 0) decode_words(f, taken, scales, j, half);
      if (half == 1) tiles.load_run(taken, j);
      multiply(f, query + 4 * block * kStepOperand, 4,
               ROPE_SIZE != 0 || block > 0);
      if (block == 0 && number >= Plan::kValues) {
        const RelayStep<Plan::kSummed> last(number - Plan::kValues);
        wait_for(shared.summed[last.index], last.parity);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_matrices(values + block * kValueBytes + (chunk ^ (32 * i)),
                       f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3]);
      }
      // The batch before, whose registers are free then.
      if (block + 1 < Plan::kOutputs) wgmma_wait<1>();
    }
  }
  wgmma_wait<0>();
  hold(scores);
}

template <typename Plan>
struct RelayProducer {
  static constexpr int kColumns = Plan::kColumns;

  RelayShared<Plan>& shared;
  Place<Plan> own;
  int passed = 0;  // steps of the segments before

  __device__ __forceinline__ RelayProducer(RelayShared<Plan>& shared,
                                           int block_warp, int lane)
      : shared(shared), own{block_warp / 4, block_warp % 4, lane} {}

  __device__ __forceinline__ void sync_producers() const {
    sync_threads(1 + Plan::kProducers, Plan::kProducers * kGroupThreads);
  }

  // Note the sums of all producers.
  __device__ __forceinline__ void join(RelaySums<Plan>& sums) const {
    const int t = own.lane % 4;
#pragma unroll
    for (int n = 0; n < Plan::kBlocks; ++n) {
      const float4 scaling = shared.scaling[0][4 * n + t];
      sums.refer(2 * n, scaling.z);
      sums.refer(2 * n + 1, scaling.w);
#pragma unroll
      for (int c = 2 * n; c < 2 * n + 2; ++c) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2)
          sums.sum[c] += __shfl_xor_sync(~0u, sums.sum[c], mask);
      }
      if (own.lane < 4)
        shared.across[own.group][own.warp][4 * n + t] = {sums.sum[2 * n],
                                                         sums.sum[2 * n + 1]};
    }
    sync_producers();
    const int column = threadIdx.x;
    if (column < kColumns) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Plan::kProducerWarps; ++i)
        sum +=
            reinterpret_cast<const float*>(shared.across[i / 4][i % 4])[column];
      const float reference = reinterpret_cast<const float*>(
          &shared.scaling[0][column / 2])[2 + column % 2];
      shared.sums[column] = {reference, sum};
    }
  }

  __device__ __forceinline__ void attend(const LatentParams& p,
                                         const LatentSegment& s) {
    load_queries(shared, p, s);
    RelaySums<Plan> sums;
    sums.clear();
    fence_async_proxy();
    __syncthreads();
    int step = s.first_step + own.group;
    if (step < s.last_step) {
      LaneTile<Plan> taken;
      float scores[Plan::kScores];
      RelayTiles<Plan> tiles{p, own};
      tiles.begin(s);
      tiles.load_ropes(taken);
      tiles.load_scales(taken);
#pragma unroll
      for (int j = 0; j < Plan::kRuns; ++j) tiles.load_run(taken, j);
#pragma unroll 1
      for (; step < s.last_step; step += Plan::kProducers) {
        const int number = passed + step - s.first_step;
        tiles.clear(taken,
                    s.num_tokens - step * kStepTokens - own.warp * TILE_TOKENS);
        tiles.take();
        tiles.ask(step + 2 * Plan::kProducers);
        multiply_relayed(shared, scores, taken, tiles, number, own);
        weigh_relayed(shared, sums, scores, s, step, number, own);
      }
    }
    passed += s.last_step - s.first_step;
    __syncthreads();  // all is summed
    join(sums);
    __syncthreads();
  }
};

}  // namespace turbo
