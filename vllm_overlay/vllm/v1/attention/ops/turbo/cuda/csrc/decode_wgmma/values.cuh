// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Values decoded to fp16 in registers. They are the A operand of O^T = V^T P^T,
// coordinates by queries.
//
// A warp has a quarter of the coordinates of all tokens. Each of its lanes has
// the coordinates of whole words. Scales are decoded once per step, for all
// warps.
#pragma once

#include "decode_wgmma/keys.cuh"

namespace turbo {

constexpr int kOutputs = HEAD_SIZE / 64;  // blocks of 64 coordinates
constexpr int kWarpGroups = NUM_GROUPS / 4;

// The coefficients of levels, times scales, of a step's tokens:
// [tile][group][t][h] for tokens 8 * h + 2 * t and the next of a tile.
struct ValueScales {
  uint2 pairs[4][NUM_GROUPS][4][2];
};

// The scales of V of two neighbouring tokens in a group: see ScaleWords.
__device__ __forceinline__ __half2 scale_pair(uint32_t first, uint32_t second,
                                              int place) {
  constexpr uint32_t kMask = ((1u << SCALE_DELTA_BITS) - 1) * 0x00010001u;
  const int shift = 8 + SCALE_DELTA_BITS * place;
  const uint32_t deltas =
      __byte_perm(first >> shift, second >> shift, 0x5410) & kMask;
  const uint32_t bases = __byte_perm(first, second, 0x5410) & 0x00FF00FFu;
  return as_half2(mad_lo(deltas, 0u - SCALE_DELTA_STEP * (1u << SCALE_SHIFT),
                         bases << SCALE_SHIFT));
}

// Make the scales of a warp's own tile. Tokens below num_tokens are there, if
// the tile is. The scales of others are zero, because their bytes are
// arbitrary. A weight of zero does not make a product with infinity or NaN
// zero.
__device__ __forceinline__ void make_value_scales(ValueScales& scales,
                                                  const uint8_t* tile,
                                                  int index, bool is_there,
                                                  int num_tokens, int lane) {
  const int h = lane / 16, t = lane / 4 % 4, first = lane % 4 * kWarpGroups;
  const int token = 8 * h + 2 * t;
  const uint8_t* row = tile + kGap + VALUE_SCALES_OFFSET + token * SCALE_BYTES;
  uint32_t words[2];
  if constexpr (HEAD_SIZE < 128) {
    words[0] = *reinterpret_cast<const uint32_t*>(row);
    words[1] = words[0] >> 16;
  } else {
    load_words(words, row);
  }
  const bool has_first = is_there && token < num_tokens;
  const bool has_second = is_there && token + 1 < num_tokens;
  words[0] = has_first ? words[0] : 0;
  words[1] = has_second ? words[1] : 0;
#pragma unroll
  for (int j = 0; j < kWarpGroups; ++j) {
    const int group = first + j;
    const __half2 s = scale_pair(words[0], words[1], group);
    scales.pairs[index][group][t][h] = {
        as_bits(__hmul2(s, as_half2(VALUE_LINEAR))),
        as_bits(__hmul2(s, as_half2(VALUE_QUADRATIC)))};
  }
}

// The codes that a lane has: those of a group, a unit of it, and a parity. A
// word has the codes of two tokens.
struct ValuePlace {
  int group, unit, parity;
  int half;  // of the word, for the smallest heads

  __device__ __forceinline__ ValuePlace(int warp, int lane) {
    const int g = lane / 4;
    if constexpr (HEAD_SIZE < 128) {
      group = warp, unit = g / 4, parity = g / 2 % 2, half = g % 2;
    } else {
      group = kWarpGroups * warp + g / 4, unit = g / 2 % 2, parity = g % 2;
      half = 0;
    }
  }
  // The coordinate of row r of fragment m.
  __device__ __forceinline__ int coordinate(int m, int r) const {
    const int k = 2 * (HEAD_SIZE < 128 ? half : m) + r;
    return (2 * k + parity) * NUM_UNITS + group + unit * NUM_GROUPS;
  }
};

// The word of codes of tokens 8 * h + 2 * t and the next.
__device__ __forceinline__ uint32_t value_word(const uint8_t* tile,
                                               const ValuePlace& place, int h,
                                               int t) {
  const uint8_t* codes = tile + kGap + VALUE_CODES_OFFSET;
  const int group = place.group;
  if constexpr (VALUE_BITS == 4) {
    return *reinterpret_cast<const uint32_t*>(
        codes + 4 * HEAD_SIZE * h + 64 * group + 16 * t + 8 * place.unit +
        4 * place.parity);
  } else {
    // See load_value_words of common/tile.cuh.
    const int p = place.unit, c = place.parity;
    const uint32_t branches = *reinterpret_cast<const uint32_t*>(
        codes + 2 * HEAD_SIZE * h + 32 * group + 8 * t + 4 * c);
    const uint32_t path = *reinterpret_cast<const uint32_t*>(
        codes + PATHS_OFFSET + HEAD_SIZE * h + 16 * group + 4 * t);
    const uint32_t changes = path ^ path << 2 & 0xFFFCFFFCu;
    const uint32_t low = p ? select(0xAAAAAAAAu, changes, path)
                           : select(0x55555555u, changes, path & 0x7FFF7FFFu);
    return select(0xCCCCCCCCu, low << (3 - 2 * c - p), branches >> (2 - 2 * p));
  }
}

// Decode a lane's part of a tile.
__device__ __forceinline__ void decode_values(
    uint32_t (&fragments)[kOutputs][4], const uint8_t* tile,
    const ValueScales& scales, int index, const ValuePlace& place, int t) {
  const uint4 s =
      *reinterpret_cast<const uint4*>(scales.pairs[index][place.group][t]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const __half2 a = as_half2(h == 0 ? s.x : s.z);
    const __half2 b = as_half2(h == 0 ? s.y : s.w);
    uint32_t word = value_word(tile, place, h, t);
    if constexpr (HEAD_SIZE < 128)
      word = __byte_perm(word, word, place.half ? 0x2301 : 0x3210);
#pragma unroll
    for (int m = 0; m < kOutputs; ++m) {
      if (m > 0) word = __byte_perm(word, word, 0x2301);
      uint32_t* x = fragments[m] + 2 * h;
      x[0] = value_coordinates(low_positions(word), a, b);
      x[1] = value_coordinates(high_positions(word), a, b);
    }
  }
}

}  // namespace turbo
