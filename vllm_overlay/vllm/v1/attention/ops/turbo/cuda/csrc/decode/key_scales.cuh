// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Scales of K.
#pragma once

#include <type_traits>

#include "common/tile.cuh"

namespace turbo {

// Whether the lanes of a warp decode scales for each other. Otherwise each lane
// decodes all that it needs, and three others decode the same.
constexpr bool kScalesByWarp = DECODE_SCALES_BY_WARP != 0;

// A scale code in a float's exponent and upper mantissa is 2^-112 times the
// scale.
constexpr int kScaleShift = 20;
constexpr float kScaleUnit = 0x1p112f;

// Decode a token's scales, times 2^-112, for the share's groups from `first`
// on. A word, or its second half, begins with group `first`.
template <int kGroups>
__device__ __forceinline__ void decode_scales(float (&scales)[kGroups],
                                              const uint8_t* tiles, int token,
                                              int first) {
  using Word = std::conditional_t<SCALE_WORD_BYTES == 2, uint16_t, uint32_t>;
  const uint8_t* row = tiles + token / TILE_TOKENS * TILE_BYTES +
                       KEY_SCALES_OFFSET + token % TILE_TOKENS * SCALE_BYTES +
                       share_of_warp() * kShareScaleBytes;
  const Word* words =
      reinterpret_cast<const Word*>(row) + first / SCALE_WORD_GROUPS;
  constexpr int kHalf = SCALE_WORD_GROUPS / 2;
  static_assert(kGroups % kHalf == 0);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const uint32_t word = words[i / SCALE_WORD_GROUPS];
    const uint32_t base = (word & 0xFF) << kScaleShift;
    // Deltas of a word's second half are moved to the places of the first's.
    const int half = (first + i) % SCALE_WORD_GROUPS / kHalf;
    const uint32_t deltas = word >> (half * kHalf * SCALE_DELTA_BITS);
    const int place = 8 + SCALE_DELTA_BITS * (i % kHalf);
    const int shift = kScaleShift + SCALE_DELTA_STEP - 1 - place;
    const uint32_t mask = ((1u << SCALE_DELTA_BITS) - 1) << place;
    scales[i] =
        __uint_as_float(mad_lo(deltas & mask, 0u - (1u << shift), base));
  }
}

// The initial value of scores, because their products begin with kMagic. Every
// other product is subtracted (see key_scores). Sums then stay small, and are
// rounded as small numbers are.
template <int kFirst, int kLast, int kGroups>
__device__ __forceinline__ float start_of(const float (&scales)[kGroups]) {
  static_assert(kFirst % 2 == 0 && kLast % 2 == 0);
  float total = 0.0f;
#pragma unroll
  for (int i = kFirst; i < kLast; i += 2) total += scales[i] - scales[i + 1];
  return -kMagic * total;
}

// The scales of a warp's two tiles, times 2^-112, in shared memory.
//
// kByHalf: whether a lane needs the scales of only one half of the groups.
template <bool kByHalf>
struct WarpKeyScales {
  float scales[2 * TILE_TOKENS][kShareGroups];
  float starts[2 * TILE_TOKENS][2];  // of each half, or [0] of all groups

  // Each lane decodes the scales of a token.
  __device__ __forceinline__ void decode(const uint8_t* tiles, int lane) {
    static_assert(2 * TILE_TOKENS == 32 && kShareGroups == 2 * kLaneUnits);
    alignas(16) float scale[kShareGroups];
    decode_scales(scale, tiles, lane, 0);
    using Vector = std::conditional_t<kShareGroups % 4 == 0, float4, float2>;
#pragma unroll
    for (int i = 0; i < sizeof(scale) / sizeof(Vector); ++i) {
      reinterpret_cast<Vector*>(scales[lane])[i] =
          reinterpret_cast<const Vector*>(scale)[i];
    }
    constexpr int kFirstLast = kByHalf ? kLaneUnits : kShareGroups;
    *reinterpret_cast<float2*>(starts[lane]) = {
        start_of<0, kFirstLast>(scale),
        kByHalf ? start_of<kLaneUnits, kShareGroups>(scale) : 0.0f};
  }

  // Load the scales of half of a token's groups, or of all. Returns the initial
  // value of scores.
  template <int kGroups>
  __device__ __forceinline__ float load(float (&x)[kGroups], const uint8_t*,
                                        int token, int half) const {
    load_words(
        reinterpret_cast<uint32_t (&)[kGroups]>(x),
        reinterpret_cast<const uint8_t*>(scales[token] + half * kLaneUnits));
    return starts[token][half];
  }
};

// Scales that each lane decodes when it needs them.
struct LaneKeyScales {
  __device__ __forceinline__ void decode(const uint8_t*, int) {}

  template <int kGroups>
  __device__ __forceinline__ float load(float (&x)[kGroups],
                                        const uint8_t* tiles, int token,
                                        int half) const {
    decode_scales(x, tiles, token, half * kLaneUnits);
    return start_of<0, kGroups>(x);
  }
};

template <bool kByHalf>
using KeyScales =
    std::conditional_t<kScalesByWarp, WarpKeyScales<kByHalf>, LaneKeyScales>;

}  // namespace turbo
