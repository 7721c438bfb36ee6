// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The rotation of a vector that has a warp, or several: see rotate.cuh.
#pragma once

#include "store/rotate.cuh"

namespace turbo {

// Sizes of which a warp can also rotate one vector alone, in less time: four
// lanes then share a group, and number i of lane l's coordinates of a group is
// 4 * i + l % 4. A vector of more than eight groups has as many warps as a lane
// would have groups: each rotates it whole and goes on with its own groups.
//
// The columns of the product are the eight blocks of a vector (of each PRODUCT,
// if that has several); what is left are sums and differences of coordinates of
// four lanes.
constexpr bool HAS_SINGLES = IS_SYLVESTER && VECTORS_A_COLUMN == 1;
constexpr int SINGLE_PARTS = 4;
constexpr int SINGLE_ELEMENTS = SCALE_GROUP / SINGLE_PARTS;
constexpr int PRODUCTS = HAS_SINGLES ? GROUPS_A_LANE : 1;
constexpr int SINGLE_WARPS = PRODUCTS;
// Whether PARTS lanes that share a group are of warps that share a vector.
template <int PARTS>
constexpr bool IS_SINGLE = HAS_SINGLES && PARTS == SINGLE_PARTS;

__device__ __forceinline__ int warp_of_vector() {
  return threadIdx.x / 32 % SINGLE_WARPS;
}

// What a lane loads of a vector, and of the rotation.
struct SingleInput {
  uint4 factor;
  uint32_t x[PRODUCTS][2];
  uint2 sign[PRODUCTS];
};

// matrix: of rotation_fragments for singles; signs follow the product's
// operand.
__device__ __forceinline__ SingleInput
load_single(const uint16_t* row, const uint4* __restrict__ matrix) {
  const int lane = threadIdx.x % 32;
  const int part = lane % SINGLE_PARTS;
  const int column = lane / SINGLE_PARTS;
  const auto* signs = reinterpret_cast<const uint2*>(matrix + 32);
  SingleInput result;
  result.factor = __ldg(matrix + lane);
#pragma unroll
  for (int m = 0; m < PRODUCTS; ++m) {
    // See rotation_fragments for the order.
    constexpr int HALF = GROUPS_A_LANE == 1 ? HEAD_SIZE / 2 : COLUMNS_A_WARP;
    const int first =
        4 * (part % 2) + HALF * (part / 2) + NUM_GROUPS * (column / 2) +
        4 * NUM_GROUPS * (column % 2) +
        (GROUPS_A_LANE == 4 ? m % 2 * 2 * COLUMNS_A_WARP : 0) +
        (GROUPS_A_LANE == 1 ? 0 : m / (GROUPS_A_LANE / 2)) * HEAD_SIZE / 2;
    const uint2 pairs = __ldg(reinterpret_cast<const uint2*>(row + first));
    result.x[m][0] = pairs.x;
    result.x[m][1] = pairs.y;
    result.sign[m] = __ldg(signs + first / 4);
  }
  return result;
}

template <bool IS_BF16>
__device__ __forceinline__ void rotate_single(
    SingleInput& input, float (&result)[1][SINGLE_ELEMENTS], int& exponent,
    bool& has_nan) {
  const int part = threadIdx.x % SINGLE_PARTS;
  uint32_t (&x)[PRODUCTS][2] = input.x;
  uint32_t largest = 0;
#pragma unroll
  for (int m = 0; m < PRODUCTS; ++m) {
    largest = __vmaxu2(largest, x[m][0] & 0x7FFF7FFFu);
    largest = __vmaxu2(largest, x[m][1] & 0x7FFF7FFFu);
  }
  largest = __reduce_max_sync(FULL_MASK, max(largest & 0xFFFFu, largest >> 16));
  has_nan = false;
  if (largest >= Input<IS_BF16>::INFINITY_BITS) {
    largest = 0;
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m) {
      for (int i = 0; i < 2; ++i) {
        x[m][i] = without_nan<IS_BF16>(x[m][i], has_nan);
        largest = __vmaxu2(largest, x[m][i] & 0x7FFF7FFFu);
      }
    }
    largest =
        __reduce_max_sync(FULL_MASK, max(largest & 0xFFFFu, largest >> 16));
  }
  exponent = input_exponent<IS_BF16>(largest);
  float y[GROUPS_A_LANE][SINGLE_ELEMENTS];
  to_integers<IS_BF16, true>(x, power_of_two(ROTATION_EXPONENT - exponent));
#pragma unroll
  for (int m = 0; m < PRODUCTS; ++m) {
    // Signs are bits to flip.
    x[m][0] ^= input.sign[m].x;
    x[m][1] ^= input.sign[m].y;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    multiply_add(c, input.factor, x[m]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // D = 128 has half of a group's coordinates in the other rows, else a
      // group has.
      const int j =
          GROUPS_A_LANE == 1 ? 0 : half + (GROUPS_A_LANE == 4 ? m % 2 * 2 : 0);
      const int i =
          GROUPS_A_LANE == 1 ? 2 * half : 2 * (m / (GROUPS_A_LANE / 2));
      y[j][i] = __fadd_rn(c[2 * half], c[2 * half + 1]);
      y[j][i + 1] = __fsub_rn(c[2 * half], c[2 * half + 1]);
    }
  }
  if constexpr (PRODUCTS > 1) {
#pragma unroll
    for (int j = 0; j < GROUPS_A_LANE; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = __fadd_rn(y[j][i], y[j][i + 2]);
        y[j][i + 2] = __fsub_rn(y[j][i], y[j][i + 2]);
        y[j][i] = sum;
      }
    }
  }
  if constexpr (PRODUCTS == 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < SINGLE_ELEMENTS; ++i) {
        const float sum = __fadd_rn(y[j][i], y[j + 2][i]);
        y[j + 2][i] = __fsub_rn(y[j][i], y[j + 2][i]);
        y[j][i] = sum;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < SINGLE_ELEMENTS; ++i) {
    float own = y[0][i];
#pragma unroll
    for (int j = 1; j < GROUPS_A_LANE; ++j) {
      own = warp_of_vector() == j ? y[j][i] : own;
    }
    result[0][i] = own;
  }
#pragma unroll
  for (int lanes = 1; lanes < SINGLE_PARTS; lanes *= 2) {
    const float sign = (part & lanes) == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int i = 0; i < SINGLE_ELEMENTS; ++i) {
      const float other = __shfl_xor_sync(FULL_MASK, result[0][i], lanes);
      result[0][i] = __fmaf_rn(result[0][i], sign, other);
    }
  }
}

}  // namespace turbo
