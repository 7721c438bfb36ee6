// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The search for a group's best path by the lanes that share it. Each lane
// extends paths from every state by its own four consecutive codes. Then the
// lanes join their paths one after the other. See trellis.cuh.
#pragma once

#include "store/trellis.cuh"

namespace turbo {

constexpr int kPathParts = kSingleParts;
constexpr int kPartCodes = SCALE_GROUP / kPathParts;
static_assert(kPathParts == 4 && kPartCodes == 4);

// Costs of the best paths from each state to each state, by a part's codes.
using Transfers = int[4][4];

// errors: those of a part's codes by subset, with path bits.
__device__ __forceinline__ void extend_part(
    const int (&errors)[kPartCodes][NUM_SUBSETS], Transfers& costs) {
#pragma unroll
  for (int from = 0; from < 4; ++from) {
    const int first = from / 2, second = from % 2;
#pragma unroll
    for (int state = 0; state < 4; ++state) {
      const int before = state / 2, bit = state % 2;
      costs[from][state] = errors[0][2 * (before ^ first) + second] +
                           errors[1][2 * (bit ^ second) + before];
    }
#pragma unroll
    for (int i = 2; i < kPartCodes; ++i) extend(costs[from], errors[i]);
  }
}

// Costs of the paths from state zero. In the last part they are those of the
// group.
//
// early: path bits of the group's first half, in the second part.
__device__ __forceinline__ void join_parts(const Transfers& costs,
                                           int (&joined)[4], int (&early)[4]) {
  const int part = part_of_lane<kPathParts>();
#pragma unroll
  for (int state = 0; state < 4; ++state) joined[state] = costs[0][state];
#pragma unroll
  for (int i = 1; i < kPathParts; ++i) {
    int before[4];
#pragma unroll
    for (int from = 0; from < 4; ++from) {
      before[from] = __shfl_up_sync(~0u, joined[from], 1, kPathParts);
      if (i == kPathParts / 2) {
        // Path bits begin again, with the state's.
        before[from] =
            part == i ? (before[from] & ~kPathMask) + from / 2 : before[from];
      }
    }
#pragma unroll
    for (int state = 0; state < 4; ++state) {
      int least = before[0] + costs[0][state];
#pragma unroll
      for (int from = 1; from < 4; ++from) {
        least = __viaddmin_s32(before[from], costs[from][state], least);
      }
      joined[state] = part == i ? least : joined[state];
    }
    if (i == kPathParts / 2 - 1) {
#pragma unroll
      for (int state = 0; state < 4; ++state) {
        early[state] =
            (joined[state] & kPathMask) + (state % 2 << (kHalfPath - 1));
      }
    }
  }
}

// The best path of a group, and its error.
struct FoundPath {
  int error;
  uint32_t path;
};

// x: the part's coordinates, times the factor of a key.
__device__ __forceinline__ FoundPath
search_parts(const float (&x)[kPartCodes], const Windows& windows,
             uint32_t (&rows)[kPartCodes]) {
  const int part = part_of_lane<kPathParts>();
  // As in `search`, b(e - 1) is bit e - 1 in the first half, and bit e - 7 in
  // the second.
  const int first_bit = part % 2 * kPartCodes + (part < kPathParts / 2 ? 0 : 2);
  int errors[kPartCodes][NUM_SUBSETS];
#pragma unroll
  for (int i = 0; i < kPartCodes; ++i) {
    rows[i] = windows.row(x[i]);
    windows.errors(x[i], rows[i], errors[i]);
    const int bit = 1 << (first_bit + i) >> 1;
#pragma unroll
    for (int s = 0; s < NUM_SUBSETS; ++s) {
      errors[i][s] = (errors[i][s] << kPathBits) + (s % 2 == 1 ? bit : 0);
    }
  }
  Transfers costs;
  extend_part(errors, costs);
  int joined[4], early[4];
  join_parts(costs, joined, early);

  int best = 0x7FFFFFFF;
#pragma unroll
  for (int state = 0; state < 4; ++state) {
    best = min(best, joined[state] >> kPathBits << 2 | state);
  }
  const int state = best & 3;
  const int late = (select_state(joined, state) & kPathMask) +
                   (state % 2 << (kPathBits - 1));
  // The lowest bits of `late` are b(6) and b(7).
  const int of_last = __shfl_sync(~0u, late, kPathParts - 1, kPathParts);
  const int middle = (of_last & 1) << 1 | (of_last >> 1 & 1);
  const int first_half = __shfl_sync(~0u, select_state(early, middle),
                                     kPathParts / 2 - 1, kPathParts);
  FoundPath found;
  found.error = __shfl_sync(~0u, best >> 2, kPathParts - 1, kPathParts);
  found.path = first_half + (of_last >> 2 << kHalfPath);
  return found;
}

// The subsets of a part's codes: that of code i is in bits 2 * i and above.
__device__ __forceinline__ uint32_t subsets_of_part(uint32_t path) {
  return subsets_of(path) >> (2 * kPartCodes * part_of_lane<kPathParts>());
}

// The sum of products of a part's coordinates of group j and their decoded
// values on a path. Products are bits of floats: see rounded_product.
//
// along: the errors' products with the direction are added.
template <typename OwnDirection>
__device__ __forceinline__ int products_of_part(
    const float (&x)[kPartCodes], const OwnDirection& direction, int j,
    const uint32_t (&rows)[kPartCodes], float scale, uint32_t path,
    int& along) {
  const uint32_t subsets = subsets_of_part(path);
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kPartCodes; ++i) {
    const float level = load_shared(rows[i] | subset_offset(subsets, i));
    const float decoded = __fmul_rn(level, scale);
    sum += __float_as_int(rounded_product(x[i], decoded));
    if constexpr (kHasDirection<OwnDirection>)
      along += along_of(x[i], decoded, direction.at(j, i));
  }
  return sum;
}

// Quantise a vector to three bits and write it.
//
// x: the part's coordinates, normalised, with signs.
// direction: that of a key, or NoDirection.
// codes: the place of codes of K or V.
// scales: the place of the vector's scales.
template <bool kIsKey, int kGroups, typename OwnDirection>
__device__ __forceinline__ void encode_3_bits_by_parts(
    const float (&x)[kGroups][kPartCodes], const int (&floors)[kGroups],
    float normaliser, const OwnDirection& direction, const WindowTables& tables,
    const CodePlace& codes, uint8_t* scales) {
  constexpr float kGuess = kIsKey ? KEY_TRELLIS_GUESS : VALUE_TRELLIS_GUESS;
  constexpr int kRounds = kIsKey ? UNBIAS_ROUNDS + 1 : 1;
  int scale_codes[kGroups] = {};
  int errors[kGroups][NUM_SCALE_CANDIDATES];
  Windows windows[kGroups];
  uint32_t paths[kGroups];
  int square = 0;
  UnbiasingOf<OwnDirection> key;
  if constexpr (kIsKey) {
    square = square_of(x);
    key = UnbiasingOf<OwnDirection>::template of<kPathParts>(square);
  }
  // Candidates of the scale, and then rounds, share a search, whose code is
  // fetched once.
#pragma unroll 1
  for (int step = 0; step < NUM_SCALE_CANDIDATES + kRounds; ++step) {
    const int round = step - NUM_SCALE_CANDIDATES;
    if (round == 0) scales_in_reach<kPathParts>(floors, errors, scale_codes);
    int rest = square, along = 0;
    uint32_t found[kGroups];
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int code =
          round < 0 ? scale_candidate(floors[j], step) : scale_codes[j];
      windows[j] = Windows(scale_value(code), normaliser, kGuess, tables);
      float scaled[kPartCodes];
#pragma unroll
      for (int i = 0; i < kPartCodes; ++i) {
        scaled[i] = kIsKey ? key.next_of(x[j][i], direction, j, i) : x[j][i];
      }
      uint32_t rows[kPartCodes];
      const FoundPath best = search_parts(scaled, windows[j], rows);
#pragma unroll
      for (int k = 0; k < NUM_SCALE_CANDIDATES; ++k) {
        errors[j][k] = step == k ? best.error : errors[j][k];
      }
      found[j] = best.path;
      if (kIsKey && round >= 0) {
        rest -= products_of_part(x[j], direction, j, rows, windows[j].scale,
                                 found[j], along);
      }
    }
    bool is_best = true;
    if (kIsKey && round >= 0) {
      is_best = update<kPathParts>(key, round, rest, along);
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) paths[j] = is_best ? found[j] : paths[j];
  }

  uint32_t branches[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const uint32_t of_part = branches_of<kPartCodes>(
        [&](int i) { return key.best_of(x[j][i], direction, j, i); },
        windows[j], subsets_of_part(paths[j]));
    const int shift = 2 * kPartCodes * part_of_lane<kPathParts>();
    branches[j] =
        reduce_parts<Sum, kPathParts>(static_cast<int>(of_part << shift));
  }
  store_paths<kIsKey, kPathParts>(
      branches, paths, codes,
      scales != nullptr && part_of_lane<kPathParts>() == 0);
  store_scales<kPathParts>(scale_codes, scales);
}

}  // namespace turbo
