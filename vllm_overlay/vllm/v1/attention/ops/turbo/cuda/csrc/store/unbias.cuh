// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The search for a key's factor, with which its product with what is decoded is
// its square: see reference.codec._unbiased.
#pragma once

#include "store/scales.cuh"

namespace turbo {

// A product of the search for a factor, as the bits of a float that has it,
// rounded, in its lowest bits.
__device__ __forceinline__ float rounded_product(float x, float decoded) {
  return __fadd_rn(__fmul_rn(__fmul_rn(x, decoded), KEY_GAIN), kMagic);
}

// The square of a vector, as the lane's summand with kMagicBits for each
// coordinate.
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

// Factors tried, and the best so far.
struct Unbiasing {
  float square;       // of the key
  float reciprocal;   // of the square, or 1
  float next = 1.0f;  // factor to try
  float factor = 1.0f,
        rest;  // the best, and what of the square is missing with it

  // square: of the vector. kParts: lanes that share its coordinates.
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

  // Take note of what is missing with the factor tried. Returns whether it is
  // the best.
  __device__ __forceinline__ bool update(int round, float missing) {
    const bool is_best = round == 0 || fabsf(missing) < fabsf(rest);
    factor = is_best ? next : factor;
    rest = is_best ? missing : rest;
    // The quotient, correctly rounded, for the reciprocal is (Markstein's
    // theorem).
    const float quotient = __fmul_rn(missing, reciprocal);
    const float error = __fmaf_rn(-fmaxf(square, 1.0f), quotient, missing);
    next = __fadd_rn(next, __fmaf_rn(error, reciprocal, quotient));
    next = fminf(fmaxf(next, 1.0f - UNBIAS_LIMIT), 1.0f + UNBIAS_LIMIT);
    return is_best;
  }
};

}  // namespace turbo
