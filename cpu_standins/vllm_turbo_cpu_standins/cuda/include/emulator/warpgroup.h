// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Hopper's own instructions: barriers in shared memory, bulk copies that
// complete on them, and matrix products of four warps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulator/machine.h"

namespace emulator {

void init_barrier(const Site& site, uint32_t address, int arrivals);
// Arrive at a barrier, whose phase also waits for so many more bytes.
void expect_bytes(const Site& site, uint32_t address, int bytes);
// Wait for the end of the phase of a parity.
void wait_barrier(const Site& site, uint32_t address, int parity);
// Check what a bulk copy or prefetch reads.
void read_bulk(const Site& site, const void* source, int bytes);
void copy_bulk(const Site& site, uint32_t target, const void* source, int bytes,
               uint32_t barrier);

// A lane's part of a product: numbers of D, and of A if that is in registers.
// Products are computed when they are waited for.
struct GroupProduct {
  static constexpr int kMaxNumbers = 128;
  float* d[kMaxNumbers];
  int num_numbers;
  bool a_in_registers;
  bool a_is_deep, b_is_deep;  // whether they are contiguous in depth
  bool adds;
  uint32_t a[4];
  uint64_t a_descriptor, b_descriptor;
};
void multiply_group(const Site& site, GroupProduct& product);
void commit_products();
void wait_products(const Site& site, int pending);

namespace ptx {

inline void nothing(const Site&) {}
template <typename T>
void nothing(const Site&, const T&) {}

inline void mbarrier_init(const Site& site, uint32_t address, int arrivals) {
  init_barrier(site, address, arrivals);
}

inline void mbarrier_expect(const Site& site, uint32_t address, int bytes) {
  expect_bytes(site, address, bytes);
}

inline void mbarrier_arrive(const Site& site, uint32_t address) {
  expect_bytes(site, address, 0);
}

inline void mbarrier_wait(const Site& site, uint32_t address, int parity) {
  wait_barrier(site, address, parity);
}

inline void bulk_copy(const Site& site, uint32_t target, const void* source,
                      int bytes, uint32_t barrier) {
  copy_bulk(site, target, source, bytes, barrier);
}

inline void bulk_prefetch(const Site& site, const void* source, int bytes) {
  read_bulk(site, source, bytes);
}

inline void bar_arrive(const Site& site, unsigned barrier, unsigned count) {
  arrive_block(site, barrier, count);
}

inline void bar_or(const Site& site, int& result, unsigned barrier,
                   unsigned count, int predicate) {
  result = sync_block(site, barrier, count, predicate != 0);
}

struct StoredMatrices {
  const Site* site;
  uint8_t* row;
  uint32_t a[4];
};
void store_matrices(void* const (&lanes)[kWarpSize]);

inline void stmatrix(const Site& site, uint32_t row, uint32_t a0, uint32_t a1,
                     uint32_t a2, uint32_t a3) {
  StoredMatrices own = {&site, shared_pointer(site, row, 16), {a0, a1, a2, a3}};
  together("stmatrix", site, kAllLanes, &own, store_matrices);
}

struct LoadedMatrices {
  const Site* site;
  const void* row;  // 16 bytes
  uint32_t x[4];
};
void load_matrices(void* const (&lanes)[kWarpSize]);

inline void ldmatrix(const Site& site, uint32_t& x0, uint32_t& x1, uint32_t& x2,
                     uint32_t& x3, uint32_t row) {
  LoadedMatrices own = {&site, shared_pointer(site, row, 16), {}};
  together("ldmatrix", site, kAllLanes, &own, load_matrices);
  x0 = own.x[0], x1 = own.x[1], x2 = own.x[2], x3 = own.x[3];
}

inline void wgmma_commit(const Site&) { commit_products(); }

inline void wgmma_wait(const Site& site, int pending) {
  wait_products(site, pending);
}

inline void wgmma_wait_after(const Site& site, int pending, uint32_t) {
  wait_products(site, pending);
}

// A product without its A. Operands are the numbers of D, A, from `rest` on B
// and whether the product adds, and at last whether B's columns are contiguous.
template <int kNumbers>
GroupProduct product_of(const void* const* all, int rest, int num_operands) {
  GroupProduct own = {.num_numbers = kNumbers};
  for (int i = 0; i < kNumbers; ++i)
    own.d[i] = static_cast<float*>(const_cast<void*>(all[i]));
  own.b_descriptor = *static_cast<const uint64_t*>(all[rest]);
  own.adds = *static_cast<const int*>(all[rest + 1]) != 0;
  own.b_is_deep = *static_cast<const int*>(all[num_operands - 1]) == 0;
  return own;
}

template <int kNumbers, typename... Operands>
void wgmma_registers(const Site& site, Operands&&... operands) {
  const void* all[] = {&operands...};
  GroupProduct own =
      product_of<kNumbers>(all, kNumbers + 4, sizeof...(operands));
  own.a_in_registers = true;
  for (int i = 0; i < 4; ++i)
    own.a[i] = *static_cast<const uint32_t*>(all[kNumbers + i]);
  multiply_group(site, own);
}

template <int kNumbers, typename... Operands>
void wgmma_deep(const Site& site, Operands&&... operands) {
  const void* all[] = {&operands...};
  GroupProduct own =
      product_of<kNumbers>(all, kNumbers + 1, sizeof...(operands));
  own.a_descriptor = *static_cast<const uint64_t*>(all[kNumbers]);
  own.a_is_deep = *static_cast<const int*>(all[kNumbers + 3]) == 0;
  multiply_group(site, own);
}

}  // namespace ptx
}  // namespace emulator
