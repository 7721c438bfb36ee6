// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The shared memory and the registers of a block of decode attention to latents
// for many query rows, which are the rows of the tensor core's products.
#pragma once

#include "latent/decoded.cuh"

namespace turbo {

static_assert(LATENT_RANK == 512 && ROPE_SIZE == 64,
              "other shapes have the kernels of columns");

constexpr int kRowsOfBlock = 64;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kProducerWarps = 4;  // one for each tile of a step
// Registers of a lane. The sum over three warpgroups is what a block has.
constexpr int kConsumerRegisters = 192;
constexpr int kProducerRegisters = 120;
// Blocks of a latent that a consumer adds up.
constexpr int kOwnBlocks = LATENT_RANK / 64 / kConsumers;
// Blocks whose products with the queries are issued ahead, while the other
// consumer weighs its tokens. Tuning: us of 32 x 32768 and 64 heads with 0 and
// 3, an H200, 2026-11: 313 and 307.
constexpr int kBlocksAhead = 3;
// Each consumer has the scores of a stage.
constexpr int kRowStages = kConsumers;

struct alignas(1024) RowsShared : DecodedSteps<kRowStages, kOperandBlocks> {
  static constexpr int kColumns = kRowsOfBlock;
  static constexpr int kSets = 1, kWarps = kConsumerWarps;
  uint8_t query[kOperandBlocks][kOperandBytes];
  uint8_t weights[kOperandBytes];  // rows by tokens of a step
  // Per pair of rows: the factors of scores, then the references.
  float4 scaling[kSets][kRowsOfBlock / 2];
  float sums[kConsumers][kRowsOfBlock];
  int limits[kRowsOfBlock];  // tokens that rows see
  int is_raised[kRowStages];
  // The blocks of a stage whose products are issued ahead are full.
  uint64_t begun[kRowStages];
};
static_assert(sizeof(RowsShared) <= 227 << 10);

// The reference of a row.
__device__ __forceinline__ float& reference_of(RowsShared& shared, int row) {
  return reinterpret_cast<float*>(&shared.scaling[0][row / 2])[2 + row % 2];
}

__device__ __forceinline__ __half2& query_pair(RowsShared& shared, int row,
                                               const DepthPlace& at) {
  return swizzled_pair(shared.query[at.step / 4], row, at);
}

// The running result of a consumer, over all tokens and half of the
// coordinates. Lane 4 * g + t of a warp has rows 16 * warp + g and
// 16 * warp + g + 8, and places 8 * j + 2 * t and the next. Sums are over the
// tokens whose scores the consumer has.
struct RowsAccumulator {
  float output[64 * kOwnBlocks / 2];
  float sum[2], factor[2], reference[2];

  // row: the first of the lane's rows.
  __device__ __forceinline__ void begin(RowsShared& shared, int row) {
#pragma unroll
    for (float& x : output) x = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4& pair = shared.scaling[0][(row + 8 * r) / 2];
      factor[r] = row % 2 ? pair.y : pair.x;
      reference[r] = kNoReference, sum[r] = 0.0f;
    }
  }
  // Change the reference of the lane's r-th row.
  __device__ __forceinline__ void change(int r, float to) {
    const float rescale = exp2_approx(reference[r] - to);
    reference[r] = to, sum[r] *= rescale;
#pragma unroll
    for (int i = 0; i < 64 * kOwnBlocks / 2; i += 4) {
      output[i + 2 * r] *= rescale;
      output[i + 2 * r + 1] *= rescale;
    }
  }
};

// The place of a consumer's thread.
struct RowsPlace {
  int group, warp, lane;  // in the block, in the group, in the warp

  __device__ __forceinline__ int first_row() const {
    return 16 * warp + lane / 4;
  }
  // Barriers of a group, of the weights of a stage, and of all consumers.
  __device__ __forceinline__ bool sync_group_or(bool x) const {
    return sync_threads_or(1 + group, kGroupThreads, x);
  }
  static __device__ __forceinline__ void give_weights(int stage) {
    arrive_threads(1 + kConsumers + stage, kConsumerThreads);
  }
  static __device__ __forceinline__ void wait_for_weights(int stage) {
    sync_threads(1 + kConsumers + stage, kConsumerThreads);
  }
  static __device__ __forceinline__ void sync_all() {
    sync_threads(1 + kConsumers + kRowStages, kConsumerThreads);
  }
};

}  // namespace turbo
