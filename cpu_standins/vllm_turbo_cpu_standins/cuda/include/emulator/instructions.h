// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The functions that inline assembly is translated to: see translate.py.
// Outputs come first, then inputs, in the order of the statement.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator/collectives.h"
#include "emulator/machine.h"
#include "emulator/numbers.h"
#include "emulator/warpgroup.h"

namespace emulator::ptx {

inline void copy_async_16(const Site& site, uint32_t target,
                          const void* source) {
  copy_async(site, target, source, 16);
}

inline void copy_async_16_if(const Site& site, uint32_t target,
                             const void* source, int condition,
                             int target_distance, int source_distance) {
  if (!condition) return;
  copy_async(site, target + target_distance,
             static_cast<const char*>(source) + source_distance, 16);
}

inline void commit_group(const Site&) { commit_copies(); }

inline void wait_group(const Site&, int pending) { wait_copies(pending); }

inline void launch_dependents(const Site&) { start_dependents(); }

inline void wait(const Site&) { wait_for_prerequisites(); }

inline void bar_sync(const Site& site, unsigned barrier, unsigned count) {
  sync_block(site, barrier, count);
}

inline void and_or(const Site&, uint32_t& d, uint32_t a, uint32_t b,
                   uint32_t c) {
  d = (a & b) | c;
}

inline void select(const Site&, uint32_t& d, uint32_t mask, uint32_t a,
                   uint32_t b) {
  d = (mask & a) | (~mask & b);
}

inline void mad_lo(const Site&, uint32_t& d, uint32_t a, uint32_t b,
                   uint32_t c) {
  d = a * b + c;
}

inline void permute(const Site&, uint32_t& d, uint32_t a, uint32_t b,
                    uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 0xFu;
    uint32_t byte = both >> (8 * (nibble & 7u)) & 0xFFu;
    if (nibble & 8u) byte = byte & 0x80u ? 0xFFu : 0u;
    d |= byte << (8 * i);
  }
}

inline void exp2_approx(const Site&, float& d, float x) {
  d = flushed(std::exp2(flushed(x)));
}

inline void reciprocal_approx(const Site&, float& d, float x) {
  d = flushed(1.0f / flushed(x));
}

inline void saturated_square(const Site&, float& d, float x) {
  d = saturated(x * x);
}

inline void saturated_multiply_add(const Site&, float& d, float a, float b,
                                   float c) {
  d = saturated(std::fma(a, b, c));
}

inline void add_one_if_greater(const Site&, int& x, float a, float b) {
  if (a > b) x += 1;
}

template <typename T>
void add_if_greater(const Site&, T& x, float a, float b, int y) {
  if (a > b) x = T(uint32_t(x) + uint32_t(y));
}

inline void subtract_if_greater(const Site&, int& x, float a, float b, int y) {
  if (a > b) x = int(uint32_t(x) - uint32_t(y));
}

// Loads of numbers side by side in shared memory.

inline void load_shared_1(const Site& site, float& x, uint32_t address) {
  std::memcpy(&x, shared_pointer(site, address, 4), 4);
}

inline void load_shared_2(const Site& site, float& x, float& y,
                          uint32_t address) {
  const auto* p =
      reinterpret_cast<const float*>(shared_pointer(site, address, 8));
  x = p[0], y = p[1];
}

inline void load_shared_4(const Site& site, float& x, float& y, float& z,
                          float& w, uint32_t address) {
  const auto* p =
      reinterpret_cast<const float*>(shared_pointer(site, address, 16));
  x = p[0], y = p[1], z = p[2], w = p[3];
}

inline void load_4_if(const Site&, float& x, float& y, float& z, float& w,
                      int condition, const float* p) {
  x = y = z = w = 0.0f;
  if (condition != 0) x = p[0], y = p[1], z = p[2], w = p[3];
}

// A lane's numbers of the operands of a matrix product.
template <typename T>
struct Product {
  T d[4];
  uint32_t a[4], b[2];
};

void multiply_s8(void* const (&lanes)[kWarpSize]);
void multiply_f16(void* const (&lanes)[kWarpSize]);
void multiply_bf16(void* const (&lanes)[kWarpSize]);
void transpose(void* const (&lanes)[kWarpSize]);

template <typename T>
void mma(const char* name, const Site& site, Complete complete, T& d0, T& d1,
         T& d2, T& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
         uint32_t b0, uint32_t b1) {
  Product<T> own = {{d0, d1, d2, d3}, {a0, a1, a2, a3}, {b0, b1}};
  together(name, site, kAllLanes, &own, complete);
  d0 = own.d[0], d1 = own.d[1], d2 = own.d[2], d3 = own.d[3];
}

template <typename... Operands>
void mma_s8(const Site& site, int& d0, int& d1, int& d2, int& d3,
            Operands... ab) {
  mma("mma.s8", site, multiply_s8, d0, d1, d2, d3, ab...);
}

inline void mma_s8_from(const Site& site, int& d0, int& d1, int& d2, int& d3,
                        uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                        uint32_t b0, uint32_t b1, int c) {
  d0 = d1 = d2 = d3 = c;
  mma_s8(site, d0, d1, d2, d3, a0, a1, a2, a3, b0, b1);
}

template <typename... Operands>
void mma_f16(const Site& site, float& d0, float& d1, float& d2, float& d3,
             Operands... ab) {
  mma("mma.f16", site, multiply_f16, d0, d1, d2, d3, ab...);
}

template <typename... Operands>
void mma_bf16(const Site& site, float& d0, float& d1, float& d2, float& d3,
              Operands... ab) {
  mma("mma.bf16", site, multiply_bf16, d0, d1, d2, d3, ab...);
}

inline void movmatrix(const Site& site, uint32_t& d, uint32_t x) {
  together("movmatrix", site, kAllLanes, &x, transpose);
  d = x;
}

}  // namespace emulator::ptx
