// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The kernel of decode attention to latents for few query rows.
//
// Query rows, heads times query tokens, are the columns of the tensor core's
// products: S^T = K q^T, O^T = V^T P^T. Producers decode each latent once, and
// compute S^T from its registers. A warpgroup does the softmax, in base 2, and
// computes O^T from values and weights in shared memory.
#pragma once

#include "latent/columns_partial.cuh"
#include "latent/columns_produce.cuh"
#include "latent/columns_weigh.cuh"
#include "latent/decode.cuh"
#include "latent/queries.cuh"

namespace turbo {

// Issue the products of a step's values and weights, whose operands are given.
template <int columns>
__device__ __forceinline__ void add_step(ColumnsAccumulator<columns>& acc,
                                         uint32_t values, uint32_t weights) {
  wgmma_fence();
#pragma unroll
  for (int m = 0; m < kOutputs; ++m) {
#pragma unroll
    for (int i = 0; i < kStepTokens / 16; ++i) {
      const int place = m * kOperandBytes + i * TILE_TOKENS * kPlaceBytes;
      wgmma_shared(acc.output[m],
                   wgmma_descriptor(values + place / 16, kRowsLayout),
                   wgmma_descriptor(weights + i * kWarpBytes / 16,
                                    wgmma_layout<0>(kScoreBytes)));
    }
  }
  wgmma_commit();
}

template <int columns>
struct ColumnsConsumer {
  using Shared = ColumnsShared<columns>;

  Shared& shared;
  ColumnsPlace own;
  Stage<kProducers> stage, segment;

  __device__ __forceinline__ ColumnsConsumer(Shared& shared, int warp)
      : shared(shared), own{warp, int(threadIdx.x % 32)} {}

  __device__ __forceinline__ void attend(const LatentParams& p,
                                         const LatentSegment& s) {
    write_queries<columns / 4 % 4 == 0 ? 4 : 2>(shared, p, s);
    ColumnsAccumulator<columns> acc;
    acc.begin();
    fence_async_proxy();
    own.sync();
    acc.keep_scaling(shared, own.lane % 4);
    arrive_warp(shared.written[segment.index], own.lane);
    segment.advance();
    const uint32_t values =
        of_loop(wgmma_operand(shared_address(shared.tiles), kOperandBytes));
    const uint32_t weights =
        of_loop(wgmma_operand(shared_address(shared.scores), 128));
    const int first = uniform(s.first_step), last = uniform(s.last_step);
    const int limit = uniform(s.first_limit);
#pragma unroll 1
    for (int step = first; step < last; ++step) {
      wait_for(shared.full[stage.index], stage.parity);
      float scores[columns / 2];
#pragma unroll
      for (int n = 0; n < columns / 8; ++n) {
        const float4 x = shared.scores[stage.index][n][own.thread()];
        scores[4 * n] = x.x, scores[4 * n + 1] = x.y;
        scores[4 * n + 2] = x.z, scores[4 * n + 3] = x.w;
      }
      __syncwarp();  // before scores that were read are replaced
      weigh_step(shared, acc, scores, limit, step, own,
                 reinterpret_cast<uint8_t*>(shared.scores[stage.index]));
      const int at = uniform(stage.index);
      add_step(acc, values + at * uint32_t(Shared::kStageBytes / 16),
               weights + at * uint32_t(sizeof(shared.scores[0]) / 16));
      wgmma_wait<0>();
      acc.hold_outputs();
      arrive_warp(shared.free[stage.index], own.lane);
      stage.advance();
    }
    write_partial(shared, acc, p, s, own);
  }
};

template <int columns>
struct ColumnsKernel {
  using Shared = ColumnsShared<columns>;
  static_assert(sizeof(Shared) <= 227 << 10);
  static constexpr bool kHasRoles = true;
  static constexpr int kColumns = columns;
  static constexpr int kConsumerWarps = 4;
  static constexpr int kProducerWarps = kProducers * kStepTiles;
  static constexpr int kThreads = 32 * (kConsumerWarps + kProducerWarps);
  // Registers of a lane with more than 16 columns. The sum over three
  // warpgroups is what a block has. With fewer columns all lanes have as many.
  static constexpr bool kMovesRegisters = columns > 16;
  static constexpr int kConsumerRegisters = 200, kProducerRegisters = 152;

  Shared& shared;
  const LatentParams& p;
  int warp;

  __device__ __forceinline__ ColumnsKernel(uint8_t* bytes,
                                           const LatentParams& p,
                                           int block_warp, int)
      : shared(*reinterpret_cast<Shared*>(bytes)), p(p), warp(block_warp) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kProducers; ++i)
        init_barrier(shared_address(&shared.written[i]), kConsumerWarps);
#pragma unroll
      for (int i = 0; i < kProducerWarps; ++i)
        init_barrier(shared_address(&shared.copied[i]), 1);
    }
    shared.begin(kStepTiles, kConsumerWarps);
  }

  // Do the warp's part of the block's ranges.
  __device__ __forceinline__ void attend_ranges(int lane) {
    if (warp < kConsumerWarps) {
      if constexpr (kMovesRegisters) take_registers<kConsumerRegisters>();
      ColumnsConsumer<columns> consumer(shared, warp);
      shared.for_announced(
          lane, [&](const LatentSegment& s) { consumer.attend(p, s); });
    } else {
      if constexpr (kMovesRegisters) give_registers<kProducerRegisters>();
      ColumnsProducer<columns> producer(shared, warp - kConsumerWarps, p);
      turbo::attend_ranges(producer, p, lane);
      producer.announcer.end(producer.warp);
    }
  }
};

}  // namespace turbo
