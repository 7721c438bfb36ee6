// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A tile in shared memory, and its keys decoded to fp16 in registers. They are
// the A operand of S^T = K q^T, tokens by queries.
//
// A warp multiplies the 16 tokens of a tile. Tokens may be in any order of
// rows, and coordinates in any order of the depth. Lane 4 * g + t has rows g
// and g + 8. It has both units of kLaneGroups scale groups of a token.
#pragma once

#include "common/bulk.cuh"
#include "common/key_tables.cuh"

namespace turbo {

constexpr int kLaneGroups = NUM_GROUPS / 4;
constexpr int kSteps = HEAD_SIZE / 16;  // of the depth, two per unit of a lane
// Codes of the second eight tokens are moved by half a row, so that lanes that
// load together use all banks. kHalfLanes rows of the first eight tokens
// alternate with as many of the second eight.
constexpr int kHalfLanes = 256 / HEAD_SIZE;
constexpr int kGap = KEY_BITS == 4 ? KEY_ROW_BYTES / 2 : 0;
constexpr int kFirstBytes = 8 * KEY_ROW_BYTES;
constexpr int kTileSpace = (TILE_BYTES + kGap + 127) / 128 * 128;
static_assert(HEAD_SIZE <= 128 && kGap % 16 == 0 && TILE_BYTES % 16 == 0);

// The token of a tile in row g. Row g + 8 has the token eight before or after
// it.
__device__ __forceinline__ int token_of_row(int g) {
  return g + (g & kHalfLanes ? 8 : 0);
}

// Copy a tile, which takes kTileSpace bytes of shared memory.
__device__ __forceinline__ void copy_tile(uint32_t target,
                                          const uint8_t* source,
                                          uint32_t barrier) {
  expect_bytes(barrier, TILE_BYTES);
  if constexpr (kGap == 0) {
    copy_bulk(target, source, TILE_BYTES, barrier);
  } else {
    copy_bulk(target, source, kFirstBytes, barrier);
    copy_bulk(target + kFirstBytes + kGap, source + kFirstBytes,
              TILE_BYTES - kFirstBytes, barrier);
  }
}

// A lane's words of a token of K: [unit of the group][group].
using KeyWords = uint32_t[2][kLaneGroups];

__device__ __forceinline__ void load_key_units(KeyWords& words,
                                               const uint8_t* tile, int n,
                                               int t) {
  if constexpr (KEY_BITS == 4) {
    const uint8_t* row =
        tile + n * KEY_ROW_BYTES + n / 8 * kGap + t * (4 * kLaneGroups);
    load_words(words[0], row);
    load_words(words[1], row + 4 * NUM_GROUPS);
  } else {
    // See load_key_words of common/tile.cuh: path words serve two groups.
    constexpr int kPaths = (kLaneGroups + 1) / 2;
    uint32_t branches[kLaneGroups], paths[kPaths];
    load_words(branches, tile + n * KEY_ROW_BYTES + t * (4 * kLaneGroups));
    load_words(paths, tile + PATHS_OFFSET + n * (HEAD_SIZE / 8) +
                          t * kLaneGroups / 2 * 4);
#pragma unroll
    for (int j = 0; j < kLaneGroups; ++j) {
      const uint32_t path = paths[j / 2];
      const uint32_t changes = path ^ path << 4;
      const bool is_second = kLaneGroups == 1 ? t % 2 != 0 : j % 2 != 0;
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const uint32_t low =
            select(0xAAAAAAAAu, changes << (p ? 0 : 1), path << (p ? 0 : 3));
        words[p][j] = select(0x33333333u, is_second ? low >> 2 : low,
                             branches[j] << (p ? 0 : 2));
      }
    }
  }
}

// The scales of a lane's groups of a token. Two lanes share one half of the
// token's groups.
struct KeyScales : StoredKeyScales {
  bool are_reduced;

  __device__ __forceinline__ KeyScales() {}
  __device__ __forceinline__ KeyScales(const uint8_t* row, int t)
      : StoredKeyScales(row, t / 2, is_large(row)), are_reduced(is_large(row)) {
    deltas >>= t % 2 * (kLaneGroups * SCALE_DELTA_BITS);
  }
};

// The place of a query's coordinate in the depth: a step, and a place in the
// step. Lane t of four has two pairs of places. They begin at 2 * t and
// 8 + 2 * t.
struct DepthPlace {
  int step, place;
};

__device__ __forceinline__ DepthPlace place_of(int coordinate) {
  const int unit = coordinate % NUM_UNITS, code = coordinate / NUM_UNITS;
  const int group = unit % NUM_GROUPS;
  const int t = group / kLaneGroups;
  const int slot = 2 * (group % kLaneGroups) + unit / NUM_GROUPS;
  return {2 * slot + code / 4, code / 2 % 2 * 8 + 2 * t + code % 2};
}

}  // namespace turbo
