// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The rotation of the turbo format in block fixed point (see reference.rotate),
// by tensor cores. Products of +-1 and integers that fp16 holds are summed
// exactly.
//
// A warp rotates eight columns at once. Column c is loaded by the four lanes
// from 4 * c on. After the product, lane l has coordinates of column
// 2 * (l % 4) and the next. They are in the scale groups l / 4, l / 4 + 8 and
// so on, so a group is in one lane. With 64 coordinates a column holds two
// vectors, one after the other.
#pragma once

#include "common/mma.cuh"
#include "common/numbers.cuh"
#include "turbo_constants.h"

namespace turbo {

constexpr int kColumnLanes = 4;
constexpr int kWarpColumns = 8;
constexpr int kColumnVectors = HEAD_SIZE == 64 ? 2 : 1;
// Lanes that share a vector after the product.
constexpr int kVectorLanes = kWarpColumns / kColumnVectors;
constexpr int kLaneGroups = (NUM_GROUPS + kWarpColumns - 1) / kWarpColumns;
// A step of the product takes 16 rows of a column and gives 16.
constexpr int kMmaRows = 16;
constexpr int kInBlocks = kColumnVectors * HEAD_SIZE / kMmaRows;
constexpr int kKvBlocks = kLaneGroups * SCALE_GROUP / 2;
constexpr int kQueryBlocks = kInBlocks;
// The rotation is a product within blocks, and then sums and differences of
// blocks.
static_assert((HEAD_SIZE & (HEAD_SIZE - 1)) == 0);

template <bool kIsBf16>
struct Input {
  static constexpr uint32_t kInfinityBits = kIsBf16 ? 0x7F80u : 0x7C00u;

  __device__ __forceinline__ static float low(uint32_t pair) {
    if constexpr (kIsBf16) {
      return __uint_as_float(pair << 16);
    } else {
      return half_as_float(pair);
    }
  }
  __device__ __forceinline__ static float high(uint32_t pair) {
    if constexpr (kIsBf16) {
      return __uint_as_float(pair & 0xFFFF0000u);
    } else {
      return half_as_float(pair >> 16);
    }
  }
};

// Four numbers less those of an offset. Each is rounded once to fp32 and once
// to the input's dtype.
template <bool kIsBf16>
__device__ __forceinline__ uint2 without_offset(uint2 x, float4 m) {
  const auto less = [](uint32_t pair, float low, float high) {
    const float a = __fsub_rn(Input<kIsBf16>::low(pair), low);
    const float b = __fsub_rn(Input<kIsBf16>::high(pair), high);
    if constexpr (kIsBf16) {
      return as_bits(__floats2bfloat162_rn(a, b));
    } else {
      return as_bits(__floats2half2_rn(a, b));
    }
  };
  return make_uint2(less(x.x, m.x, m.y), less(x.y, m.z, m.w));
}

template <bool kIsBf16>
__device__ __forceinline__ uint2 without_offset(uint2 x, const float* offset) {
  return without_offset<kIsBf16>(
      x, __ldg(reinterpret_cast<const float4*>(offset)));
}

// The bits of the largest magnitude in a lane.
template <int kBlocks>
__device__ __forceinline__ uint32_t
largest_of_lane(const uint32_t (&x)[kBlocks][2]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    largest = __vmaxu2(largest, x[i][0] & 0x7FFF7FFFu);
    largest = __vmaxu2(largest, x[i][1] & 0x7FFF7FFFu);
  }
  return max(largest & 0xFFFFu, largest >> 16);
}

// The bits of the largest magnitude in the lanes of a vector.
template <int kBlocks>
__device__ __forceinline__ uint32_t
largest_bits(const uint32_t (&x)[kBlocks][2]) {
  uint32_t largest = largest_of_lane(x);
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  if constexpr (kColumnVectors == 1) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
  }
  return largest;
}

// floor(x * unit + 1/2). With kIsSpecial, x may be infinite.
template <bool kIsSpecial>
__device__ __forceinline__ float to_integer(float x, float unit) {
  constexpr float kLimit = 2 << ROTATION_EXPONENT;
  float scaled = __fmaf_rn(x, unit, 0.5f);
  if constexpr (kIsSpecial) {
    scaled = fminf(fmaxf(scaled, -kLimit), kLimit);
  }
  return __fsub_rn(__fadd_rd(scaled, kMagic), kMagic);
}

template <bool kIsBf16, bool kIsSpecial, int kBlocks>
__device__ __forceinline__ void to_integers(uint32_t (&x)[kBlocks][2],
                                            float unit) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float low =
          to_integer<kIsSpecial>(Input<kIsBf16>::low(x[i][j]), unit);
      const float high =
          to_integer<kIsSpecial>(Input<kIsBf16>::high(x[i][j]), unit);
      x[i][j] = as_bits(__floats2half2_rn(low, high));
    }
  }
}

// A pair of 16-bit numbers with NaN replaced by zero.
template <bool kIsBf16>
__device__ __forceinline__ uint32_t without_nan(uint32_t pair, bool& has_nan) {
  const bool low = (pair & 0x7FFFu) > Input<kIsBf16>::kInfinityBits;
  const bool high = (pair >> 16 & 0x7FFFu) > Input<kIsBf16>::kInfinityBits;
  has_nan |= low || high;
  return pair & ((low ? 0u : 0xFFFFu) | (high ? 0u : 0xFFFF0000u));
}

// The exponent that integers are relative to, from the bits of the largest
// magnitude.
template <bool kIsBf16>
__device__ __forceinline__ int input_exponent(uint32_t largest) {
  // An infinity counts as the largest fp32 number.
  return min(max(exponent_of(Input<kIsBf16>::low(largest)), MIN_INPUT_EXPONENT),
             127);
}

// Load this lane's part of a column as fp16 integers.
//
// row: the vector, or null for zeros.
// offset: the offset that is subtracted first, or null.
// exponent: that of the vector's largest magnitude, written. Integers are in
//   units of 2**(exponent - ROTATION_EXPONENT).
// has_nan: whether this lane saw a NaN, which counts as zero.
template <bool kIsBf16>
__device__ __forceinline__ void load_integers(const uint16_t* row,
                                              const float* offset,
                                              uint32_t (&x)[kInBlocks][2],
                                              int& exponent, bool& has_nan) {
  const int lane = threadIdx.x % 32;
  const int first = 4 * (lane % (kColumnLanes / kColumnVectors));
#pragma unroll
  for (int i = 0; i < kInBlocks; ++i) {
    uint2 pairs = make_uint2(0, 0);
    const int place = i * (kMmaRows / kColumnVectors) + first;
    if (row != nullptr) {
      pairs = __ldcg(reinterpret_cast<const uint2*>(row + place));
      if (KEY_OFFSET != 0 && offset != nullptr)
        pairs = without_offset<kIsBf16>(pairs, offset + place);
    }
    x[i][0] = pairs.x;
    x[i][1] = pairs.y;
  }
  uint32_t largest = largest_bits(x);
  has_nan = false;
  const bool is_special = largest >= Input<kIsBf16>::kInfinityBits;
  const bool any_special = __any_sync(~0u, is_special);
  if (any_special) {
#pragma unroll
    for (int i = 0; i < kInBlocks; ++i) {
      x[i][0] = without_nan<kIsBf16>(x[i][0], has_nan);
      x[i][1] = without_nan<kIsBf16>(x[i][1], has_nan);
    }
    largest = largest_bits(x);
  }
  exponent = input_exponent<kIsBf16>(largest);
  const float unit = power_of_two(ROTATION_EXPONENT - exponent);
  if (any_special) {
    to_integers<kIsBf16, true>(x, unit);
  } else {
    to_integers<kIsBf16, false>(x, unit);
  }
}

// H (s * x), exact.
//
// matrix: fragments of the rotation, see rotation_fragments in
// store_tables.py.
template <int kOutBlocks>
__device__ __forceinline__ void rotate(const uint32_t (&x)[kInBlocks][2],
                                       const uint4* __restrict__ matrix,
                                       float (&y)[kOutBlocks][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kOutBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) y[i][j] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kInBlocks; ++i) {
    mma_f16(y[i], __ldg(matrix + i * 32 + lane), x[i]);
  }
#pragma unroll
  for (int width = 1; width < kInBlocks; width *= 2) {
#pragma unroll
    for (int i = 0; i < kInBlocks; ++i) {
      if (i & width) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float sum = __fadd_rn(y[i][j], y[i | width][j]);
        y[i | width][j] = __fsub_rn(y[i][j], y[i | width][j]);
        y[i][j] = sum;
      }
    }
  }
}

// The place, in rotate's result, of rotated coordinate e of a lane's group j,
// for the column 2 * (lane % 4).
__device__ __forceinline__ constexpr int block_of(int j, int e) {
  return kLaneGroups == 1 ? e / 2 : e * (kLaneGroups / 2) + j / 2;
}
__device__ __forceinline__ constexpr int place_of(int j, int e) {
  return 2 * (kLaneGroups == 1 ? e % 2 : j % 2);
}

// The index, in its column, of the vector that the lane has coordinates of.
__device__ __forceinline__ int vector_of_lane() {
  return threadIdx.x % 32 / 4 / kVectorLanes;
}

// The number x of the lane that loaded a vector, for a lane that has the
// vector's coordinates.
__device__ __forceinline__ int from_loader(int x, int column) {
  const int source =
      kColumnLanes * column + kColumnLanes / kColumnVectors * vector_of_lane();
  return __shfl_sync(~0u, x, source);
}

}  // namespace turbo
