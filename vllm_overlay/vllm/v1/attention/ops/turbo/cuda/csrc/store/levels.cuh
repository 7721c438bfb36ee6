// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The nearest levels to magnitudes: see reference.codec.
//
// Let a threshold t lie between two levels, h from either. The error of the
// nearer level is ||x| - t * scale| - h * scale. The inner difference is exact
// if |x| is at least half of t * scale, so the outer one is rounded as the
// reference's is.
//
// A table has t and h in even steps of |x| / scale. The steps are so coarse
// that rows are found without a comparison. A row holds for scales up to 9/8 of
// the one it was found with, and for all factors of a key's search.
// store_tables.py makes sure of that.
#pragma once

#include <cstddef>

#include "common/warp.cuh"
#include "store/scales.cuh"

namespace turbo {

constexpr int kHalfLevels = NUM_LEVELS / 2;
constexpr int kFoldBytes = sizeof(float2);

// Tables in shared memory, which store_tables.py makes.
struct FoldTables {
  float2 folds[FOLD_ROWS];    // t, h
  float2 indices[FOLD_ROWS];  // t, the index of the level below it
  // A level and the one it may be moved to, inwards or outwards.
  float2 moves[2][kHalfLevels];
};

__device__ __forceinline__ float2 load_shared_2(uint32_t address) {
  float2 result;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(result.x), "=f"(result.y)
               : "r"(address));
  return result;
}

// x + (a > b), in two instructions.
__device__ __forceinline__ int add_if_greater(int x, float a, float b) {
  asm("{\n"
      ".reg .pred is_greater;\n"
      "setp.gt.f32 is_greater, %1, %2;\n"
      "@is_greater add.s32 %0, %0, 1;\n"
      "}"
      : "+r"(x)
      : "f"(a), "f"(b));
  return x;
}

// x - (a > b ? y : 0), in two instructions.
__device__ __forceinline__ int subtract_if_greater(int x, float a, float b,
                                                   int y) {
  asm("{\n"
      ".reg .pred is_greater;\n"
      "setp.gt.f32 is_greater, %1, %2;\n"
      "@is_greater sub.s32 %0, %0, %3;\n"
      "}"
      : "+r"(x)
      : "f"(a), "f"(b), "r"(y));
  return x;
}

// The value that stands for a scale of zero. A magnitude is zero or far above
// it.
constexpr float kAlmostZero = 7.7037198e-34f;  // 2**-110

// Rows of a table for magnitudes in a group.
//
// kIsTiny: whether magnitudes may exceed 5/4 of the scale.
template <bool kIsKey, bool kIsTiny>
struct FoldRows {
  static constexpr float kStep = kIsKey ? KEY_FOLD_STEP : VALUE_FOLD_STEP;
  float guess, limit;
  uint32_t offset;

  FoldRows() = default;
  // scale: normalised, and the least of the scales that the rows are for.
  __device__ __forceinline__ FoldRows(float scale, const FoldTables& tables) {
    const float not_zero = fmaxf(scale, kAlmostZero);
    guess = __fmul_rn(1.0f / kStep, reciprocal_approx(not_zero));
    limit = __fmul_rn((FOLD_ROWS - 0.5f) * kStep, not_zero);
    offset = shared_address(&tables) -
             kFoldBytes * static_cast<uint32_t>(kMagicBits);
  }

  // The shared address of a magnitude's row in `folds`.
  __device__ __forceinline__ uint32_t of(float magnitude) const {
    const float limited = kIsTiny ? fminf(magnitude, limit) : magnitude;
    const float row = __fmaf_rd(limited, guess, kMagic);
    return __float_as_uint(row) * kFoldBytes + offset;
  }

  // Index of the nearest level to factor * magnitude.
  __device__ __forceinline__ int nearest(float magnitude, float factor,
                                         float scale) const {
    const float2 row =
        load_shared_2(of(magnitude) + offsetof(FoldTables, indices));
    const int index =
        add_if_greater(__float_as_int(row.y), __fmul_rn(magnitude, factor),
                       __fmul_rn(row.x, scale));
    return kIsTiny ? max(index, 0) : index;
  }
};

// The error of the nearest level, given the row.
__device__ __forceinline__ float fold_error(float magnitude, float2 fold,
                                            float scale) {
  const float from_threshold = __fmaf_rn(-fold.x, scale, magnitude);
  return __fmaf_rn(-fold.y, scale, fabsf(from_threshold));
}

}  // namespace turbo
