// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Scores of the tail's keys. The tensor core multiplies codes by
// queries as the model has them. Codes are exact in 16 bits. Scales follow in
// fp32. A key is then read once for several query heads.
//
// Tokens are the rows of a product, of which eight are used. A lane has eight
// of each 32 coordinates of a token, so two of four lanes share a scale. A
// query head has two columns. The first has the query's coordinates of the
// first two lanes, and zeros for the other two. The second has the others. A
// lane's sum then has one scale.
#pragma once

#include "common/mma.cuh"
#include "common/warp.cuh"
#include "merge/raw.cuh"

namespace turbo {

// Tokens that a warp attends to at once.
constexpr int kTailTokens = 8;
// Query heads that a warp attends with. With more, or with as many of long
// vectors, sums of values take too many registers.
constexpr int kTailHeads = kChunks > 1 ? 2 : 4;
// Coordinates that four lanes have at once.
constexpr int kKeyColumns = 32;
constexpr int kKeyParts = HEAD_SIZE / kKeyColumns;
static_assert(2 * SCALE_GROUP == kKeyColumns);

// Code i of the four in a word, exactly. The code with its sign bit flipped
// becomes the lowest byte of a float's mantissa.
__device__ __forceinline__ float code_of(uint32_t flipped, int i) {
  constexpr uint32_t kBits = 0x4B000000u;  // the bits of 2**23
  return __uint_as_float(__byte_perm(flipped, kBits, 0x7440 | i)) - 8388736.0f;
}

// The codes of kVector coordinates of an 8-bit vector.
__device__ __forceinline__ float4 codes_of(uint32_t word) {
  const uint32_t flipped = word ^ 0x80808080u;
  return {code_of(flipped, 0), code_of(flipped, 1), code_of(flipped, 2),
          code_of(flipped, 3)};
}

// Two floats as bf16, truncated.
__device__ __forceinline__ uint32_t upper_halves(float x, float y) {
  return __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
}

// The operands of the tensor core for the model's dtype T. fp16 and bf16 are
// used as they are. A number of fp32 becomes a sum of three in bf16.
template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, __half>;
template <typename T>
constexpr int kPieces = sizeof(T) == 4 ? 3 : 1;

// Four codes, in pairs.
template <typename T>
__device__ __forceinline__ uint2 pairs_of(uint32_t word) {
  if constexpr (kIsHalf<T>) {
    // The mantissa of 1024 plus an 8-bit number. 1024 and 128 are subtracted.
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

// Four coordinates of a query in each of a lane's places.
template <typename T>
struct TailQuery {
  using Four = std::conditional_t<sizeof(T) == 4, float4, uint2>;
  Four x[kKeyParts][2];

  __device__ __forceinline__ void load(const T* query, bool is_there) {
#pragma unroll
    for (int j = 0; j < kKeyParts; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[j][i] = {};
        if (is_there) {
          x[j][i] = *reinterpret_cast<const Four*>(query + kKeyColumns * j +
                                                   kVector * i);
        }
      }
    }
  }
  __device__ __forceinline__ void pairs(uint2 (&pieces)[kPieces<T>], int j,
                                        int i) const {
    if constexpr (kPieces<T> == 1) {
      pieces[0] = x[j][i];
    } else {
      float4 rest = x[j][i];
#pragma unroll
      for (int k = 0; k < kPieces<T>; ++k) {
        const uint2 piece = {upper_halves(rest.x, rest.y),
                             upper_halves(rest.z, rest.w)};
        rest.x -= __uint_as_float(piece.x << 16);
        rest.y -= __uint_as_float(piece.x & 0xFFFF0000u);
        rest.z -= __uint_as_float(piece.y << 16);
        rest.w -= __uint_as_float(piece.y & 0xFFFF0000u);
        pieces[k] = piece;
      }
    }
  }
};

// Weights of several query heads, side by side.
struct alignas(sizeof(float) * kTailHeads) HeadWeights {
  float of[kTailHeads];
};

// Codes of the tokens that a warp attends to at once.
struct TailTile {
  union {
    alignas(16) uint8_t keys[kTailTokens][HEAD_SIZE + 16];  // for banks
    // The weights go over the keys. They include the scales of values, and are
    // multiplied by values' codes.
    HeadWeights weights[kTailTokens][kTailGroups];
  };
  uint8_t values[kTailTokens][HEAD_SIZE];

  // Copy the codes from rows of a page. `row_of` returns a token's row.
  template <typename RowOf>
  __device__ __forceinline__ void copy(const TailPages& tail,
                                       const uint8_t* page, int lane,
                                       RowOf row_of) {
    constexpr int kBytes = 16, kParts = HEAD_SIZE / kBytes;
#pragma unroll
    for (int i = 0; i < kTailTokens * kParts; i += 32) {
      const int token = (i + lane) / kParts;
      const int byte = (i + lane) % kParts * kBytes;
      const uint8_t* row = page + row_of(token) * HEAD_SIZE + byte;
      copy_async(shared_address(keys[token] + byte), row + tail.keys);
      copy_async(shared_address(values[token] + byte), row + tail.values);
    }
    commit_copies();
  }
};

// The scales of keys of token lane / 4, for the sums that the lane has.
struct TailKeyScales {
  uint2 pairs[kKeyParts / 2];  // of bf16

  __device__ __forceinline__ void load(const TailPages& tail,
                                       const uint8_t* page, int row) {
    const auto* words = reinterpret_cast<const uint2*>(page + tail.key_scales +
                                                       row * (2 * kTailGroups));
#pragma unroll
    for (int i = 0; i < kKeyParts / 2; ++i) pairs[i] = __ldcg(words + i);
  }
  __device__ __forceinline__ float at(int j, int lane) const {
    const uint32_t pair = j % 2 == 0 ? pairs[j / 2].x : pairs[j / 2].y;
    return __uint_as_float(
        __byte_perm(pair, 0, lane % 4 < 2 ? 0x1044 : 0x3244));
  }
};

// Scores of token lane / 4 with heads 2 * (lane % 2) and the next.
//
// query: that of head lane / 4 % 4, if there is one.
template <typename T>
__device__ __forceinline__ void score_tail(float (&scores)[2],
                                           const TailTile& tile,
                                           const TailKeyScales& scales,
                                           const TailQuery<T>& query,
                                           int lane) {
  scores[0] = scores[1] = 0.0f;
  const uint8_t* keys = tile.keys[lane / 4] + lane % 4 * (kKeyColumns / 4);
#pragma unroll
  for (int j = 0; j < kKeyParts; ++j) {
    float sums[4] = {};
    const uint2 codes = *reinterpret_cast<const uint2*>(keys + kKeyColumns * j);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 a = pairs_of<T>(i == 0 ? codes.x : codes.y);
      uint2 b[kPieces<T>];
      query.pairs(b, j, i);
#pragma unroll
      for (int k = 0; k < kPieces<T>; ++k) {
        if constexpr (kIsHalf<T>) {
          mma_f16(sums, a.x, 0, a.y, 0, b[k].x, b[k].y);
        } else {
          mma_bf16(sums, a.x, 0, a.y, 0, b[k].x, b[k].y);
        }
      }
    }
    const float scale = scales.at(j, lane);
#pragma unroll
    for (int c = 0; c < 2; ++c) scores[c] = fmaf(scale, sums[c], scores[c]);
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) scores[c] += __shfl_xor_sync(~0u, scores[c], 2);
}

}  // namespace turbo
