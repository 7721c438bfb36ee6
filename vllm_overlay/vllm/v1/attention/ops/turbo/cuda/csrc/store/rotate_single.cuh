// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The rotation of a vector that has a warp, or several: see rotate.cuh.
#pragma once

#include "store/rotate.cuh"

namespace turbo {

// Whether a warp can also rotate one vector alone, in less time. Four lanes
// then share a group. Number i of lane l's coordinates of a group is
// 4 * i + l % 4. A vector of more than eight groups has as many warps as a lane
// would have groups. Each rotates the whole vector and goes on with its own
// groups.
//
// The columns of the product are the eight blocks of a vector. If a vector has
// several products, they are the blocks of each. Sums and differences of
// coordinates in four lanes follow.
constexpr bool kHasSingles = kColumnVectors == 1;
constexpr int kSingleParts = 4;
constexpr int kSingleElements = SCALE_GROUP / kSingleParts;
constexpr int kProducts = kHasSingles ? kLaneGroups : 1;
constexpr int kSingleWarps = kProducts;
// Whether the kParts lanes that share a group are in warps that share a vector.
template <int kParts>
constexpr bool kIsSingle = kHasSingles && kParts == kSingleParts;

__device__ __forceinline__ int warp_of_vector() {
  return threadIdx.x / 32 % kSingleWarps;
}

// A lane's part of a vector, and of the rotation.
struct SingleInput {
  uint4 factor;
  uint32_t x[kProducts][2];
  uint2 sign[kProducts];
};

// Load a lane's part of a vector.
//
// offset: the offset that is subtracted first, or null.
// matrix: from rotation_fragments for singles. Signs follow the product's
//   operand.
template <bool kIsBf16>
__device__ __forceinline__ SingleInput
load_single(const uint16_t* row, const float* offset,
            const uint4* __restrict__ matrix) {
  const int lane = threadIdx.x % 32;
  const int part = lane % kSingleParts;
  const int column = lane / kSingleParts;
  const auto* signs = reinterpret_cast<const uint2*>(matrix + 32);
  SingleInput result;
  result.factor = __ldg(matrix + lane);
#pragma unroll
  for (int m = 0; m < kProducts; ++m) {
    // See rotation_fragments for the order.
    constexpr int kHalf = kLaneGroups == 1 ? HEAD_SIZE / 2 : kWarpColumns;
    const int first =
        4 * (part % 2) + kHalf * (part / 2) + NUM_GROUPS * (column / 2) +
        4 * NUM_GROUPS * (column % 2) +
        (kLaneGroups == 4 ? m % 2 * 2 * kWarpColumns : 0) +
        (kLaneGroups == 1 ? 0 : m / (kLaneGroups / 2)) * HEAD_SIZE / 2;
    uint2 pairs = __ldcg(reinterpret_cast<const uint2*>(row + first));
    if (KEY_OFFSET != 0 && offset != nullptr)
      pairs = without_offset<kIsBf16>(pairs, offset + first);
    result.x[m][0] = pairs.x;
    result.x[m][1] = pairs.y;
    result.sign[m] = __ldg(signs + first / 4);
  }
  return result;
}

template <bool kIsBf16>
__device__ __forceinline__ void rotate_single(
    SingleInput& input, float (&result)[1][kSingleElements], int& exponent,
    bool& has_nan) {
  const int part = threadIdx.x % kSingleParts;
  uint32_t (&x)[kProducts][2] = input.x;
  uint32_t largest = __reduce_max_sync(~0u, largest_of_lane(x));
  has_nan = false;
  if (largest >= Input<kIsBf16>::kInfinityBits) {
    largest = 0;
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      for (int i = 0; i < 2; ++i) {
        x[m][i] = without_nan<kIsBf16>(x[m][i], has_nan);
        largest = __vmaxu2(largest, x[m][i] & 0x7FFF7FFFu);
      }
    }
    largest = __reduce_max_sync(~0u, max(largest & 0xFFFFu, largest >> 16));
  }
  exponent = input_exponent<kIsBf16>(largest);
  float y[kLaneGroups][kSingleElements];
  to_integers<kIsBf16, true>(x, power_of_two(ROTATION_EXPONENT - exponent));
#pragma unroll
  for (int m = 0; m < kProducts; ++m) {
    // Signs are bits to flip.
    x[m][0] ^= input.sign[m].x;
    x[m][1] ^= input.sign[m].y;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_f16(c, input.factor, x[m]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The other rows of the product have the second half of a group's
      // coordinates if HEAD_SIZE is 128, and another group otherwise.
      const int j =
          kLaneGroups == 1 ? 0 : half + (kLaneGroups == 4 ? m % 2 * 2 : 0);
      const int i = kLaneGroups == 1 ? 2 * half : 2 * (m / (kLaneGroups / 2));
      y[j][i] = __fadd_rn(c[2 * half], c[2 * half + 1]);
      y[j][i + 1] = __fsub_rn(c[2 * half], c[2 * half + 1]);
    }
  }
  if constexpr (kProducts > 1) {
#pragma unroll
    for (int j = 0; j < kLaneGroups; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = __fadd_rn(y[j][i], y[j][i + 2]);
        y[j][i + 2] = __fsub_rn(y[j][i], y[j][i + 2]);
        y[j][i] = sum;
      }
    }
  }
  if constexpr (kProducts == 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < kSingleElements; ++i) {
        const float sum = __fadd_rn(y[j][i], y[j + 2][i]);
        y[j + 2][i] = __fsub_rn(y[j][i], y[j + 2][i]);
        y[j][i] = sum;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSingleElements; ++i) {
    float own = y[0][i];
#pragma unroll
    for (int j = 1; j < kLaneGroups; ++j) {
      own = warp_of_vector() == j ? y[j][i] : own;
    }
    result[0][i] = own;
  }
#pragma unroll
  for (int lanes = 1; lanes < kSingleParts; lanes *= 2) {
    const float sign = (part & lanes) == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int i = 0; i < kSingleElements; ++i) {
      const float other = __shfl_xor_sync(~0u, result[0][i], lanes);
      result[0][i] = __fmaf_rn(result[0][i], sign, other);
    }
  }
}

}  // namespace turbo
