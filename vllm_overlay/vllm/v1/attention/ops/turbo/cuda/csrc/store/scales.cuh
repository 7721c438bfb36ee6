// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Scales of the turbo format: their candidates, their choice and their words. A
// lane has kLaneGroups groups. Its group j is group lane / 4 + 8 * j of the
// vector. With kHasOwnGroup it has one group.
//
// Numbers are those of reference.codec, operation by operation. A product is
// fused with a sum only explicitly, and only if it is exact.
#pragma once

#include <type_traits>

#include "store/rotate_single.cuh"

namespace turbo {

constexpr int kStoreThreads = 128;

// Whether vectors are latents. A group, and a part of it, then has consecutive
// coordinates.
constexpr bool kIsLatent = IS_LATENT != 0;
// Whether a lane has one group, with the groups of a vector in lanes side by
// side.
template <int kParts>
constexpr bool kHasOwnGroup = kIsLatent && kParts == 1;
// The distance in lanes from a group to the next.
template <int kParts>
constexpr int kGroupStride = kHasOwnGroup<kParts> ? 1 : 4;
// Groups of a vector in lanes side by side, one per lane.
template <int kParts>
constexpr int kGroupsAside = kHasOwnGroup<kParts> ? NUM_GROUPS : kVectorLanes;

// Groups of a word in lanes side by side, padding included.
constexpr int kWordLanes =
    SCALE_WORD_GROUPS > 4 || kVectorLanes == 4 ? kVectorLanes : 4;
static_assert(SCALE_WORD_GROUPS <= kWordLanes);

// Operations of reductions. Over a whole warp each is one instruction, on
// integers that are ordered as the numbers are.
struct Sum {
  __device__ __forceinline__ static int of(int a, int b) { return a + b; }
  __device__ __forceinline__ static int of_warp(int x) {
    return __reduce_add_sync(~0u, x);
  }
};
struct Largest {
  template <typename T>
  __device__ __forceinline__ static T of(T a, T b) {
    return max(a, b);
  }
  __device__ __forceinline__ static int of_warp(int x) {
    return __reduce_max_sync(~0u, x);
  }
  // Floats that are reduced are not negative.
  __device__ __forceinline__ static float of_warp(float x) {
    return __int_as_float(of_warp(__float_as_int(x)));
  }
};
struct Least {
  template <typename T>
  __device__ __forceinline__ static T of(T a, T b) {
    return min(a, b);
  }
  __device__ __forceinline__ static int of_warp(int x) {
    return __reduce_min_sync(~0u, x);
  }
  __device__ __forceinline__ static float of_warp(float x) {
    return __int_as_float(
        ordered_bits(of_warp(ordered_bits(__float_as_int(x)))));
  }
};

// Reduce over the groups of kWidth lanes, one group per lane.
template <typename Operation, int kWidth, int kParts, typename T>
__device__ __forceinline__ T reduce(T x) {
#pragma unroll
  for (int lanes = 1; lanes < kWidth; lanes *= 2) {
    x = Operation::of(x, __shfl_xor_sync(~0u, x, kGroupStride<kParts> * lanes));
  }
  return x;
}

// The lane's part. kParts lanes side by side may share a group, or its
// candidates.
template <int kParts>
__device__ __forceinline__ int part_of_lane() {
  return threadIdx.x % kParts;
}

// Reduce over the parts of a group.
template <typename Operation, int kParts, typename T>
__device__ __forceinline__ T reduce_parts(T x) {
#pragma unroll
  for (int lanes = 1; lanes < kParts; lanes *= 2) {
    x = Operation::of(x, __shfl_xor_sync(~0u, x, lanes));
  }
  return x;
}

// Reduce over a vector. `turn` has another parity than in the reduction before.
template <typename Operation, int kParts, typename T>
__device__ __forceinline__ T reduce_vector(T x, [[maybe_unused]] int turn) {
  if constexpr (kParts * kGroupsAside<kParts> == 32) {
    x = Operation::of_warp(x);
  } else {
    x = reduce<Operation, kGroupsAside<kParts>, kParts>(
        reduce_parts<Operation, kParts>(x));
  }
  if constexpr (kIsSingle<kParts> && kSingleWarps > 1) {
    static_assert(sizeof(T) == sizeof(int));
    constexpr int kMaxWarps = kStoreThreads / 32;
    __shared__ T of_warps[2][kMaxWarps];
    const int warp = threadIdx.x / 32;
    const int first = warp - warp % kSingleWarps;
    if (threadIdx.x % 32 == 0) of_warps[turn % 2][warp] = x;
    // Barrier 0 is the block's.
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / kSingleWarps),
                 "n"(32 * kSingleWarps)
                 : "memory");
    x = of_warps[turn % 2][first];
#pragma unroll
    for (int i = 1; i < kSingleWarps; ++i) {
      x = Operation::of(x, of_warps[turn % 2][first + i]);
    }
  }
  return x;
}

// Reduce over a word's groups. All parts of a group have the same number.
template <typename Operation, int kParts>
__device__ __forceinline__ int reduce_word(int x) {
  if constexpr (kParts * kWordLanes == 32) {
    const bool is_counted =
        !std::is_same_v<Operation, Sum> || part_of_lane<kParts>() == 0;
    return Operation::of_warp(is_counted ? x : 0);
  } else {
    return reduce<Operation, kWordLanes, kParts>(x);
  }
}

// The lane's group j.
template <int kParts>
__device__ __forceinline__ int group_of_lane(int j) {
  if constexpr (kHasOwnGroup<kParts>) return threadIdx.x % NUM_GROUPS;
  const int of_warp = kIsSingle<kParts> ? warp_of_vector() : 0;
  return threadIdx.x % 32 / 4 % kVectorLanes + kWarpColumns * (of_warp + j);
}

// The value of a scale code.
__device__ __forceinline__ float scale_value(int code) {
  return half_as_float(code << SCALE_SHIFT);
}

// The code of the largest E5M3 number not above `largest`.
__device__ __forceinline__ int scale_floor(float largest) {
  const int normal = (__float_as_int(largest) >> 20) - ((127 - 15) << 3);
  const int subnormal =
      static_cast<int>(__fmul_rn(largest, 1.0f / SMALLEST_SCALE));
  return largest < 8 * SMALLEST_SCALE ? subnormal : normal;
}

__device__ __forceinline__ int scale_candidate(int floor, int candidate) {
  return min(max(floor + FIRST_SCALE_OFFSET + candidate, 0), SCALE_CODE_MAX);
}

__device__ __forceinline__ float saturated_square(float x) {
  float result;
  asm("mul.rn.sat.f32 %0, %1, %1;" : "=f"(result) : "f"(x));
  return result;
}

// A squared error in units of 2**-ERROR_FRACTION_BITS. The product is
// subnormal, so its bits are a rounded integer.
__device__ __forceinline__ int rounded_square(float error) {
  const float unit = __uint_as_float(1u << ERROR_FRACTION_BITS);
  return __float_as_int(__fmul_rn(saturated_square(error), unit));
}

// Choose scales in reach of a base: see reference.codec.scales_in_reach. Errors
// are integers.
template <int kParts, int kGroups>
__device__ __forceinline__ void scales_in_reach(
    const int (&floors)[kGroups],
    const int (&errors)[kGroups][NUM_SCALE_CANDIDATES], int (&codes)[kGroups]) {
  // A key is an error, with the candidate that has it in the lower bits. Among
  // equal errors the first candidate's key is then the least.
  constexpr int kCandidateBits = 3;
  static_assert(NUM_SCALE_CANDIDATES <= 1 << kCandidateBits);
  constexpr int kUnreached = 1 << 30;
  constexpr int kReach = ((1 << SCALE_DELTA_BITS) - 1) * SCALE_DELTA_STEP;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    int tried[NUM_SCALE_CANDIDATES];
    int keys[NUM_SCALE_CANDIDATES];
    int best_key = kUnreached;
#pragma unroll
    for (int i = 0; i < NUM_SCALE_CANDIDATES; ++i) {
      tried[i] = scale_candidate(floors[j], i);
      keys[i] = (errors[j][i] << kCandidateBits) + i;
      best_key = min(best_key, keys[i]);
    }
    constexpr int kCandidateMask = (1 << kCandidateBits) - 1;
    const int best = scale_candidate(floors[j], best_key & kCandidateMask);
    const bool is_group = group_of_lane<kParts>(j) < NUM_GROUPS;
    const int largest = reduce_word<Largest, kParts>(is_group ? best : 0);
    int least = kUnreached;
    // If code runs only once, few instructions are to be fetched.
    constexpr int kUnrolled = kIsSingle<kParts> ? 1 : NUM_BASE_OFFSETS;
#pragma unroll kUnrolled
    for (int i = 0; i < NUM_BASE_OFFSETS; ++i) {
      const int base = max(largest - i, 0);
      int key = kUnreached;
#pragma unroll
      for (int k = 0; k < NUM_SCALE_CANDIDATES; ++k) {
        const int steps = base - tried[k];
        const bool reached = static_cast<unsigned>(steps) <= kReach &&
                             steps % SCALE_DELTA_STEP == 0;
        key = min(key, reached ? keys[k] : kUnreached);
      }
      int chosen = scale_candidate(floors[j], key & kCandidateMask);
      int error = key >> kCandidateBits;
      if (key == kUnreached) {
        const bool is_below = best < base;
        error = is_below ? errors[j][NUM_SCALE_CANDIDATES - 1] : error;
        chosen = base - min((base - best) / SCALE_DELTA_STEP * SCALE_DELTA_STEP,
                            kReach);
      }
      error = reduce_word<Sum, kParts>(is_group ? error : 0);
      const bool better = error < least;
      codes[j] = better ? chosen : codes[j];
      least = better ? error : least;
    }
  }
}

// Write the scale words of a vector.
//
// row: the vector's scales, or null to write nothing.
template <int kParts, int kGroups>
__device__ __forceinline__ void store_scales(const int (&codes)[kGroups],
                                             uint8_t* row) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const int group = group_of_lane<kParts>(j);
    const int place = group % SCALE_WORD_GROUPS;
    const bool is_group = group < NUM_GROUPS;
    const int base = reduce_word<Largest, kParts>(is_group ? codes[j] : 0);
    const uint32_t delta = is_group ? (base - codes[j]) / SCALE_DELTA_STEP : 0;
    const uint32_t word = base + reduce_word<Sum, kParts>(
                                     delta << (8 + SCALE_DELTA_BITS * place));
    if (place == 0 && is_group && row != nullptr &&
        part_of_lane<kParts>() == 0) {
      uint8_t* p_word = row + group / SCALE_WORD_GROUPS * SCALE_WORD_BYTES;
      if constexpr (SCALE_WORD_BYTES == 4) {
        *reinterpret_cast<uint32_t*>(p_word) = word;
      } else if constexpr (SCALE_WORD_BYTES == 2) {
        *reinterpret_cast<uint16_t*>(p_word) = static_cast<uint16_t>(word);
      } else {
#pragma unroll
        for (int i = 0; i < SCALE_WORD_BYTES; ++i)
          p_word[i] = word >> (8 * i) & 0xFF;
      }
    }
  }
}

}  // namespace turbo
