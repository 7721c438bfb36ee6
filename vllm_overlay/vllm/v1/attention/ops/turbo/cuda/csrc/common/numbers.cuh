// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Operations on the bits of numbers that the compiler has no name for, or does
// not find.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace turbo {

// 1.5 * 2**23. A sum with it is rounded to an integer n, and has the bits
// kMagicBits + n. Conversely, kMagicBits + n are the bits of kMagic + n.
constexpr float kMagic = 12582912.0f;
constexpr int kMagicBits = 0x4B400000;

__device__ __forceinline__ uint32_t as_bits(__half2 x) {
  return *reinterpret_cast<uint32_t*>(&x);
}

__device__ __forceinline__ uint32_t as_bits(__nv_bfloat162 x) {
  return *reinterpret_cast<uint32_t*>(&x);
}

__device__ __forceinline__ __half2 as_half2(uint32_t bits) {
  return *reinterpret_cast<__half2*>(&bits);
}

// (a & b) | c in one instruction, which the compiler does not always find.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// The bits of a where the mask is set, and of b elsewhere.
__device__ __forceinline__ uint32_t select(uint32_t mask, uint32_t a,
                                           uint32_t b) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;"
      : "=r"(result)
      : "r"(mask), "r"(a), "r"(b));
  return result;
}

// a * b + c in one instruction, which the compiler does not split into a shift
// and an addition.
__device__ __forceinline__ uint32_t mad_lo(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// prmt with its sign mode, which __byte_perm does not have.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b,
                                            uint32_t nibbles) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(nibbles));
  return result;
}

// The value of an fp16 number, whose bits are the lower half of a word.
__device__ __forceinline__ float half_as_float(uint32_t bits) {
  return __half2float(
      __ushort_as_half(static_cast<unsigned short>(bits & 0xFFFFu)));
}

// Maps a float's bits to an integer that is ordered as floats are, and back. A
// positive NaN is above infinity.
__device__ __forceinline__ int ordered_bits(int bits) {
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

// 2**exponent, exact, for exponents in [-126, 127].
__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// floor(log2(x)) of non-negative normal x; -127 at zero.
__device__ __forceinline__ int exponent_of(float x) {
  return (__float_as_int(x) >> 23) - 127;
}

// Load a lane's 4 * kWords bytes.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords],
                                           const uint8_t* p) {
  if constexpr (kWords == 1) {
    words[0] = *reinterpret_cast<const uint32_t*>(p);
  } else if constexpr (kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(p);
    words[0] = x.x, words[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(p + 4 * i);
      words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z,
      words[i + 3] = x.w;
    }
  }
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace turbo
