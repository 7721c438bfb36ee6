// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The search for a key's factor, which makes the key's product with its decoded
// value equal its square: see reference.unbias.unbiased.
#pragma once

#include <type_traits>

#include "store/scales.cuh"

namespace turbo {

// A product in the search for a factor. The lowest bits of the returned float
// are the product, rounded.
__device__ __forceinline__ float rounded_product(float x, float decoded) {
  return __fadd_rn(__fmul_rn(__fmul_rn(x, decoded), KEY_GAIN), kMagic);
}

// A lane's part of the square of a vector, with kMagicBits for each coordinate.
template <int kGroups, int kElements>
__device__ __forceinline__ int square_of(const float (&x)[kGroups][kElements]) {
  int square = 0;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float product = __fmul_rn(x[j][i], x[j][i]);
      square += __float_as_int(
          __fmaf_rn(product, 1 << PRODUCT_FRACTION_BITS, kMagic));
    }
  }
  return square;
}

// Stands for the direction of vectors that have none: see direction.cuh.
struct NoDirection {
  template <int kParts, bool kInRow>
  __device__ __forceinline__ static NoDirection of(const __half*) {
    return {};
  }
};
template <typename OwnDirection>
constexpr bool kHasDirection = !std::is_same_v<OwnDirection, NoDirection>;

// The factors tried, and the best so far.
struct Unbiasing {
  float square;       // of the key
  float reciprocal;   // of the square, or 1
  float next = 1.0f;  // factor to try
  float factor = 1.0f,
        rest;  // the best, and the part of the square that it lacks

  // square_sum: see square_of.
  // kParts: lanes that share a group.
  template <int kParts>
  __device__ __forceinline__ static Unbiasing of(int square_sum) {
    constexpr int kOwnGroups =
        kIsSingle<kParts> || kHasOwnGroup<kParts> ? 1 : kLaneGroups;
    constexpr uint32_t kOffset =
        kOwnGroups * (SCALE_GROUP / kParts) * static_cast<uint32_t>(kMagicBits);
    Unbiasing result;
    result.square =
        reduce_vector<Sum, kParts>(square_sum - static_cast<int>(kOffset), 1);
    result.reciprocal = __frcp_rn(fmaxf(result.square, 1.0f));
    return result;
  }

  // Take in the part of the square that the factor tried lacks. Returns whether
  // that factor is the best.
  __device__ __forceinline__ bool update(int round, float missing) {
    const bool is_best = round == 0 || fabsf(missing) < fabsf(rest);
    factor = is_best ? next : factor;
    rest = is_best ? missing : rest;
    step(missing);
    return is_best;
  }

  // Step the factor as if the product were linear in it.
  __device__ __forceinline__ void step(float missing) {
    // The quotient is correctly rounded, because the reciprocal is (Markstein's
    // theorem).
    const float quotient = __fmul_rn(missing, reciprocal);
    const float error = __fmaf_rn(-fmaxf(square, 1.0f), quotient, missing);
    next = __fadd_rn(next, __fmaf_rn(error, reciprocal, quotient));
    next = fminf(fmaxf(next, 1.0f - UNBIAS_LIMIT), 1.0f + UNBIAS_LIMIT);
  }

  // A coordinate as it is encoded next and was best.
  __device__ __forceinline__ float next_of(float x, NoDirection, int,
                                           int) const {
    return __fmul_rn(x, next);
  }
  __device__ __forceinline__ float best_of(float x, NoDirection, int,
                                           int) const {
    return __fmul_rn(x, factor);
  }
};

}  // namespace turbo
