// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A tile of 16 latents in a warp's shared memory, and its decoding to fp16 in
// registers. It becomes an A operand of the tensor core, with tokens as rows.
//
// Tokens may be in any order of rows, and coordinates in any order of the
// depth. Lane 4 * g + t has rows g and g + 8. In the words of a token it has
// 16-byte chunks t, t + 4 and so on. In the rope it has the 16 coordinates of a
// scale.
#pragma once

#include "common/bulk.cuh"
#include "common/value_levels.cuh"

namespace turbo {

// Codes of a word, and words of a lane's run.
constexpr int kWordCodes = 8;
constexpr int kRunWords = 4;
constexpr int kRowBytes = LATENT_RANK / 2;
constexpr int kHalfBytes = 8 * kRowBytes;
constexpr int kOtherBytes = TILE_BYTES - 2 * kHalfBytes;
// Codes of the second eight tokens are moved by half of the banks, so that
// lanes that load together use all banks: see token_of_row.
constexpr int kSecondHalf = kHalfBytes + 64;
constexpr int kOthers = kSecondHalf + kHalfBytes;
constexpr int kTileSpace = (kOthers + kOtherBytes + 127) / 128 * 128;
constexpr int kRopes = kOthers + ROPE_OFFSET - 2 * kHalfBytes;
constexpr int kLatentScales = kOthers + LATENT_SCALES_OFFSET - 2 * kHalfBytes;
constexpr int kRopeScales = kOthers + ROPE_SCALES_OFFSET - 2 * kHalfBytes;
static_assert(LATENT_BITS == 4 && SCALE_WORD_BYTES == 4 &&
              SCALE_WORD_GROUPS == 8 && SCALE_DELTA_STEP == 1);
static_assert(kRowBytes % 128 == 0 && kOtherBytes % 16 == 0);

// The token of a tile in row g. Row g + 8 has the token four later. Rows 2 * i
// and the next have tokens of both halves, one even and one odd, whose words of
// codes, of the rope and of scales have different banks.
__device__ __forceinline__ int token_of_row(int g) {
  return (g & 1) * 9 ^ g >> 1;
}

// Copy a tile, which takes kTileSpace bytes of shared memory.
__device__ __forceinline__ void copy_tile(uint32_t target,
                                          const uint8_t* source,
                                          uint32_t barrier) {
  expect_bytes(barrier, TILE_BYTES);
  copy_bulk(target, source, kHalfBytes, barrier);
  copy_bulk(target + kSecondHalf, source + kHalfBytes, TILE_BYTES - kHalfBytes,
            barrier);
}

// The coefficients of levels, times scales, for both groups of a lane's run.
// The first group has the lower halves.
struct RunScales {
  __half2 a, b;

  // word: the scale word of the run's eight groups.
  // shift: 1 + 6 * t.
  __device__ __forceinline__ RunScales(uint32_t word, int shift) {
    constexpr uint32_t kDelta = 7u << SCALE_SHIFT;
    const uint32_t deltas = word >> shift;  // the first at bit SCALE_SHIFT
    const uint32_t base = (word & 0xFFu) * (0x00010001u << SCALE_SHIFT);
    const uint32_t packed = and_or(deltas << 13, kDelta << 16, deltas & kDelta);
    const __half2 scales = as_half2(base - packed);
    a = __hmul2(scales, as_half2(VALUE_LINEAR));
    b = __hmul2(scales, as_half2(VALUE_QUADRATIC));
  }
};

// Decode the coordinates of a word, two per register, in order.
__device__ __forceinline__ void decode_word(uint32_t (&values)[4],
                                            uint32_t word, __half2 a,
                                            __half2 b) {
  const uint32_t first = word << 2, second = word >> 6;
  values[0] = value_coordinates(low_positions(first), a, b);
  values[1] = value_coordinates(high_positions(first), a, b);
  values[2] = value_coordinates(low_positions(second), a, b);
  values[3] = value_coordinates(high_positions(second), a, b);
}

__device__ __forceinline__ uint32_t word_of(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Decode four coordinates of the rope, two per register.
__device__ __forceinline__ void decode_rope(uint32_t (&values)[2],
                                            uint32_t word, __half2 scale) {
  const uint32_t biased = word ^ 0x80808080u;
  const __half2 bias = as_half2(0xE480E480u);  // -1024 - 128
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t x =
        __byte_perm(biased, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
    values[i] = as_bits(__hmul2(__hadd2(as_half2(x), bias), scale));
  }
}

// The words and scales that a lane decodes of a tile.
struct LaneTile {
  static constexpr int kRuns = LATENT_RANK / 128;
  static constexpr int kRopeWords = ROPE_SIZE ? ROPE_SIZE / 16 : 1;

  uint4 codes[2][kRuns];
  uint32_t scales[2][kRuns], ropes[2][kRopeWords], rope_scales[2];

  // Load the lane's part of a tile. Tokens from num_tokens on, which are
  // missing, decode to zeros.
  //
  // walk: has the places of the rope's scales: see TileWalk.
  template <typename Walk>
  __device__ __forceinline__ void load(const uint8_t* tile, int num_tokens,
                                       const Walk& walk, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = token_of_row(g) + 4 * r;
      const uint8_t* row =
          tile + (n / 8) * kSecondHalf + n % 8 * kRowBytes + 16 * t;
      if constexpr (ROPE_SIZE != 0) {
        load_words(ropes[r], tile + kRopes + n * ROPE_SIZE + 16 * t);
        rope_scales[r] = tile[kRopeScales + walk.scale_of(n, t)];
      }
      load_words(scales[r], tile + kLatentScales + n * (LATENT_RANK / 32));
#pragma unroll
      for (int j = 0; j < kRuns; ++j)
        codes[r][j] = *reinterpret_cast<const uint4*>(row + 64 * j);
    }
    if (num_tokens < TILE_TOKENS) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (token_of_row(g) + 4 * r < num_tokens) continue;
#pragma unroll
        for (int j = 0; j < kRuns; ++j) scales[r][j] = 0;
        rope_scales[r] = 0;
      }
    }
  }

  // Bits that depend on all that was loaded, and so are known after it.
  __device__ __forceinline__ uint32_t any_bits() const {
    uint32_t bits = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kRuns; ++j) bits |= codes[r][j].x;
      bits |= scales[r][0];
      if constexpr (ROPE_SIZE != 0) bits |= ropes[r][0] | rope_scales[r];
    }
    return bits;
  }
};

// A batch: the operands of four steps of the depth, from two words per row.
// With a rope, the first batch is the rope's, which may be shorter.
using Fragments = uint32_t[16];

__device__ __forceinline__ void decode_ropes(Fragments& f,
                                             const LaneTile& taken) {
#pragma unroll
  for (int i = 0; i < ROPE_SIZE / 16; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t x[2];
      decode_rope(
          x, taken.ropes[r][i],
          as_half2(taken.rope_scales[r] * (0x00010001u << SCALE_SHIFT)));
      f[4 * i + r] = x[0], f[4 * i + 2 + r] = x[1];
    }
  }
}

// half: the half of a run's words, which have one scale.
__device__ __forceinline__ void decode_words(Fragments& f,
                                             const LaneTile& taken,
                                             const RunScales (&scales)[2],
                                             int run, int half) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const __half2 a =
          half ? __high2half2(scales[r].a) : __low2half2(scales[r].a);
      const __half2 b =
          half ? __high2half2(scales[r].b) : __low2half2(scales[r].b);
      uint32_t x[4];
      decode_word(x, word_of(taken.codes[r][run], 2 * half + i), a, b);
      f[8 * i + r] = x[0], f[8 * i + 2 + r] = x[1];
      f[8 * i + 4 + r] = x[2], f[8 * i + 6 + r] = x[3];
    }
  }
}

__device__ __forceinline__ RunScales scales_of(const LaneTile& taken, int row,
                                               int run) {
  return RunScales(taken.scales[row][run], 1 + 6 * (threadIdx.x % 4));
}

// Decode the first batches of a tile.
__device__ __forceinline__ void decode_first(Fragments (&fragments)[2],
                                             const LaneTile& taken) {
  if constexpr (ROPE_SIZE != 0) decode_ropes(fragments[1], taken);
  const RunScales scales[2] = {scales_of(taken, 0, 0), scales_of(taken, 1, 0)};
  decode_words(fragments[0], taken, scales, 0, 0);
}

// The depth of the products of a token and a query, in steps of 16 places.
// Steps of the rope come after those of the latent. In a step, lane t has
// places 2 * t + b and 8 + 2 * t + b.
constexpr int kLatentSteps = LATENT_RANK / 16;
constexpr int kRopeSteps = ROPE_SIZE / 16;
constexpr int kSteps = kLatentSteps + kRopeSteps;

struct DepthPlace {
  int step, place;  // of an even coordinate and the next
};

__device__ __forceinline__ DepthPlace place_of_latent(int coordinate) {
  const int word = coordinate / kWordCodes, e = coordinate % kWordCodes;
  const int run = word / 16, t = word / 4 % 4, i = word % 4;
  return {(run * kRunWords + i) * 2 + e / 4, e / 2 % 2 * 8 + 2 * t};
}

__device__ __forceinline__ DepthPlace place_of_rope(int coordinate) {
  const int t = coordinate / 16, e = coordinate % 16;
  return {kLatentSteps + e / 4, e / 2 % 2 * 8 + 2 * t};
}

}  // namespace turbo
