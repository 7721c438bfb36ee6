// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Arithmetic with a GPU's roundings.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace emulator {

constexpr uint32_t kFloatNan = 0x7FFFFFFFu;
constexpr uint16_t kHalfNan = 0x7FFFu;

// Arithmetic on x86 gives a NaN with a sign, and on a GPU one without. Other
// bits stay, because floats may hold integers.
inline uint32_t bits_of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return bits == 0xFFC00000u ? kFloatNan : bits;
}

// A sum of doubles, and the error of its rounding (Knuth).
struct ExactSum {
  double sum, rest;

  ExactSum(double a, double b) : sum(a + b) {
    const double part = sum - a;
    rest = (a - (sum - part)) + (b - part);
  }
  // The sum with its last bit set if it was rounded at all. Rounding that once
  // more gives the same as rounding once.
  double odd() const {
    const auto bits = std::bit_cast<uint64_t>(sum);
    if (!(rest != 0.0) || !std::isfinite(sum) || bits % 2 == 1) return sum;
    const bool away = (rest > 0.0) == (sum > 0.0);
    return std::bit_cast<double>(away ? bits + 1 : bits - 1);
  }
};

// a + b rounded down. `nearest` is a + b rounded to nearest.
inline float rounded_down(double a, double b, float nearest) {
  if (!std::isfinite(nearest)) return nearest;
  const ExactSum exact(a, b);
  const bool above =
      nearest > exact.sum || (nearest == exact.sum && exact.rest < 0.0);
  return above ? std::nextafterf(nearest, -INFINITY) : nearest;
}

inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

// x limited to [0, 1]. NaN becomes zero.
inline float saturated(float x) { return x > 0.0f ? std::fmin(x, 1.0f) : 0.0f; }

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude > 0x7C00u) return std::bit_cast<float>(kFloatNan);
  if (magnitude == 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u);
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

// x rounded to nearest, ties to even.
inline uint16_t half_of(double x) {
  if (x != x) return kHalfNan;
  const auto bits = std::bit_cast<uint64_t>(x);
  const uint16_t sign = bits >> 48 & 0x8000u;
  const double magnitude = std::fabs(x);
  if (magnitude >= 65520.0) return sign | 0x7C00u;
  const int exponent = std::max(int(bits >> 52 & 0x7FFu) - 1023, -14);
  // The unit is that of the last of ten bits. A sum with 2**52 is an integer.
  const double unit =
      std::bit_cast<double>(uint64_t(1023 + 10 - exponent) << 52);
  const auto integer =
      static_cast<uint32_t>((magnitude * unit + 0x1p52) - 0x1p52);
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + integer);
}

inline uint16_t bfloat16_of(float x) {
  if (x != x) return kHalfNan;
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace emulator
