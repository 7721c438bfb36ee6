// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Division by a number that is constant in a launch.
#pragma once

#include <cstdint>

namespace turbo {

// Divides numbers below 2**31 by an invariant one, in few instructions
// (Granlund and Montgomery, doi:10.1145/178243.178249).
struct Divisor {
  uint32_t divisor, multiplier;
  int shift = 0;

  explicit Divisor(int d) : divisor(max(d, 1)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - divisor;
    multiplier = static_cast<uint32_t>((excess << 32) / divisor + 1);
  }

  // Returns the quotient of n, and writes the remainder.
  __device__ __forceinline__ int divide(int n, int& remainder) const {
    const uint32_t quotient =
        (__umulhi(static_cast<uint32_t>(n), multiplier) + n) >> shift;
    remainder = n - static_cast<int>(quotient * divisor);
    return static_cast<int>(quotient);
  }
};

}  // namespace turbo
