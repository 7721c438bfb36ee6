// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The fragments that lanes of a warp have of a tile of 16 tokens, in the
// attention kernels.
//
// Tokens are the rows of the tensor core's result, and queries its eight
// columns: S^T = K q^T and O^T = V^T P^T. A coordinate may be anywhere in a
// fragment. The places are chosen so that a lane's codes of a token are whole
// words. Softmax is in base 2.
#pragma once

#include "common/mma.cuh"
#include "common/tile_warps.cuh"
#include "common/value_levels.cuh"
#include "common/warp.cuh"

namespace turbo {

constexpr int kColumns = 8;
// Units, groups and bytes of scales of a token in a share of a tile.
constexpr int kShareUnits = NUM_UNITS / kTileWarps;
constexpr int kShareGroups = NUM_GROUPS / kTileWarps;
constexpr int kShareScaleBytes = SCALE_BYTES / kTileWarps;
// A score above the running reference by more than this raises it.
constexpr float kMaxExponent = 8.0f;
// Units of K that a lane has of a token.
constexpr int kLaneUnits = kShareUnits / 4;
// Scale groups of V that a lane has: one of each 8. If there are only 4 groups,
// a lane has half of one.
constexpr int kPieces = kShareUnits <= 16 ? 1 : kShareUnits / 16;
constexpr int kPieceWords = HEAD_SIZE < 128 ? 2 : 4;
constexpr int kPieceCodes =
    2 * kPieceWords;  // codes of a row of V^T's fragments
constexpr int kNumOutputs = HEAD_SIZE / 16 / kTileWarps;
static_assert(kNumOutputs == kPieces * kPieceCodes);

// The share of a tile that this warp has.
__device__ __forceinline__ int share_of_warp() {
  return threadIdx.x / 32 % kTileWarps;
}

// The maximum over the eight lanes with the same columns; each gets it.
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

// The coordinate of V that a lane has in row r of fragment i of O^T.
__device__ __forceinline__ int output_coordinate(int i, int r, int lane) {
  const int g = lane / 4;
  if (HEAD_SIZE < 128) return (2 * i + r) * NUM_UNITS + g;
  const int piece = i / kPieceCodes + kPieces * share_of_warp();
  const int code = 2 * (i % 4) + i % kPieceCodes / 4;
  return code * NUM_UNITS + g + 8 * piece + NUM_GROUPS * r;
}

// The half share of scale groups of K that a lane has, counted from the tile's
// first. Lanes 0 and 1 of four have the first half of their share.
__device__ __forceinline__ int key_half(int lane) {
  return 2 * share_of_warp() + lane % 4 / 2;
}

// The run of units of K that a lane has of a token. A share has four runs.
__device__ __forceinline__ int key_place(int lane) {
  return (lane & 1) * (2 * kTileWarps) + key_half(lane);
}

// Load the 4-bit codes of a lane's units of K, for token n of a tile. Codes of
// three bits become codes of four by the trellis: see TurboFormat.
__device__ __forceinline__ void load_key_words(uint32_t (&words)[kLaneUnits],
                                               const uint8_t* tile, int n,
                                               int lane) {
  const uint8_t* row = tile + n * KEY_ROW_BYTES;
  if constexpr (KEY_BITS == 4) {
    load_words(words, row + key_place(lane) * (4 * kLaneUnits));
  } else {
    // Lanes t and t + 1 have units p = 0 and 1 of the same groups.
    const int p = lane & 1, half = key_half(lane);
    uint32_t branches[kLaneUnits], paths[kLaneUnits / 2];
    load_words(branches, row + half * (4 * kLaneUnits));
    load_words(paths, tile + PATHS_OFFSET + n * (HEAD_SIZE / 8) +
                          half * (2 * kLaneUnits));
#pragma unroll
    for (int i = 0; i < kLaneUnits; ++i) {
      // Bit 4k + 2a + p of paths is the path bit of code k of group a. Xored
      // with the path bit two codes before, it goes to bit 4k + 2a + 1. The
      // path bit of the code before goes to bit 4k + 2a.
      const uint32_t path = paths[i / 2];
      const uint32_t changes = path ^ path << 4;
      const uint32_t low =
          select(0xAAAAAAAAu, changes << (p ? 0 : 1), path << (p ? 0 : 3));
      const uint32_t high = branches[i] << (p ? 0 : 2);
      words[i] = select(0x33333333u, i % 2 == 0 ? low : low >> 2, high);
    }
  }
}

// Load a share's scale words, for a token and the next.
__device__ __forceinline__ void load_scale_words(uint32_t (&words)[2 * kPieces],
                                                 const uint8_t* row) {
  if constexpr (kTileWarps == 1) {
    load_words(words, row);
  } else {
    uint32_t first[kPieces], second[kPieces];
    const uint8_t* share = row + kShareScaleBytes * share_of_warp();
    load_words(first, share);
    load_words(second, share + SCALE_BYTES);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      words[i] = first[i], words[kPieces + i] = second[i];
  }
}

// The scales of V of tokens 8 * h + 2 * t and the next, in this lane's group.
__device__ __forceinline__ uint32_t value_scales(const uint8_t* tile, int h,
                                                 int piece, int lane) {
  const int g = lane / 4 % NUM_GROUPS, t = lane % 4;
  const uint8_t* row =
      tile + VALUE_SCALES_OFFSET + (8 * h + 2 * t) * SCALE_BYTES;
  // The bit of an fp16 scale that a delta's lowest bit is shifted to.
  constexpr int kPlace = SCALE_SHIFT + SCALE_DELTA_STEP - 1;
  constexpr uint32_t kMask = (0x00010001u << SCALE_DELTA_BITS) - 0x00010001u;
  if constexpr (HEAD_SIZE < 128) {
    const uint32_t words = *reinterpret_cast<const uint32_t*>(row);
    const int shift = 8 + SCALE_DELTA_BITS * g - kPlace;
    const uint32_t deltas =
        SCALE_DELTA_STEP > 1 ? words >> (SCALE_DELTA_BITS * g) : words >> shift;
    return (words & 0x00FF00FFu) * (1 << SCALE_SHIFT) -
           (deltas & kMask << kPlace);
  } else {
    uint32_t words[2 * kPieces];
    load_scale_words(words, row);
    const uint32_t first = words[piece], second = words[kPieces + piece];
    // From both words, the byte in which the delta begins, and the next.
    const int bit = 8 + SCALE_DELTA_BITS * g, byte = bit / 8;
    const uint32_t bytes = (byte + 1) << 4 | byte;
    const uint32_t deltas =
        __byte_perm(first, second, bytes + 0x4400 + (bytes << 8));
    const uint32_t bases = __byte_perm(first, second, 0x5410);
    return mad_lo(deltas & kMask << bit % 8, 0u - (1u << (kPlace - bit % 8)),
                  (bases & 0x00FF00FFu) * (1 << SCALE_SHIFT));
  }
}

// Load the 4-bit codes of V of tokens 8 * h + 2 * t and the next, in this
// lane's group, for low_positions and high_positions. The words are
// [unit][parity of the code].
__device__ __forceinline__ void load_value_words(uint32_t (&words)[kPieceWords],
                                                 const uint8_t* tile, int h,
                                                 int piece, int lane) {
  const int g = lane / 4, t = lane % 4;
  const int group = g % NUM_GROUPS + 8 * (piece + kPieces * share_of_warp());
  const int lane_unit =
      g / NUM_GROUPS;  // if a lane has only one unit of a group
  const uint8_t* codes = tile + VALUE_CODES_OFFSET;
  if constexpr (VALUE_BITS == 4) {
    load_words(words,
               codes + 4 * HEAD_SIZE * h + 64 * group + 16 * t + 8 * lane_unit);
  } else {
    uint32_t branches[2], paths[1];
    load_words(branches, codes + 2 * HEAD_SIZE * h + 32 * group + 8 * t);
    load_words(paths,
               codes + PATHS_OFFSET + HEAD_SIZE * h + 16 * group + 4 * t);
    const uint32_t path = paths[0];
    const uint32_t changes = path ^ path << 2 & 0xFFFCFFFCu;
    // Bit 4k + 2c + p of a half is the path bit of code 2k + c of unit p. A
    // code takes that bit, xored with the one two codes before, and the path
    // bit of the code before.
    const uint32_t low[2] = {select(0x55555555u, changes, path & 0x7FFF7FFFu),
                             select(0xAAAAAAAAu, changes, path)};
#pragma unroll
    for (int i = 0; i < kPieceWords; ++i) {
      const int c = i % 2;
      const int p = kPieceWords == 4 ? i / 2 : lane_unit;
      words[i] = select(0xCCCCCCCCu, (p ? low[1] : low[0]) << (3 - 2 * c - p),
                        branches[c] >> (2 - 2 * p));
    }
  }
}

}  // namespace turbo
