// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Tensor core instructions.
#pragma once

#include <cstdint>

namespace turbo {

// D += A B. In int8, A is 16 x 32 and B is 32 x 8. In fp16 and bf16, A is
// 16 x 16 and B is 16 x 8.
//
// kind: the asm constraint of D's numbers.
#define TURBO_MMA(name, type, kind, shape)                                    \
  __device__ __forceinline__ void name(type(&d)[4], uint32_t a0, uint32_t a1, \
                                       uint32_t a2, uint32_t a3, uint32_t b0, \
                                       uint32_t b1) {                         \
    asm("mma.sync.aligned." shape                                             \
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"              \
        : "+" kind(d[0]), "+" kind(d[1]), "+" kind(d[2]), "+" kind(d[3])      \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));              \
  }
TURBO_MMA(mma_s8, int, "r", "m16n8k32.row.col.s32.s8.s8.s32")
TURBO_MMA(mma_f16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
TURBO_MMA(mma_bf16, float, "f", "m16n8k16.row.col.f32.bf16.bf16.f32")

// D = A B + c, where c is one number.
__device__ __forceinline__ void mma_s8(int (&d)[4], uint32_t a0, uint32_t a1,
                                       uint32_t a2, uint32_t a3, uint32_t b0,
                                       uint32_t b1, int c) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c));
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const uint4& a,
                                        const uint32_t (&b)[2]) {
  mma_f16(d, a.x, a.y, a.z, a.w, b[0], b[1]);
}

// Transpose an 8 x 8 matrix of 16-bit numbers, of which four lanes have a row.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Load four such matrices from shared memory. Lane l has the address of row
// l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4],
                                              uint32_t address) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
      : "r"(address)
      : "memory");
}

}  // namespace turbo
