// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Matrix products of a warpgroup (sm_90a). D has 64 rows and 8 to 256 columns,
// the depth is 16, and operands are fp16.
#pragma once

#include <cstdint>

#include "common/warp.cuh"

namespace turbo {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait for all but the latest kPending groups.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Wait likewise, but only after x has been computed. The compiler moves a plain
// wait up as far as it can, and nothing would run meanwhile. It does not move a
// wait ahead of a store that may depend on x. The store is never executed: it
// would need the bits of a signalling NaN, which x never has.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_after(float x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0x7F800001;\n"
      "@p st.shared.u32 [%1], %1;\nwgmma.wait_group.sync.aligned %0;\n}" ::"n"(
          kPending),
      "r"(__float_as_uint(x))
      : "memory");
}

// Keep reads of accumulators after the wait for them. The compiler does not see
// that the wait is for their writes.
template <int kSize>
__device__ __forceinline__ void hold(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Store four 8 x 8 matrices of 16-bit numbers. Four lanes have a row, a pair
// each. Lane l has the address of row l % 8 of matrix l / 8, which has 16
// bytes.
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t a0,
                                               uint32_t a1, uint32_t a2,
                                               uint32_t a3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
          row),
      "r"(a0), "r"(a1), "r"(a2), "r"(a3)
      : "memory");
}

// The lower half of the descriptor of an operand in shared memory. A sixteenth
// of an offset in bytes can be added to it. Addresses and offsets are multiples
// of 16 bytes.
__device__ __forceinline__ uint32_t wgmma_operand(uint32_t address,
                                                  uint32_t leading) {
  return (address >> 4 & 0x3FFF) | leading >> 4 << 16;
}

// An operand of a loop's products, in a uniform register. The compiler would
// otherwise compute the operands of all products ahead of the loop, which takes
// more registers than there are.
__device__ __forceinline__ uint32_t of_loop(uint32_t operand) {
  asm volatile("" : "+r"(operand));
  return uint32_t(uniform(int(operand)));
}

// The upper half of a descriptor. kSwizzle: 0 for none, 1 for 128 bytes.
template <int kSwizzle>
__host__ __device__ constexpr uint32_t wgmma_layout(uint32_t stride) {
  return stride >> 4 | kSwizzle << 30;
}

__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t operand,
                                                     uint32_t layout) {
  return uint64_t(layout) << 32 | operand;
}

// f(1), f(2) and so on, below a number. Inline assembly names its operands one
// by one.
#define TURBO_TEN(f, i)                                                   \
  f(i##0) f(i##1) f(i##2) f(i##3) f(i##4) f(i##5) f(i##6) f(i##7) f(i##8) \
      f(i##9)
#define TURBO_4(f) f(1) f(2) f(3)
#define TURBO_8(f) TURBO_4(f) f(4) f(5) f(6) f(7)
#define TURBO_12(f) TURBO_8(f) f(8) f(9) f(10) f(11)
#define TURBO_16(f) TURBO_12(f) f(12) f(13) f(14) f(15)
#define TURBO_20(f) TURBO_16(f) f(16) f(17) f(18) f(19)
#define TURBO_24(f) TURBO_20(f) f(20) f(21) f(22) f(23)
#define TURBO_32(f) TURBO_24(f) f(24) f(25) f(26) f(27) f(28) f(29) f(30) f(31)
#define TURBO_64(f)                                               \
  TURBO_32(f)                                                     \
  f(32) f(33) f(34) f(35) f(36) f(37) f(38) f(39) TURBO_TEN(f, 4) \
      TURBO_TEN(f, 5) f(60) f(61) f(62) f(63)
#define TURBO_128(f)                                                         \
  TURBO_64(f)                                                                \
  f(64) f(65) f(66) f(67) f(68) f(69) TURBO_TEN(f, 7) TURBO_TEN(f, 8)        \
      TURBO_TEN(f, 9) TURBO_TEN(f, 10) TURBO_TEN(f, 11) f(120) f(121) f(122) \
          f(123) f(124) f(125) f(126) f(127)

// The template of a product, and D as its operands. A lane has `size` numbers
// of D. The product adds to D if operand `adds` is not zero.
//
// operands: the template's text after D.
#define TURBO_NAME(i) ", %" #i
#define TURBO_NUMBER(i) , "+f"(d[i])
#define TURBO_PRODUCT(columns, size, adds, operands)                   \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #adds                           \
  ", 0;\n"                                                             \
  "wgmma.mma_async.sync.aligned.m64n" #columns                         \
  "k16.f32.f16.f16 {%0" TURBO_##size(TURBO_NAME) "}, " operands ";\n}" \
      : "+f"(d[0])TURBO_##size(TURBO_NUMBER)

// Products with so many columns. i to o are the numbers of operands after D.
//
// wgmma_registers: D = A B, or D += A B. A is in registers. B is contiguous
//   along its depth, or with kByColumns along its columns.
// wgmma_deep: the same with A in shared memory. A is contiguous along its
//   depth, or with kByRows along its rows.
#define TURBO_WGMMA(columns, size, i, j, k, l, m, n, o)                       \
  template <int kByColumns = 0>                                               \
  __device__ __forceinline__ void wgmma_registers(                            \
      float (&d)[size], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,   \
      uint64_t b, int adds) {                                                 \
    asm volatile(TURBO_PRODUCT(columns, size, n,                              \
                               "{%" #i ", %" #j ", %" #k ", %" #l "}, %" #m   \
                               ", p, 1, 1, %" #o)                             \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(adds),     \
                   "n"(kByColumns));                                          \
  }                                                                           \
  template <int kByRows = 0, int kByColumns = kByRows>                        \
  __device__ __forceinline__ void wgmma_deep(float (&d)[size], uint64_t a,    \
                                             uint64_t b, int adds) {          \
    asm volatile(TURBO_PRODUCT(columns, size, k,                              \
                               "%" #i ", %" #j ", p, 1, 1, %" #l ", %" #m)    \
                 : "l"(a), "l"(b), "r"(adds), "n"(kByRows), "n"(kByColumns)); \
  }
TURBO_WGMMA(8, 4, 4, 5, 6, 7, 8, 9, 10)
TURBO_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
TURBO_WGMMA(24, 12, 12, 13, 14, 15, 16, 17, 18)
TURBO_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
TURBO_WGMMA(40, 20, 20, 21, 22, 23, 24, 25, 26)
TURBO_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
TURBO_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
TURBO_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
TURBO_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

// D += A B. A is in registers, and B is contiguous along its columns.
template <int kSize>
__device__ __forceinline__ void wgmma_by_columns(float (&d)[kSize], uint32_t a0,
                                                 uint32_t a1, uint32_t a2,
                                                 uint32_t a3, uint64_t b) {
  wgmma_registers<1>(d, a0, a1, a2, a3, b, 1);
}

// D += A B. A is contiguous along its rows, and B along its columns.
template <int kSize>
__device__ __forceinline__ void wgmma_shared(float (&d)[kSize], uint64_t a,
                                             uint64_t b) {
  wgmma_deep<1>(d, a, b, 1);
}

}  // namespace turbo
