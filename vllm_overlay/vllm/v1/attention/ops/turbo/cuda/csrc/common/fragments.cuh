// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What lanes of a warp have of a tile of 16 tokens.
//
// Tokens are the rows of the tensor core's result and queries its eight
// columns: S^T = K q^T and O^T = V^T P^T. Where a coordinate sits in a fragment
// is free, so a lane's codes of a token are whole words. Softmax is in base 2.
//
// A query is one of a query head and query token. With up to four (kPaired),
// columns 4 to 7 of K q^T hold the products of the other half of the scale
// groups, and those of O^T the tokens 8 to 15.
#pragma once

#include "common/format.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"

namespace turbo {

constexpr int kColumns = 8;
// Queries of a KV head that attend at once.
template <bool kPaired>
constexpr int kPassColumns = kPaired ? kColumns / 2 : kColumns;
// Units of a token that a lane has of K.
constexpr int kLaneUnits = NUM_UNITS / 4;
// A lane's scale groups of V: it has one of 8 (or, if there are but 4, half of
// one).
constexpr int kPieces = NUM_UNITS <= 16 ? 1 : NUM_UNITS / 16;
constexpr int kPieceWords = HEAD_SIZE < 128 ? 2 : 4;
constexpr int kPieceCodes =
    2 * kPieceWords;  // codes of a row of V^T's fragments
constexpr int kNumOutputs = HEAD_SIZE / 16;
static_assert(kNumOutputs == kPieces * kPieceCodes);

// Over the eight lanes that have the same columns; each gets the same.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int mask = 4; mask <= 16; mask *= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  }
  return x;
}

__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int mask = 4; mask <= 16; mask *= 2) {
    x += __shfl_xor_sync(~0u, x, mask);
  }
  return x;
}

// Load a lane's 4 * kWords bytes.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords],
                                           const uint8_t* p) {
  if constexpr (kWords == 1) {
    words[0] = *reinterpret_cast<const uint32_t*>(p);
  } else if constexpr (kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(p);
    words[0] = x.x, words[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(p + 4 * i);
      words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z,
      words[i + 3] = x.w;
    }
  }
}

}  // namespace turbo
