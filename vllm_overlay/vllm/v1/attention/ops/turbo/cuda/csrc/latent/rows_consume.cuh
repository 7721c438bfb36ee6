// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Consumers: warpgroups that attend to decoded steps.
//
// Consumers have the scores of steps in turn, and the softmax of one overlaps
// the products of the other. Both add up all steps, each half of the
// coordinates. The weights are A operands in registers for the consumer that
// has computed them, and in shared memory for the other one. A product of all
// 64 tokens of a step reads each query once; of 32 tokens, it would read
// queries twice as often, and shared memory would be the limit.
#pragma once

#include "latent/queries.cuh"
#include "latent/rows_partial.cuh"
#include "latent/rows_weigh.cuh"

namespace turbo {

// The operands of a consumer's products, in uniform registers.
struct RowOperands {
  uint32_t query, keys, weights;
  uint32_t values;  // of stage 0

  __device__ __forceinline__ RowOperands(RowsShared& shared, int group)
      : query(of_shared(shared.query, 16)),
        keys(of_shared(shared.tiles[group], 16)),
        weights(of_shared(shared.weights, 16)),
        values(of_shared(shared.tiles[0][kOwnBlocks * group], kOperandBytes)) {}

  static __device__ __forceinline__ uint32_t of_shared(const void* p,
                                                       uint32_t leading) {
    return of_loop(wgmma_operand(shared_address(p), leading));
  }
  __device__ __forceinline__ uint32_t values_of(int stage) const {
    return values + stage * uint32_t(sizeof(RowsShared::tiles[0]) / 16);
  }
};

constexpr int kStepsAhead = 4 * kBlocksAhead;

// Issue the products of all queries and a step's tokens, for some steps of the
// depth.
template <int kFirst, int kLast>
__device__ __forceinline__ void multiply_rows(float (&scores)[kRowScores],
                                              const RowOperands& operands) {
  const uint32_t query = of_loop(operands.query), keys = of_loop(operands.keys);
  wgmma_fence();
#pragma unroll
  for (int i = kFirst; i < kLast; ++i) {
    const uint32_t offset = i / 4 * (kOperandBytes / 16) + i % 4 * 2;
    wgmma_deep(scores, wgmma_descriptor(query + offset, kRowsLayout),
               wgmma_descriptor(keys + offset, kRowsLayout), i > 0);
  }
  wgmma_commit();
}

// The operand of 16 tokens' values.
__device__ __forceinline__ uint64_t tokens_of(uint32_t values, int i) {
  return wgmma_descriptor(values + i * TILE_TOKENS * kPlaceBytes / 16,
                          kRowsLayout);
}

// Issue the products of a step's weights, which the consumer has, and values.
__device__ __forceinline__ void add_own(RowsAccumulator& acc,
                                        const RowWeights& w, uint32_t values) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStepTokens / 16; ++i) {
    wgmma_by_columns(acc.output, w[4 * i], w[4 * i + 1], w[4 * i + 2],
                     w[4 * i + 3], tokens_of(values, i));
  }
  wgmma_commit();
}

// The same with weights of the other consumer.
__device__ __forceinline__ void add_given(RowsAccumulator& acc,
                                          uint32_t weights, uint32_t values) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStepTokens / 16; ++i) {
    wgmma_deep<0, 1>(acc.output, wgmma_descriptor(weights + 2 * i, kRowsLayout),
                     tokens_of(values, i), 1);
  }
  wgmma_commit();
}

struct RowsConsumer {
  RowsShared& shared;
  RowsPlace own;
  Stage<kRowStages> stage;

  __device__ __forceinline__ RowsConsumer(RowsShared& shared, int group,
                                          int warp)
      : shared(shared), own{group, warp, int(threadIdx.x % 32)} {}

  // Let producers have the stage before, whose products have ended.
  __device__ __forceinline__ void release() {
    arrive_warp(shared.free[stage.index ^ 1], own.lane);
  }

  // Products that are under way where paths of the program meet are serialized.
  static __device__ __forceinline__ void end_products(RowsAccumulator& acc) {
    wgmma_wait<0>();
    hold(acc.output);
  }

  // Issue the first products of the scores of the step in a stage.
  __device__ __forceinline__ void begin_scores(float (&scores)[kRowScores],
                                               const RowOperands& operands,
                                               const Stage<kRowStages>& of) {
    wait_for(shared.begun[of.index], of.parity);
    multiply_rows<0, kStepsAhead>(scores, operands);
  }

  // Attend to a step whose scores the consumer has. Their products are the
  // latest, and those of the step before come ahead of them.
  //
  // limit: tokens that all rows see.
  __device__ __forceinline__ void attend_own(RowsAccumulator& acc,
                                             float (&scores)[kRowScores],
                                             const RowOperands& operands,
                                             bool is_first, int step,
                                             int limit) {
    RowWeights weights;
    wgmma_wait<1>();
    if (!is_first) release();
    wgmma_wait<0>();
    hold(acc.output);
    hold(scores);
    weigh_rows(shared, acc, weights, scores, step, limit, own);
    add_own(acc, weights, operands.values_of(own.group));
    stage.advance();
  }

  // Attend to a step whose scores the other consumer has.
  //
  // issue_ahead: is called when products can be issued ahead.
  template <typename F>
  __device__ __forceinline__ void attend_given(RowsAccumulator& acc,
                                               const RowOperands& operands,
                                               bool is_first,
                                               const F& issue_ahead) {
    wgmma_wait<0>();
    hold(acc.output);
    if (!is_first) release();
    issue_ahead();
    own.wait_for_weights(own.group ^ 1);
    follow_references(shared, acc, own.group ^ 1, own);
    add_given(acc, operands.weights, operands.values_of(own.group ^ 1));
    stage.advance();
  }

  __device__ __forceinline__ void attend(const LatentParams& p,
                                         const LatentSegment& s) {
    write_queries<4>(shared, p, s);
    fence_async_proxy();
    own.sync_all();
    RowsAccumulator acc;
    acc.begin(shared, own.first_row());
    const RowOperands operands(shared, own.group);
    const int first = uniform(s.first_step), last = uniform(s.last_step);
    const int limit = s.first_limit;
    int step = first;
    // A step's scores are those of the group with its stage's index.
    if (stage.index != own.group) {
      attend_given(acc, operands, true, [] {});
      end_products(acc);
      ++step;
    }
    if (step < last) {
      float scores[kRowScores];
      begin_scores(scores, operands, stage);
#pragma unroll 1
      while (true) {
        wait_for(shared.full[stage.index], stage.parity);
        multiply_rows<kStepsAhead, kSteps>(scores, operands);
        attend_own(acc, scores, operands, step == first, step, limit);
        if (step + 2 >= last) break;
        attend_given(acc, operands, false, [&] {
          Stage<kRowStages> next = stage;
          next.advance();
          begin_scores(scores, operands, next);
        });
        step += 2;
      }
      end_products(acc);
      if (step + 1 < last) {
        attend_given(acc, operands, false, [] {});
        end_products(acc);
      }
    }
    release();
    write_rows(shared, acc, p, s, own);
  }

  // Attend to all segments that are announced.
  __device__ __forceinline__ void attend_all(const LatentParams& p) {
    shared.for_announced(own.lane,
                         [&](const LatentSegment& s) { attend(p, s); });
  }
};

}  // namespace turbo
