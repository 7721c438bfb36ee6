// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The part of CUDA's header of this name that the kernels use.
#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};

struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half x) { return emulator::half_to_float(x.bits); }

inline __half __float2half_rn(float x) { return {emulator::half_of(x)}; }

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}

inline __half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }

inline __half2 __low2half2(__half2 x) { return {x.x, x.x}; }
inline __half2 __high2half2(__half2 x) { return {x.y, x.y}; }

inline float2 __half22float2(__half2 x) {
  return {__half2float(x.x), __half2float(x.y)};
}

namespace emulator {

template <typename F>
__half2 of_both(F f, __half2 a, __half2 b) {
  return {f(a.x, b.x), f(a.y, b.y)};
}

// Products and sums of two halves are exact in double.
inline __half add(__half a, __half b) {
  return {half_of(double(__half2float(a)) + __half2float(b))};
}

inline __half multiply(__half a, __half b) {
  return {half_of(double(__half2float(a)) * __half2float(b))};
}

inline __half multiply_add(__half a, __half b, __half c) {
  const double product = double(__half2float(a)) * __half2float(b);
  return {half_of(ExactSum(product, __half2float(c)).odd())};
}

}  // namespace emulator

inline __half2 __hadd2(__half2 a, __half2 b) {
  return emulator::of_both(emulator::add, a, b);
}

inline __half2 __hmul2(__half2 a, __half2 b) {
  return emulator::of_both(emulator::multiply, a, b);
}

inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {emulator::multiply_add(a.x, b.x, c.x),
          emulator::multiply_add(a.y, b.y, c.y)};
}

inline __half __hmax_nan(__half a, __half b) {
  const float x = __half2float(a), y = __half2float(b);
  if (x != x || y != y) return {emulator::kHalfNan};
  return x > y || (x == y && a.bits == 0) ? a : b;
}

inline __half2 __hmax2_nan(__half2 a, __half2 b) {
  return emulator::of_both(__hmax_nan, a, b);
}

inline __half2 __habs2(__half2 x) {
  return {{uint16_t(x.x.bits & 0x7FFFu)}, {uint16_t(x.y.bits & 0x7FFFu)}};
}

inline __half2 __hneg2(__half2 x) {
  return {{uint16_t(x.x.bits ^ 0x8000u)}, {uint16_t(x.y.bits ^ 0x8000u)}};
}
