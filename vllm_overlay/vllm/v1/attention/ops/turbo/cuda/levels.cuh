// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The nearest levels to coordinates: see reference_codec.
//
// A level is guessed and mended: the thresholds between levels are even enough
// for floor(GUESS * magnitude / scale) to be either the index of the nearest
// level or the one below, which one comparison with the threshold between them,
// as the reference makes it, decides. cuda_store_constants.py checks that.
#pragma once

#include "scales.cuh"

namespace turbo {

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b,
                                            uint32_t nibbles) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(nibbles));
  return result;
}

// x + (a > b), in two instructions.
__device__ __forceinline__ float add_if_greater(float x, float a, float b) {
  asm("{\n"
      ".reg .pred is_greater;\n"
      "setp.gt.f32 is_greater, %1, %2;\n"
      "@is_greater add.rn.f32 %0, %0, 0f3F800000;\n"
      "}"
      : "+f"(x)
      : "f"(a), "f"(b));
  return x;
}

__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// What zero scales are taken for: a magnitude is zero or far above.
constexpr float ALMOST_ZERO = 7.7037198e-34f;  // 2**-110

// Indices of key levels. A key's levels and twice its thresholds are integers,
// which prmt looks up in tables of bytes by the low nibble of an index; the
// other three bytes of a result make it a float that has the integer in its
// lowest bits. Of a nibble of 8 and more prmt makes 0xFF from the sign of a
// byte, which is the highest level.
//
// IS_TINY: whether magnitudes may exceed twice the scale.
template <bool IS_TINY>
struct KeyIndex {
  static constexpr int FIRST = KEY_INDEX_BASE;  // index 0, bits of a float
  float scale, guess, limit, threshold_unit, threshold_zero, level_unit;
  uint32_t thresholds_low, levels_low;

  KeyIndex() = default;
  // scale: normalised.
  __device__ __forceinline__ explicit KeyIndex(float normalised_scale) {
    scale = normalised_scale;
    const float not_zero = fmaxf(scale, ALMOST_ZERO);
    guess = __fmul_rn(KEY_GUESS, reciprocal(not_zero));
    limit = __fmul_rn(2.0f, not_zero);
    threshold_unit = __fmul_rn(KEY_THRESHOLD_UNIT, scale);
    threshold_zero = __fmul_rn(-KEY_THRESHOLD_ZERO, threshold_unit);
    level_unit = __fmul_rn(KEY_LEVEL_UNIT, scale);
    // The sign is zero, which keeps the compiler from moving constants again
    // and again.
    const uint32_t sign = __float_as_uint(scale) >> 31;
    thresholds_low = KEY_THRESHOLDS_LOW + sign;
    levels_low = KEY_LEVELS_LOW + sign;
  }

  // The index, added to FIRST; if above 7 it stands for 7.
  __device__ __forceinline__ int nearest(float magnitude) const {
    const float limited = IS_TINY ? fminf(magnitude, limit) : magnitude;
    const float index = __fmaf_rd(limited, guess, KEY_INDEX_MAGIC);
    const float looked_up = as_float(
        permute(thresholds_low, KEY_THRESHOLDS_HIGH, __float_as_uint(index)));
    const float threshold =
        __fmaf_rn(looked_up, threshold_unit, threshold_zero);
    return __float_as_int(add_if_greater(index, magnitude, threshold));
  }

  // The level, in units of its own.
  __device__ __forceinline__ float level(int index) const {
    const float looked_up =
        as_float(permute(levels_low, KEY_LEVELS_HIGH, index));
    return __fsub_rn(looked_up, KEY_LEVEL_ZERO);
  }

  __device__ __forceinline__ float decoded(int index) const {
    return __fmul_rn(level(index), level_unit);
  }

  __device__ __forceinline__ float error(float magnitude) const {
    return __fmaf_rn(-level(nearest(magnitude)), level_unit, magnitude);
  }
};

// Positions, index + 1/2, of value levels, which are (VALUE_LINEAR +
// VALUE_QUADRATIC * position) * position. So are the thresholds, but for a
// constant. Each, times a scale, is an fp32 number, and so are the terms.
struct ValuePosition {
  static constexpr float LAST = NUM_LEVELS / 2 - 0.5f;
  float guess, linear, quadratic, constant;

  ValuePosition() = default;
  __device__ __forceinline__ explicit ValuePosition(float scale) {
    guess = __fmul_rn(VALUE_GUESS, reciprocal(fmaxf(scale, ALMOST_ZERO)));
    linear = __fmul_rn(VALUE_LINEAR, scale);
    quadratic = __fmul_rn(VALUE_QUADRATIC, scale);
    constant = __fmul_rn(0.25f * VALUE_QUADRATIC, scale);
  }

  __device__ __forceinline__ float nearest(float magnitude) const {
    // The threshold above level i is at i + 1.
    const float above =
        __fsub_rn(__fmaf_rd(magnitude, guess, MAGIC + 1.0f), MAGIC);
    const float threshold =
        __fmaf_rn(__fmaf_rn(above, quadratic, linear), above, constant);
    const float position =
        add_if_greater(__fsub_rn(above, 0.5f), magnitude, threshold);
    return fminf(position, LAST);
  }

  __device__ __forceinline__ float error(float magnitude) const {
    return error_at(nearest(magnitude), magnitude);
  }

  __device__ __forceinline__ float error_at(float position,
                                            float magnitude) const {
    return __fmaf_rn(-__fmaf_rn(position, quadratic, linear), position,
                     magnitude);
  }

  // The nearest position, if that is `position` or the one below it.
  __device__ __forceinline__ float nearest_below(float position,
                                                 float magnitude) const {
    // The threshold in terms of the position, which is half above it.
    const float slope = __fsub_rn(linear, quadratic);
    const float threshold = __fmaf_rn(__fmaf_rn(position, quadratic, slope),
                                      position, __fmul_rn(-0.5f, slope));
    return fmaxf(
        add_if_greater(__fsub_rn(position, 1.0f), magnitude, threshold), 0.5f);
  }
};

template <bool IS_KEY, bool IS_TINY>
struct IndexType {
  using type = ValuePosition;
};
template <bool IS_TINY>
struct IndexType<true, IS_TINY> {
  using type = KeyIndex<IS_TINY>;
};

}  // namespace turbo
