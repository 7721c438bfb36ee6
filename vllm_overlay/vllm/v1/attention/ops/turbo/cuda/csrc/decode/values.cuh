// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Softmax, and the sum of a tile's values: O^T = V^T P^T, coordinates by query
// heads.
#pragma once

#include "common/fragments.cuh"
#include "decode/keys.cuh"

namespace turbo {

// Scores above the running reference by more than this raise it.
constexpr float kMaxExponent = 8.0f;
constexpr float kNoReference = -1e30f;
// One warp's running result. Lane 4 * g + t has columns 2 * t and 2 * t + 1,
// and coordinates output_coordinate(i, 0) and, in the other half, (i, 1).
struct Accumulator {
  float output[kNumOutputs][4];
  float reference[2];
  float sum[2];
};

__device__ __forceinline__ int output_coordinate(int i, int r, int lane) {
  const int g = lane / 4;
  if (HEAD_SIZE < 128) return (2 * i + r) * NUM_UNITS + g;
  const int piece = i / kPieceCodes, code = 2 * (i % 4) + i % kPieceCodes / 4;
  return code * NUM_UNITS + g + 8 * piece + NUM_GROUPS * r;
}

// Raise the references to the largest scores and rescale what is summed so far.
template <int kScores>
__device__ __forceinline__ void raise(Accumulator& acc,
                                      const float (&scores)[kScores]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float largest = acc.reference[c];
#pragma unroll
    for (int i = c; i < kScores; i += 2) largest = fmaxf(largest, scores[i]);
    largest = column_max(largest);
    const float rescale = exp2_approx(acc.reference[c] - largest);
    acc.reference[c] = largest;
    acc.sum[c] *= rescale;
#pragma unroll
    for (int i = 0; i < kNumOutputs; ++i) {
      acc.output[i][c] *= rescale;
      acc.output[i][2 + c] *= rescale;
    }
  }
}

// Which of tiles' tokens there are: num_tokens, of which a column does not see
// the last hidden[column], at most most_hidden.
struct Visible {
  int num_tokens;
  int most_hidden;
  const int* hidden;  // [kColumns]
};

// Weights of tiles' tokens as B fragments: tokens 2 * t and 2 * t + 1, and
// those eight later, of column lane / 4. Tokens that are not visible have none.
template <bool kPaired, int kTiles>
__device__ __forceinline__ void weigh(uint32_t (&weights)[kTiles][2],
                                      Accumulator& acc,
                                      const float (&scores)[kTiles][4],
                                      const Query<kPaired>& query,
                                      const Visible& visible, int lane) {
  const int g = lane / 4, t = lane % 4;
  constexpr int kTileScores = kPaired ? 2 : 4, kScores = kTiles * kTileScores;
  float own[kScores];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kTileScores; ++i) {
      float& x = own[tile * kTileScores + i];
      if constexpr (kPaired) {
        // Lanes 0 and 1 of four keep tokens 0 to 7, the others 8 to 15.
        const float sent = t < 2 ? scores[tile][2 + i] : scores[tile][i];
        const float kept = t < 2 ? scores[tile][i] : scores[tile][2 + i];
        x = kept + __shfl_xor_sync(~0u, sent, 2);
      } else {
        x = scores[tile][i];
      }
    }
  }
  float exponent[kScores];
  float above = 0.0f;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    exponent[i] = fmaf(own[i], query.factor[i % 2], -acc.reference[i % 2]);
    above = fmaxf(above, exponent[i]);
  }
  const bool ends =
      visible.num_tokens < kTiles * TILE_TOKENS + visible.most_hidden;
  if (__any_sync(~0u, above > kMaxExponent || ends)) {
    const int last[2] = {visible.num_tokens - visible.hidden[2 * t],
                         visible.num_tokens - visible.hidden[2 * t + 1]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = kPaired ? t / 2 : i / 2 % 2;
      const int token = TILE_TOKENS * (i / kTileScores) + 8 * half + g;
      own[i] = token < last[i % 2] ? own[i] * query.factor[i % 2] : -INFINITY;
    }
    raise(acc, own);
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      exponent[i] = own[i] - acc.reference[i % 2];
  }
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    const float weight[2] = {exp2_approx(exponent[2 * i]),
                             exp2_approx(exponent[2 * i + 1])};
    acc.sum[0] += weight[0];
    acc.sum[1] += weight[1];
    const uint32_t packed =
        transposed(as_bits(__floats2half2_rn(weight[0], weight[1])));
    if constexpr (kPaired) {
      weights[i][0] = g < 4 ? packed : 0;
      weights[i][1] = g < 4 ? 0 : packed;
    } else {
      weights[i / 2][i % 2] = packed;
    }
  }
}

// Scales of V of tokens 8 * h + 2 * t and the next, of this lane's group.
__device__ __forceinline__ uint32_t value_scales(const uint8_t* tile, int h,
                                                 int piece, int lane) {
  const int g = lane / 4 % NUM_GROUPS, t = lane % 4;
  const uint8_t* row =
      tile + VALUE_SCALES_OFFSET + (8 * h + 2 * t) * SCALE_BYTES;
  // The delta of group g, at the exponent's end in both halves.
  constexpr int kPlace = SCALE_SHIFT + SCALE_DELTA_STEP - 1;
  constexpr uint32_t kMask =
      (0x00010001u << (kPlace + SCALE_DELTA_BITS)) - (0x00010001u << kPlace);
  const int shift = 8 - kPlace + SCALE_DELTA_BITS * g;
  uint32_t bases, deltas;
  if constexpr (HEAD_SIZE < 128) {
    bases = *reinterpret_cast<const uint32_t*>(row);
    deltas =
        SCALE_DELTA_STEP > 1 ? bases >> (SCALE_DELTA_BITS * g) : bases >> shift;
  } else {
    uint32_t words[HEAD_SIZE / 64];
    load_words(words, row);
    const uint32_t first = words[piece], second = words[kPieces + piece];
    deltas = __byte_perm(first >> shift, second >> shift, 0x5410);
    bases = __byte_perm(first, second, 0x5410);
  }
  return (bases & 0x00FF00FFu) * (1 << SCALE_SHIFT) - (deltas & kMask);
}

// Load the 4-bit codes of V of tokens 8 * h + 2 * t and the next, of this
// lane's group, as low_positions and high_positions take them: words
// [unit][parity of the code].
__device__ __forceinline__ void load_value_words(uint32_t (&words)[kPieceWords],
                                                 const uint8_t* tile, int h,
                                                 int piece, int lane) {
  const int g = lane / 4, t = lane % 4;
  const int group = g % NUM_GROUPS + 8 * piece;
  const int lane_unit = g / NUM_GROUPS;  // if a lane has but one of a group
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
    // Bit 4k + 2c + p of a half is of code 2k + c of unit p, and the one
    // before.
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

// Add V^T P^T of a tile.
__device__ __forceinline__ void add_values(Accumulator& acc,
                                           const uint8_t* tile,
                                           const uint32_t (&weights)[2],
                                           int lane) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    uint32_t words[2][kPieceWords];
    __half2 a[2], b[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_value_words(words[h], tile, h, piece, lane);
      const uint32_t scales = value_scales(tile, h, piece, lane);
      a[h] = __hmul2(as_half2(scales), as_half2(VALUE_LINEAR));
      b[h] = __hmul2(as_half2(scales), as_half2(VALUE_QUADRATIC));
    }
    constexpr int kRowWords = kPieceWords / 2;
#pragma unroll
    for (int j = 0; j < kRowWords; ++j) {
      uint32_t values[4][2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t word = words[h][r * kRowWords + j];
          const uint32_t swapped = __byte_perm(word, word, 0x2301);
          values[0][h][r] = value_coordinates(low_positions(word), a[h], b[h]);
          values[1][h][r] = value_coordinates(high_positions(word), a[h], b[h]);
          values[2][h][r] =
              value_coordinates(low_positions(swapped), a[h], b[h]);
          values[3][h][r] =
              value_coordinates(high_positions(swapped), a[h], b[h]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t (&x)[2][2] = values[i];
        mma_f16(acc.output[piece * kPieceCodes + 4 * j + i], x[0][0], x[0][1],
                x[1][0], x[1][1], weights[0], weights[1]);
      }
    }
  }
}

}  // namespace turbo
