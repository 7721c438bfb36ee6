// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Scores of the recent window's keys. The tensor core multiplies codes, which
// are exact in 16 bits, by queries as the model has them, and scales follow in
// fp32: so a key is read once for several query heads.
//
// Tokens are the rows of a product, of which eight are used. A lane has eight
// coordinates of each 32 of a token, so two lanes of four have those of one
// scale. Columns are query heads twice: half of them have the query's
// coordinates of the first two lanes, and zeros for those of the others, and
// half the other way round. So a lane's sums have one scale.
#pragma once

#include "common/mma.cuh"
#include "merge/newest.cuh"

namespace turbo {

// Tokens that a warp attends to at once.
constexpr int kRecentTokens = 8;
// Query heads: with more, or with as many of long vectors, sums of values take
// too many registers.
constexpr int kRecentHeads = kChunks > 1 ? 2 : 4;
// Coordinates that four lanes have at once.
constexpr int kKeyColumns = 32;
constexpr int kKeyParts = HEAD_SIZE / kKeyColumns;
static_assert(2 * SCALE_GROUP == kKeyColumns);

// A code of four in a word, exactly: with its sign bit flipped it is that of a
// float's mantissa.
__device__ __forceinline__ float code_of(uint32_t flipped, int i) {
  constexpr uint32_t kBits = 0x4B000000u;  // of 2**23
  return __uint_as_float(__byte_perm(flipped, kBits, 0x7440 | i)) - 8388736.0f;
}

// Of the 8-bit vectors' kVector coordinates that a lane has.
__device__ __forceinline__ float4 codes_of(uint32_t word) {
  const uint32_t flipped = word ^ 0x80808080u;
  return {code_of(flipped, 0), code_of(flipped, 1), code_of(flipped, 2),
          code_of(flipped, 3)};
}

// Two floats as bf16, their lower bits cut off.
__device__ __forceinline__ uint32_t upper_halves(float x, float y) {
  return __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
}

// What the tensor core multiplies if the model's dtype is T: fp16 and bf16
// themselves. An fp32 number is a sum of three in bf16.
template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, __half>;
template <typename T>
constexpr int kPieces = sizeof(T) == 4 ? 3 : 1;

// Four codes, in pairs.
template <typename T>
__device__ __forceinline__ uint2 pairs_of(uint32_t word) {
  if constexpr (kIsHalf<T>) {
    // 1024 and a number of eight bits in the mantissa, less 1024 and 128.
    constexpr uint32_t kBits = 0x64646464u, kMinusBias = 0xE480E480u;
    const uint32_t flipped = word ^ 0x80808080u;
    const __half2 low = as_half2(__byte_perm(flipped, kBits, 0x4140));
    const __half2 high = as_half2(__byte_perm(flipped, kBits, 0x4342));
    return {as_bits(__hadd2(low, as_half2(kMinusBias))),
            as_bits(__hadd2(high, as_half2(kMinusBias)))};
  } else {
    const float4 x = codes_of(word);
    return {upper_halves(x.x, x.y), upper_halves(x.z, x.w)};
  }
}

// Load four coordinates of a query, in pairs.
template <typename T>
__device__ __forceinline__ void load_pairs(uint2 (&pieces)[kPieces<T>],
                                           const T* query) {
  if constexpr (kPieces<T> == 1) {
    pieces[0] = *reinterpret_cast<const uint2*>(query);
  } else {
    float4 x = load_vector(query);
#pragma unroll
    for (int i = 0; i < kPieces<T>; ++i) {
      const uint2 piece = {upper_halves(x.x, x.y), upper_halves(x.z, x.w)};
      x.x -= __uint_as_float(piece.x << 16);
      x.y -= __uint_as_float(piece.x & 0xFFFF0000u);
      x.z -= __uint_as_float(piece.y << 16);
      x.w -= __uint_as_float(piece.y & 0xFFFF0000u);
      pieces[i] = piece;
    }
  }
}

// A lane's part of kRecentTokens keys: of token lane / 4.
struct RecentKeys {
  uint2 codes[kKeyParts];
  float scales[kKeyParts];  // of the sums that the lane has

  __device__ __forceinline__ void load(const WindowPages& window,
                                       const uint8_t* page, int row, int lane) {
    const uint8_t* own =
        page + window.keys + row * HEAD_SIZE + lane % 4 * (kKeyColumns / 4);
#pragma unroll
    for (int j = 0; j < kKeyParts; ++j) {
      codes[j] = __ldcg(reinterpret_cast<const uint2*>(own + kKeyColumns * j));
    }
    const auto* words = reinterpret_cast<const uint2*>(
        page + window.key_scales + row * (2 * kWindowGroups));
    // bf16 as fp32: the first of a pair or the second.
    const unsigned nibbles = lane % 4 < 2 ? 0x1044 : 0x3244;
#pragma unroll
    for (int j = 0; j < kKeyParts; j += 2) {
      const uint2 pairs = __ldcg(words + j / 2);
      scales[j] = __uint_as_float(__byte_perm(pairs.x, 0, nibbles));
      scales[j + 1] = __uint_as_float(__byte_perm(pairs.y, 0, nibbles));
    }
  }
};

// Scores of token lane / 4 with heads 2 * (lane % 2) and the next.
//
// query: a lane's coordinates of the head lane / 4 % 4, if there is one.
template <typename T>
__device__ __forceinline__ void score_recent(float (&scores)[2],
                                             const RecentKeys& keys,
                                             const T* query, bool has_query) {
  scores[0] = scores[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < kKeyParts; ++j) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 a = pairs_of<T>(i == 0 ? keys.codes[j].x : keys.codes[j].y);
      uint2 b[kPieces<T>] = {};
      if (has_query) load_pairs<T>(b, query + kKeyColumns * j + kVector * i);
#pragma unroll
      for (int k = 0; k < kPieces<T>; ++k) {
        if constexpr (kIsHalf<T>) {
          mma_f16(sums, a.x, 0, a.y, 0, b[k].x, b[k].y);
        } else {
          mma_bf16(sums, a.x, 0, a.y, 0, b[k].x, b[k].y);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      scores[c] = fmaf(keys.scales[j], sums[c], scores[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) scores[c] += __shfl_xor_sync(~0u, scores[c], 2);
}

}  // namespace turbo
