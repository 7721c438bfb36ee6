// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The direction in which queries look, and the costs of keys' errors along it:
// see reference.unbias.Products.
#pragma once

#include <type_traits>

#include "store/planes.cuh"
#include "store/unbias.cuh"

namespace turbo {

// Products with a direction are in units of 2**-DIRECTION_FRACTION_BITS. Errors
// are in units of 2**-PRODUCT_FRACTION_BITS. As the quotient is a power of two,
// it may be multiplied at any time.
constexpr float kAlongUnit =
    1.0f / (1 << (PRODUCT_FRACTION_BITS - DIRECTION_FRACTION_BITS));

// A lane's coordinates of a direction, in pairs of fp16.
template <int kGroups, int kElements>
struct Direction {
  uint32_t pairs[kGroups][kElements / 2];

  Direction() = default;
  // kInRow: whether a part has consecutive coordinates, not every other one.
  template <int kParts, bool kInRow>
  __device__ __forceinline__ static Direction of(const __half* row) {
    constexpr int kShares = SCALE_GROUP / kElements;
    constexpr int kStep = kInRow ? 1 : kShares;
    const int part = kShares == 1 ? 0 : part_of_lane<kShares>();
    const int first = kInRow ? part * kElements : part;
    const auto* bits = reinterpret_cast<const uint16_t*>(row) +
                       first * NUM_GROUPS + group_of_lane<kParts>(0);
    Direction result;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int p = 0; p < kElements / 2; ++p) {
        const auto* pair = bits + 2 * p * kStep * NUM_GROUPS + j * kWarpColumns;
        const uint32_t low = __ldg(pair);
        const uint32_t high = __ldg(pair + kStep * NUM_GROUPS);
        result.pairs[j][p] = low | high << 16;
      }
    }
    return result;
  }

  // Give the coordinates the signs of others: see CodePlace's signs.
  template <int kWords>
  __device__ __forceinline__ void multiply_signs(
      const uint32_t (&signs)[kGroups][kWords]) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const uint32_t sign =
            signs[j][word_of<kElements>(i)] >> shift_of<kElements>(i) & 1;
        pairs[j][i / 2] ^= sign << (i % 2 * 16 + 15);
      }
    }
  }

  __device__ __forceinline__ float at(int j, int i) const {
    return half_as_float(pairs[j][i / 2] >> (i % 2 * 16));
  }
};

template <bool kIsKey, int kGroups, int kElements>
using DirectionOf =
    std::conditional_t<kIsKey && QUERY_DIRECTION != 0,
                       Direction<kGroups, kElements>, NoDirection>;

// A term of an error's product with a direction. The lowest bits of the
// returned float are the term, rounded.
__device__ __forceinline__ float rounded_along(float error, float z) {
  return __fmaf_rn(__fmul_rn(error, z), kAlongUnit, kMagic);
}

// A coordinate's error, in the units of products.
__device__ __forceinline__ float error_of(float x, float decoded) {
  return __fsub_rn(__fmul_rn(x, 1 << PRODUCT_FRACTION_BITS),
                   __fmul_rn(decoded, KEY_GAIN));
}

// The same term as an integer.
__device__ __forceinline__ int along_of(float x, float decoded, float z) {
  return __float_as_int(rounded_along(error_of(x, decoded), z)) - kMagicBits;
}

// The cost of an error's products with the key and with a direction.
__device__ __forceinline__ float cost_along(float along, float pull) {
  return __fmul_rn(__fmul_rn(along, along), pull);
}
__device__ __forceinline__ float cost_of_products(float rest, float along,
                                                  float pull) {
  return __fmaf_rn(__fmul_rn(rest, rest), BIAS_WEIGHT, cost_along(along, pull));
}

// The factor f of a key x, and the part p of its direction u, that are tried:
// f * x + p * u is encoded. The least cost is kept, not the smallest rest.
struct DirectedUnbiasing : Unbiasing {
  float pull;
  float next_part = 0.0f, part = 0.0f;
  float least = INFINITY;

  template <int kParts>
  __device__ __forceinline__ static DirectedUnbiasing of(int square_sum) {
    DirectedUnbiasing result = {Unbiasing::of<kParts>(square_sum)};
    result.pull = __fmul_rn(result.square, DIRECTION_PULL);
    return result;
  }

  // Take in the error's products with the key and with the direction.
  __device__ __forceinline__ bool update(float missing, float along) {
    const float cost = cost_of_products(missing, along, pull);
    const bool is_best = cost < least;
    least = is_best ? cost : least;
    factor = is_best ? next : factor;
    part = is_best ? next_part : part;
    next_part = __fadd_rn(next_part, __fmul_rn(along, DIRECTION_STEP));
    step(missing);
    return is_best;
  }

  // Coordinate i of a lane's group j, as it is encoded next and was best.
  template <typename OwnDirection>
  __device__ __forceinline__ float next_of(float x,
                                           const OwnDirection& direction, int j,
                                           int i) const {
    return __fadd_rn(__fmul_rn(x, next),
                     __fmul_rn(direction.at(j, i), next_part));
  }
  template <typename OwnDirection>
  __device__ __forceinline__ float best_of(float x,
                                           const OwnDirection& direction, int j,
                                           int i) const {
    return __fadd_rn(__fmul_rn(x, factor), __fmul_rn(direction.at(j, i), part));
  }
};
template <typename OwnDirection>
using UnbiasingOf = std::conditional_t<kHasDirection<OwnDirection>,
                                       DirectedUnbiasing, Unbiasing>;

// Take in a lane's sums after a round. Returns whether the round is the best.
template <int kParts>
__device__ __forceinline__ bool update(Unbiasing& key, int round, int rest,
                                       int along) {
  return key.update(round, reduce_vector<Sum, kParts>(rest, round));
}
template <int kParts>
__device__ __forceinline__ bool update(DirectedUnbiasing& key, int round,
                                       int rest, int along) {
  const int of_key = reduce_vector<Sum, kParts>(rest, 0);
  return key.update(of_key, reduce_vector<Sum, kParts>(along, 1));
}

}  // namespace turbo
