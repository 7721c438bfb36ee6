// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The encoder of trellis-coded levels of the turbo format: see reference.codec.
//
// The nearest level to a coordinate, in each subset, is one of four consecutive
// levels. A table in shared memory has the levels of each such window w by
// subset. Threshold w lies between the windows w and w + 1. As in levels.cuh,
// the window is guessed and then corrected. State 2 * b(e - 1) + b(e) follows
// code e.
#pragma once

#include <cstddef>

#include "common/warp.cuh"
#include "store/direction.cuh"

namespace turbo {

constexpr int kNumWindows = NUM_LEVELS - NUM_SUBSETS + 1;
constexpr int kWindowBytes = 16;

struct WindowTables {
  float4 levels[kNumWindows];
  float4 thresholds[kNumWindows];  // in the first component
};

__device__ __forceinline__ float saturated_multiply_add(float a, float b,
                                                        float c) {
  float result;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

__device__ __forceinline__ float load_shared(uint32_t address) {
  float result;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(result) : "r"(address));
  return result;
}

__device__ __forceinline__ float4 load_shared_4(uint32_t address) {
  float4 result;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(result.x), "=f"(result.y), "=f"(result.z), "=f"(result.w)
               : "r"(address));
  return result;
}

// x + (a > b ? kWindowBytes : 0), in two instructions.
__device__ __forceinline__ uint32_t next_window_if_greater(uint32_t x, float a,
                                                           float b) {
  asm("{\n"
      ".reg .pred is_greater;\n"
      "setp.gt.f32 is_greater, %1, %2;\n"
      "@is_greater add.u32 %0, %0, %3;\n"
      "}"
      : "+r"(x)
      : "f"(a), "f"(b), "n"(kWindowBytes));
  return x;
}

// A group's scale, for windows and errors of its coordinates.
struct Windows {
  float scale, reciprocal, guess;
  uint32_t base;    // shared address of the levels
  uint32_t offset;  // base, less the bits of kMagic in windows

  Windows() = default;
  __device__ __forceinline__ Windows(float value, float normaliser,
                                     float guess_factor,
                                     const WindowTables& tables) {
    scale = __fmul_rn(value, normaliser);
    // The reciprocal for normalised coordinates. Normalisers are powers of two.
    reciprocal = __fmul_rn(__frcp_rn(fmaxf(value, SMALLEST_SCALE)),
                           power_of_two(-exponent_of(normaliser)));
    guess = guess_factor;
    base = shared_address(&tables);
    offset = base - kWindowBytes * static_cast<uint32_t>(kMagicBits);
  }

  // The shared address of the levels of the window around x.
  __device__ __forceinline__ uint32_t row(float x) const {
    constexpr float kAlmostAll = 1.0f - 1.0f / (1 << 20);
    constexpr int kThresholds = offsetof(WindowTables, thresholds);
    const float z = __fmul_rn(x, reciprocal);
    const float position = saturated_multiply_add(z, guess, 0.5f);
    const float floor =
        __fmaf_rd(position, (kNumWindows - 1) * kAlmostAll, kMagic);
    const uint32_t guessed = __float_as_uint(floor) * kWindowBytes + offset;
    return next_window_if_greater(guessed, z,
                                  load_shared(guessed + kThresholds));
  }

  __device__ __forceinline__ int error(float x, float level) const {
    return rounded_square(__fmaf_rn(-level, scale, x));
  }

  // The errors of the levels, by subset.
  __device__ __forceinline__ void errors(float x, uint32_t row,
                                         int (&result)[NUM_SUBSETS]) const {
    const float4 levels = load_shared_4(row);
    result[0] = error(x, levels.x);
    result[1] = error(x, levels.y);
    result[2] = error(x, levels.z);
    result[3] = error(x, levels.w);
  }
};

// Extend the best paths to each state by code e >= 2.
__device__ __forceinline__ void extend(int (&cost)[4], const int (&errors)[4]) {
  int extended[4];
#pragma unroll
  for (int before = 0; before < 2; ++before) {
#pragma unroll
    for (int bit = 0; bit < 2; ++bit) {
      const int zero = cost[before] + errors[2 * bit + before];
      extended[2 * before + bit] = __viaddmin_s32(
          cost[2 + before], errors[2 * (1 - bit) + before], zero);
    }
  }
#pragma unroll
  for (int state = 0; state < 4; ++state) cost[state] = extended[state];
}

// Begin the paths, in state zero, with codes 0 and 1.
__device__ __forceinline__ void begin(int (&cost)[4], const int (&first)[4],
                                      const int (&second)[4]) {
#pragma unroll
  for (int before = 0; before < 2; ++before) {
#pragma unroll
    for (int bit = 0; bit < 2; ++bit) {
      cost[2 * before + bit] = first[2 * before] + second[2 * bit + before];
    }
  }
}

// Begin or extend the paths by code e. first: the errors of code 0, kept.
__device__ __forceinline__ void add_code(int e, int (&cost)[4], int (&first)[4],
                                         const int (&errors)[4]) {
  if (e == 0) {
#pragma unroll
    for (int s = 0; s < 4; ++s) first[s] = errors[s];
  } else if (e == 1) {
    begin(cost, first, errors);
  } else {
    extend(cost, errors);
  }
}

// Path bits are kept below costs. They are those of half a group at a time, and
// of the state before it.
constexpr int kHalfPath = SCALE_GROUP / 2;
constexpr int kPathBits = kHalfPath + 2;
constexpr int kPathMask = (1 << kPathBits) - 1;

__device__ __forceinline__ int select_state(const int (&of_states)[4],
                                            int state) {
  const int low = state % 2 == 0 ? of_states[0] : of_states[1];
  const int high = state % 2 == 0 ? of_states[2] : of_states[3];
  return state < 2 ? low : high;
}

// The error of the best path of a group.
__device__ __forceinline__ int trellis_error(const float (&x)[SCALE_GROUP],
                                             const Windows& windows) {
  int cost[4], first[4];
#pragma unroll
  for (int e = 0; e < SCALE_GROUP; ++e) {
    int errors[4];
    windows.errors(x[e], windows.row(x[e]), errors);
    add_code(e, cost, first, errors);
  }
  return min(min(cost[0], cost[1]), min(cost[2], cost[3]));
}

// The path of least error. Its bit e is b(e).
//
// A cost is an error, with bits of its path since the middle or the beginning
// below it. The newest bit is highest. Among equal errors, the least cost is
// then that of the path with the earlier bit zero. Bit b(e) is added with the
// errors of code e + 1, whose subsets are odd if and only if the bit is set.
//
// tried: gives coordinate e of what is encoded, such as a key times a factor.
template <typename Tried>
__device__ __forceinline__ uint32_t search(const Tried& tried,
                                           const Windows& windows,
                                           uint32_t (&rows)[SCALE_GROUP]) {
  int cost[4], first[4], early[4];
#pragma unroll
  for (int e = 0; e < SCALE_GROUP; ++e) {
    const float x = tried(e);
    rows[e] = windows.row(x);
    int errors[4];
    windows.errors(x, rows[e], errors);
    // b(e - 1) is bit e - 1 in the first half, bit e - 7 in the second.
    const int bit =
        e == 0 ? 0 : 1 << (e <= kHalfPath - 1 ? e - 1 : e - kHalfPath + 1);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      errors[s] = (errors[s] << kPathBits) + (s % 2 == 1 ? bit : 0);
    }
    add_code(e, cost, first, errors);
    if (e == kHalfPath - 1) {
#pragma unroll
      for (int state = 0; state < 4; ++state) {
        early[state] =
            (cost[state] & kPathMask) + (state % 2 << (kHalfPath - 1));
        cost[state] = (cost[state] & ~kPathMask) + state / 2;
      }
    }
  }
  int best = 0x7FFFFFFF;
#pragma unroll
  for (int state = 0; state < 4; ++state) {
    best = min(best, cost[state] >> kPathBits << 2 | state);
  }
  const int state = best & 3;
  const int late =
      (select_state(cost, state) & kPathMask) + (state % 2 << (kPathBits - 1));
  // The lowest bits of `late` are b(6) and b(7).
  const int first_half = select_state(early, (late & 1) << 1 | (late >> 1 & 1));
  return first_half + (late >> 2 << kHalfPath);
}

// Move bit i of 16 bits to bit 2 * i.
__device__ __forceinline__ uint32_t spread(uint32_t x) {
  x = spread_pairs(x);
  return (x | x << 1) & 0x55555555u;
}

// The subsets of a path's codes: that of code e is in bits 2 * e and above.
__device__ __forceinline__ uint32_t subsets_of(uint32_t path) {
  const uint32_t before = path << 1 & 0xFFFFu;
  const uint32_t differs = (path ^ path << 2) & 0xFFFFu;
  return spread(before) | spread(differs) << 1;
}

// Four times the subset of code e.
__device__ __forceinline__ uint32_t subset_offset(uint32_t subsets, int e) {
  return (e == 0 ? subsets << 2 : subsets >> (2 * e - 2)) & 0xC;
}

// The factor of a key, and the part of its direction, with the best paths: see
// reference.unbias.unbiased.
template <int kGroups, typename OwnDirection>
__device__ __forceinline__ UnbiasingOf<OwnDirection> trellis_factor(
    const float (&x)[kGroups][SCALE_GROUP], const OwnDirection& direction,
    const Windows (&windows)[kGroups], uint32_t (&paths)[kGroups]) {
  const int square = square_of(x);
  auto key = UnbiasingOf<OwnDirection>::template of<1>(square);
#pragma unroll 1
  for (int round = 0; round <= UNBIAS_ROUNDS; ++round) {
    int rest = square, along = 0;
    uint32_t found[kGroups];
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      uint32_t rows[SCALE_GROUP];
      found[j] =
          search([&](int e) { return key.next_of(x[j][e], direction, j, e); },
                 windows[j], rows);
      const uint32_t subsets = subsets_of(found[j]);
#pragma unroll
      for (int e = 0; e < SCALE_GROUP; ++e) {
        const float level = load_shared(rows[e] | subset_offset(subsets, e));
        const float decoded = __fmul_rn(level, windows[j].scale);
        rest -= __float_as_int(rounded_product(x[j][e], decoded));
        if constexpr (kHasDirection<OwnDirection>)
          along += along_of(x[j][e], decoded, direction.at(j, e));
      }
    }
    if (update<1>(key, round, rest, along)) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) paths[j] = found[j];
    }
  }
  return key;
}

// The branches of a path, two bits each.
//
// best: gives coordinate e of what was encoded.
template <int kElements, typename Best>
__device__ __forceinline__ uint32_t branches_of(const Best& best,
                                                const Windows& windows,
                                                uint32_t subsets) {
  uint32_t word = 0;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const uint32_t window =
        (windows.row(best(e)) - windows.base) / kWindowBytes;
    const uint32_t subset = subsets >> (2 * e) & 3;
    word |= (window + NUM_SUBSETS - 1 - subset) / NUM_SUBSETS << (2 * e);
  }
  return word;
}

// Paths and branches of a vector.
template <bool kIsKey, int kGroups, typename OwnDirection>
__device__ __forceinline__ void paths_of(const float (&x)[kGroups][SCALE_GROUP],
                                         const OwnDirection& direction,
                                         const Windows (&windows)[kGroups],
                                         uint32_t (&paths)[kGroups],
                                         uint32_t (&branches)[kGroups]) {
  // Values have a factor of one.
  UnbiasingOf<OwnDirection> key;
  if constexpr (kIsKey) key = trellis_factor(x, direction, windows, paths);
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const auto best = [&](int e) {
      return key.best_of(x[j][e], direction, j, e);
    };
    if constexpr (!kIsKey) {
      uint32_t rows[SCALE_GROUP];
      paths[j] = search(best, windows[j], rows);
    }
    branches[j] =
        branches_of<SCALE_GROUP>(best, windows[j], subsets_of(paths[j]));
  }
}

// Quantise a vector to three bits and write it.
//
// x: normalised, with signs.
// direction: that of a key, or NoDirection.
// codes: the place of codes of K or V.
// scales: the place of the vector's scales.
// kParts: lanes that have the same group, and share the candidates of its
//   scale.
template <bool kIsKey, int kParts, int kGroups, typename OwnDirection>
__device__ __forceinline__ void encode_3_bits(
    const float (&x)[kGroups][SCALE_GROUP], const int (&floors)[kGroups],
    float normaliser, const OwnDirection& direction, const WindowTables& tables,
    const CodePlace& codes, uint8_t* scales) {
  constexpr float kGuess = kIsKey ? KEY_TRELLIS_GUESS : VALUE_TRELLIS_GUESS;
  int scale_codes[kGroups];
  int errors[kGroups][NUM_SCALE_CANDIDATES];
  const int part = part_of_lane<kParts>();
#pragma unroll 1
  for (int first = 0; first < NUM_SCALE_CANDIDATES; first += kParts) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int code = scale_candidate(floors[j], first + part);
      const Windows windows(scale_value(code), normaliser, kGuess, tables);
      const int error = trellis_error(x[j], windows);
#pragma unroll
      for (int k = 0; k < NUM_SCALE_CANDIDATES; ++k) {
        const int of_part = __shfl_sync(~0u, error, k % kParts, kParts);
        errors[j][k] = k - k % kParts == first ? of_part : errors[j][k];
      }
    }
  }
  scales_in_reach<kParts>(floors, errors, scale_codes);

  Windows windows[kGroups];
  uint32_t paths[kGroups];
  uint32_t branches[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    windows[j] =
        Windows(scale_value(scale_codes[j]), normaliser, kGuess, tables);
  }
  paths_of<kIsKey>(x, direction, windows, paths, branches);
  store_paths<kIsKey, kParts>(branches, paths, codes,
                              scales != nullptr && part == 0);
  store_scales<kParts>(scale_codes, scales);
}

}  // namespace turbo
