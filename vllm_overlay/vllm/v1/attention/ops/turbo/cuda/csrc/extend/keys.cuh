// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Scores of many queries and a tile's keys, both in fp16: S^T = K q^T, tokens
// by queries.
//
// A key is decoded exactly: its levels have seven bits and its scales four. For
// that the scales are taken relative to a power of two of the token's, which a
// score is multiplied by in fp32. A fragment of K serves all queries of a
// block.
#pragma once

#include "common/tile.cuh"

namespace turbo {

// A lane's scales of a token, relative to the token's factor, for both numbers
// of a pair.
struct RelativeKeyScales {
  static constexpr uint32_t kPair = 0x00010001u << SCALE_SHIFT;
  static constexpr int kExponentPlace = 10 - SCALE_SHIFT;  // in a scale code
  static constexpr uint32_t kExponentMask = 0xFFu >> kExponentPlace
                                                         << kExponentPlace;
  // The factor is 2^-kExponent of a scale with the exponent's bits zero.
  static constexpr int kExponent = 16;

  uint32_t bases, deltas;
  __half2 inverse;
  float factor;

  __device__ __forceinline__ RelativeKeyScales() {}
  __device__ __forceinline__ RelativeKeyScales(const uint8_t* row,
                                               int group_half) {
    uint32_t largest;
    if constexpr (HEAD_SIZE <= 128) {
      const uint32_t word = HEAD_SIZE < 128
                                ? *reinterpret_cast<const uint16_t*>(row)
                                : *reinterpret_cast<const uint32_t*>(row);
      largest = word & 0xFF;
      bases = largest * kPair;
      deltas = word >> (8 + group_half * (kLaneUnits * SCALE_DELTA_BITS));
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(row);
      const uint32_t word = group_half == 0 ? words.x : words.y;
      largest = max(words.x & 0xFF, words.y & 0xFF);
      bases = (word & 0xFF) * kPair;
      deltas = word >> 8;
    }
    // Scales without an exponent are subnormal, as those with one of 1 are not.
    const uint32_t exponent =
        max(largest, 1u << kExponentPlace) & kExponentMask;
    inverse = as_half2(0x7C007C00u - exponent * kPair);
    factor = __uint_as_float((exponent << (23 - kExponentPlace)) +
                             ((127 - kExponent) << 23));
  }

  // Of the lane's unit j.
  __device__ __forceinline__ __half2 operator[](int j) const {
    constexpr uint32_t kMask = (1u << SCALE_DELTA_BITS) - 1;
    const uint32_t delta = deltas >> (SCALE_DELTA_BITS * j) & kMask;
    const uint32_t step = SCALE_DELTA_STEP * kPair;
    return __hmul2(as_half2(mad_lo(delta, 0u - step, bases)), inverse);
  }
};

// Positions of the codes in bits 4 to 7 of both halves.
__device__ __forceinline__ __half2 middle_positions(uint32_t codes) {
  const __half2 shifted = as_half2(and_or(codes, 0x00F000F0u, 0x4C004C00u));
  return __hadd2(shifted, as_half2(0xCC78CC78u));  // 16 + code / 4 - 17.875
}

// A unit's eight coordinates: pair i has those of codes i and i + 4. The sum
// with KEY_ROUNDING rounds to a level.
__device__ __forceinline__ void key_coordinates(uint32_t (&pairs)[4],
                                                uint32_t word, __half2 scale) {
  const __half2 rounding = as_half2(KEY_ROUNDING);
  const __half2 offset = __hneg2(__hmul2(rounding, scale));
  const uint32_t shifted[4] = {word << 4, word, word >> 4, word >> 8};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 v = middle_positions(shifted[i]);
    const __half2 slope =
        __hfma2(__hmul2(v, v), as_half2(KEY_CUBIC), as_half2(KEY_LINEAR));
    pairs[i] = as_bits(__hfma2(__hfma2(v, slope, rounding), scale, offset));
  }
}

// B fragments of queries: [unit of a lane][tile of columns][lane], for two
// products each.
template <int kColumnTiles>
using ColumnQueries = uint4[kLaneUnits][kColumnTiles][32];

// Load the columns' queries.
//
// rows: their places in p_queries; -1 for a column without one.
template <int kColumnTiles, int kWarps>
__device__ __forceinline__ void load_columns(
    ColumnQueries<kColumnTiles>& queries, const __half* p_queries,
    const int* rows, int warp, int lane) {
#pragma unroll 1
  for (int n = warp; n < kColumnTiles; n += kWarps) {
    const int row = rows[kColumns * n + lane / 4];
    const __half* p_query =
        p_queries + int64_t(row) * HEAD_SIZE + kLaneUnits * key_place(lane);
#pragma unroll
    for (int j = 0; j < kLaneUnits; j += 2) {
      uint32_t units[8];  // code i of two units
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        units[i] = 0;
        if (row >= 0) {
          units[i] =
              *reinterpret_cast<const uint32_t*>(p_query + i * NUM_UNITS + j);
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pairs[i] =
              __byte_perm(units[i], units[i + 4], k == 0 ? 0x5410 : 0x7632);
        }
        queries[j + k][n][lane] = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
}

// Scores of kTiles tiles, without the queries' factors. Score c of columns n is
// of token g and column kColumns * n + 2 * t + c, score 2 + c of token g + 8.
template <int kColumnTiles, int kTiles>
__device__ __forceinline__ void column_scores(
    float (&scores)[kTiles][kColumnTiles][4], const uint8_t* tiles,
    const ColumnQueries<kColumnTiles>& queries, int lane) {
  const int g = lane / 4, t = lane % 4;
  uint32_t words[kTiles][2][kLaneUnits];
  RelativeKeyScales scales[kTiles][2];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const uint8_t* tile = tiles + i * TILE_BYTES;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = g + 8 * h;
      load_key_words(words[i][h], tile, token, lane);
      scales[i][h] = RelativeKeyScales(
          tile + KEY_SCALES_OFFSET + token * SCALE_BYTES, t / 2);
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[i][n][c] = 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < kLaneUnits; ++j) {
    uint32_t keys[kTiles][2][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        key_coordinates(keys[i][h], words[i][h][j], scales[i][h][j]);
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const uint4 q = queries[j][n][lane];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint32_t (&k)[2][4] = keys[i];
        mma_f16(scores[i][n], k[0][0], k[1][0], k[0][1], k[1][1], q.x, q.y);
        mma_f16(scores[i][n], k[0][2], k[1][2], k[0][3], k[1][3], q.z, q.w);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[i][n][c] *= scales[i][c / 2].factor;
    }
  }
}

}  // namespace turbo
