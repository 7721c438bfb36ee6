// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The shared memory and the registers of a block of decode attention to latents
// for few query rows, which are the columns of the tensor core's products.
#pragma once

#if LATENT_LISTED
  #include "latent/listed.cuh"
#else
  #include "latent/decoded.cuh"
#endif

namespace turbo {

// Blocks of 64 coordinates.
constexpr int kOutputs = LATENT_RANK / 64;
// Warpgroups of producers, each with a stage.
constexpr int kProducers = 2;

// Tokens are listed by their slots, or lie in order in a sequence's blocks.
constexpr bool kListed = LATENT_LISTED;
constexpr int kWalkStride = kProducers * kStepTiles;
#if LATENT_LISTED
constexpr int kCopySpace = kListedSpace;
using ColumnsWalk = ListWalk<kWalkStride>;
#else
constexpr int kCopySpace = kTileSpace;
using ColumnsWalk = TileWalk<kWalkStride>;
#endif

// Bytes of the scores of a block of eight columns: of a warpgroup, of a warp.
constexpr int kScoreBytes = kGroupThreads * 16;
constexpr int kWarpBytes = kScoreBytes / kStepTiles;

template <int columns>
struct alignas(1024) ColumnsShared
    : DecodedSteps<kProducers, LATENT_RANK / 64> {
  static constexpr int kColumns = columns;
  static constexpr int kSets = 1, kWarps = kStepTiles;
  static constexpr int kQueryBytes = kPlaceBytes * columns;
  uint8_t query[kOperandBlocks][kQueryBytes];
  // Tiles of producers' warps.
  uint8_t copies[kProducers * kStepTiles][kCopySpace];
  // Scores of a stage, as the lanes of a warpgroup have them. A warp's weights
  // replace its own: core matrices of 16 bytes by eight tokens.
  float4 scores[kProducers][columns / 8][kGroupThreads];
  // Per pair of columns: the factors of scores, then the references.
  float4 scaling[kSets][columns / 2];
  float2 across[kSets][kWarps][columns / 2];  // by warp
  float sums[columns];
  int limits[columns];  // tokens that columns see
  // The queries of a segment are written by consumers, and a producer's tile is
  // copied by the bulk copies of its warp.
  uint64_t written[kProducers], copied[kProducers * kStepTiles];
};

template <int columns>
__device__ __forceinline__ __half2& query_pair(ColumnsShared<columns>& shared,
                                               int column,
                                               const DepthPlace& at) {
  return swizzled_pair(shared.query[at.step / 4], column, at);
}

// The place of a consumer's thread.
struct ColumnsPlace {
  int warp, lane;  // in the warpgroup, in the warp

  __device__ __forceinline__ int thread() const { return 32 * warp + lane; }
  __device__ __forceinline__ void sync() const {
    sync_threads(1, kGroupThreads);
  }
  __device__ __forceinline__ bool sync_or(bool x) const {
    return sync_threads_or(1, kGroupThreads, x);
  }
};

// A lane keeps the scaling of its pairs of columns, where registers have room.
template <int columns>
constexpr bool kKeepsScaling = columns < 32 && !kListed;

// The running result. Lane 4 * g + t of a warp has columns 8 * n + 2 * t and
// the next. It has rows 16 * warp + g and 16 * warp + g + 8, in blocks of 64
// rows: see output_coordinate.
template <int columns>
struct ColumnsAccumulator {
  float output[kOutputs][columns / 2];
  float sum[columns / 4];
  float4 kept[columns / 8];

  // Keep the scaling of a segment, which has been written.
  __device__ __forceinline__ void keep_scaling(
      const ColumnsShared<columns>& shared, int t) {
    if constexpr (kKeepsScaling<columns>) {
#pragma unroll
      for (int n = 0; n < columns / 8; ++n)
        kept[n] = shared.scaling[0][4 * n + t];
    }
  }
  __device__ __forceinline__ float4
  scaling(const ColumnsShared<columns>& shared, int n, int t) const {
    if constexpr (kKeepsScaling<columns>) return kept[n];
    return shared.scaling[0][4 * n + t];
  }
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) {
#pragma unroll
      for (float& x : output[m]) x = 0.0f;
    }
#pragma unroll
    for (float& x : sum) x = 0.0f;
  }

  __device__ __forceinline__ void hold_outputs() {
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) hold(output[m]);
  }
};

__device__ __forceinline__ int output_coordinate(int m, int warp, int g,
                                                 int later) {
  return 128 * (m / 2) + 32 * (g / 2) + 16 * (m % 2) + 8 * (warp / 2) +
         4 * (warp % 2) + 2 * later + g % 2;
}

}  // namespace turbo
