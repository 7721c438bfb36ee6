// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Barriers in shared memory, bulk copies and products of warpgroups.
#include "emulator/warpgroup.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "emulator/numbers.h"
#include "state.h"

namespace emulator {
namespace {

struct SharedBarrier {
  int arrivals, pending;
  int64_t bytes = 0;
  int phase = 0;
  Clocks arrived = {}, passed = {};  // of this phase, and of the one before
};
std::map<uint32_t, SharedBarrier> shared_barriers;

// A warp's part of a product, by lanes.
struct WarpProduct {
  GroupProduct lanes[kWarpSize];
};
struct WarpProducts {
  std::vector<std::vector<WarpProduct>> groups;
  std::vector<WarpProduct> open_group;
};
std::vector<WarpProducts> warp_products;

SharedBarrier& barrier_at(const Site& site, uint32_t address) {
  const auto found = shared_barriers.find(address);
  if (found == shared_barriers.end()) fail(site, "no barrier was made there");
  return found->second;
}

void end_phase_if_complete(uint32_t address) {
  SharedBarrier& barrier = shared_barriers[address];
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  barrier.phase ^= 1;
  barrier.passed = std::move(barrier.arrived);
  barrier.arrived.clear();
  wake_waiting(address);
}

uint32_t address_of(uint64_t descriptor) {
  return uint32_t(descriptor & 0x3FFF) << 4;
}
uint32_t leading_of(uint64_t descriptor) {
  return uint32_t(descriptor >> 16 & 0x3FFF) << 4;
}
uint32_t stride_of(uint64_t descriptor) {
  return uint32_t(descriptor >> 32 & 0x3FFF) << 4;
}
bool is_swizzled(uint64_t descriptor) { return descriptor >> 62 == 1; }

// Neighbouring numbers of an operand.
constexpr int kChunkBytes = 16, kChunkNumbers = 8;
constexpr int kDepth = 16;

double half_at(const Site& site, uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, shared_pointer(site, address, 2), 2);
  return half_to_float(bits);
}

// The place in an operand whose rows have 128 bytes of the depth, in swizzled
// chunks of 16 bytes.
uint32_t deep_place(uint64_t descriptor, int row, int k) {
  const uint32_t place = address_of(descriptor) +
                         row / 8 * stride_of(descriptor) + row % 8 * 128 +
                         k * 2;
  return place ^ (place >> 7 & 7) << 4;
}

// The place in A, in shared memory. If A is not contiguous in depth, its rows
// are: 64 of them take 128 bytes, in swizzled chunks of 16 bytes.
uint32_t a_place(const Site& site, const GroupProduct& product, int row,
                 int k) {
  const uint64_t descriptor = product.a_descriptor;
  if (!is_swizzled(descriptor)) fail(site, "A is not swizzled by 128 bytes");
  if (product.a_is_deep) return deep_place(descriptor, row, k);
  const uint32_t place = address_of(descriptor) +
                         k / 8 * stride_of(descriptor) + k % 8 * 128 + row * 2;
  return place ^ (place >> 7 & 7) << 4;
}

// The place in B, which may have core matrices of 8 times 16 bytes. The leading
// offset is along the depth, in layouts that were tried on a GPU. If B is
// swizzled and its columns are contiguous, 64 of them take 128 bytes, and the
// leading offset is between such blocks.
uint32_t b_place(const Site& site, const GroupProduct& product, int k,
                 int column) {
  const uint64_t descriptor = product.b_descriptor;
  if (is_swizzled(descriptor)) {
    if (product.b_is_deep) return deep_place(descriptor, column, k);
    const uint32_t place =
        address_of(descriptor) + column / 64 * leading_of(descriptor) +
        k / 8 * stride_of(descriptor) + k % 8 * 128 + column % 64 * 2;
    return place ^ (place >> 7 & 7) << 4;
  }
  const int inner = product.b_is_deep ? column % 8 * 16 + k % 8 * 2
                                      : k % 8 * 16 + column % 8 * 2;
  return address_of(descriptor) + inner + k / 8 * leading_of(descriptor) +
         column / 8 * stride_of(descriptor);
}

// Call `visit` with each chunk that a warpgroup reads of the operands in shared
// memory. It is not documented which warp reads which rows of A, so all warps
// read all rows.
template <typename F>
void for_each_chunk(const Site& site, const GroupProduct& product,
                    const F& visit) {
  const auto for_operand = [&](bool is_deep, int size, const auto& place) {
    const int across = is_deep ? 1 : kChunkNumbers;
    const int along = is_deep ? kChunkNumbers : 1;
    for (int k = 0; k < kDepth; k += along) {
      for (int i = 0; i < size; i += across)
        visit(shared_pointer(site, place(i, k), kChunkBytes));
    }
  };
  if (!product.a_in_registers) {
    for_operand(product.a_is_deep, 64,
                [&](int row, int k) { return a_place(site, product, row, k); });
  }
  for_operand(
      product.b_is_deep, 2 * product.num_numbers,
      [&](int column, int k) { return b_place(site, product, k, column); });
}

// Attributes accesses of a whole warp to its first lane.
struct AsFirstLane {
  const int before = current;
  AsFirstLane() { current -= current % kWarpSize; }
  ~AsFirstLane() { current = before; }
};

void multiply(const Site& site, const WarpProduct& product, int warp) {
  const GroupProduct& any = product.lanes[0];
  double a[16][kDepth];
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      if (any.a_in_registers) {
        const uint32_t word =
            product.lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
        a[row][k] = half_to_float(uint16_t(word >> (k % 2 * 16)));
      } else {
        a[row][k] = half_at(site, a_place(site, any, 16 * warp + row, k));
      }
    }
  }
  for (int column = 0; column < 2 * any.num_numbers; ++column) {
    double b[kDepth];
    for (int k = 0; k < kDepth; ++k)
      b[k] = half_at(site, b_place(site, any, k, column));
    for (int row = 0; row < 16; ++row) {
      float& d = *product.lanes[row % 8 * 4 + column % 8 / 2]
                      .d[column / 8 * 4 + row / 8 * 2 + column % 2];
      double sum = any.adds ? d : 0.0;
      for (int k = 0; k < kDepth; ++k) sum += a[row][k] * b[k];
      d = float(sum);
    }
  }
  const AsFirstLane first_lane;
  for_each_chunk(site, any,
                 [](const uint8_t* p) { end_product_read(p, kChunkBytes); });
}

WarpProducts& own_products() { return warp_products[current / kWarpSize]; }

struct Wait {
  const Site* site;
  int pending;
};

// Check the access to a row of a matrix, whose address a lane has.
void check_row(const Site& site, int lane, const void* row, bool writes) {
  const int before = current;
  current += lane - current % kWarpSize;
  check({.p = row, .bytes = kChunkBytes, .writes = writes, .site = site});
  current = before;
}

}  // namespace

void begin_block_warpgroups() {
  shared_barriers.clear();
  warp_products.assign((block.threads.size() + kWarpSize - 1) / kWarpSize, {});
}

void init_barrier(const Site& site, uint32_t address, int arrivals) {
  shared_pointer(site, address, 8);
  shared_barriers[address] = {arrivals, arrivals};
}

void expect_bytes(const Site& site, uint32_t address, int bytes) {
  SharedBarrier& barrier = barrier_at(site, address);
  if (barrier.pending == 0)
    fail(site, "more threads arrive than the barrier counts");
  --barrier.pending;
  barrier.bytes += bytes;
  publish(barrier.arrived);
  end_phase_if_complete(address);
}

void wait_barrier(const Site& site, uint32_t address, int parity) {
  while (barrier_at(site, address).phase == parity)
    wait_at("barrier in shared memory ", address, site);
  see(barrier_at(site, address).passed);
}

void read_bulk(const Site& site, const void* source, int bytes) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0)
    fail(site, "copies what is no multiple of 16 bytes");
  for (int i = 0; i < bytes; i += 16) {
    check({.p = static_cast<const uint8_t*>(source) + i,
           .bytes = 16,
           .writes = false});
  }
}

void copy_bulk(const Site& site, uint32_t target, const void* source, int bytes,
               uint32_t barrier) {
  read_bulk(site, source, bytes);
  uint8_t* place = shared_pointer(site, target, 16);
  std::memcpy(place, source, bytes);
  barrier_at(site, barrier).bytes -= bytes;
  end_phase_if_complete(barrier);
}

void multiply_group(const Site& site, GroupProduct& product) {
  struct Own {
    const Site* site;
    GroupProduct* product;
  } own = {&site, &product};
  together("wgmma", site, kAllLanes, &own,
           [](void* const(&operands)[kWarpSize]) {
             WarpProduct all;
             for (int lane = 0; lane < kWarpSize; ++lane)
               all.lanes[lane] = *static_cast<Own*>(operands[lane])->product;
             own_products().open_group.push_back(all);
             const Site& site = *static_cast<Own*>(operands[0])->site;
             const AsFirstLane first_lane;
             for_each_chunk(site, all.lanes[0], [&](const uint8_t* p) {
               begin_product_read(site, p, kChunkBytes);
             });
           });
}

void commit_products() {
  if (current % kWarpSize != 0) return;
  WarpProducts& own = own_products();
  own.groups.push_back(std::move(own.open_group));
  own.open_group.clear();
}

void wait_products(const Site& site, int pending) {
  Wait wait = {&site, pending};
  together("wgmma.wait", site, kAllLanes, &wait,
           [](void* const(&operands)[kWarpSize]) {
             const Wait& wait = *static_cast<Wait*>(operands[0]);
             auto& groups = own_products().groups;
             while (int(groups.size()) > wait.pending) {
               for (const WarpProduct& product : groups.front())
                 multiply(*wait.site, product, current / kWarpSize % 4);
               groups.erase(groups.begin());
             }
           });
}

namespace ptx {

void store_matrices(void* const (&lanes)[kWarpSize]) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int row = 0; row < 8; ++row) {
      const int lane = 8 * matrix + row;
      const auto& own = *static_cast<StoredMatrices*>(lanes[lane]);
      check_row(*own.site, lane, own.row, true);
      for (int t = 0; t < 4; ++t) {
        std::memcpy(
            own.row + 4 * t,
            &static_cast<StoredMatrices*>(lanes[4 * row + t])->a[matrix], 4);
      }
    }
  }
}

void load_matrices(void* const (&lanes)[kWarpSize]) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int row = 0; row < 8; ++row) {
      const int lane = 8 * matrix + row;
      const auto& own = *static_cast<LoadedMatrices*>(lanes[lane]);
      check_row(*own.site, lane, own.row, false);
      const auto* from = static_cast<const uint8_t*>(own.row);
      for (int t = 0; t < 4; ++t) {
        std::memcpy(
            &static_cast<LoadedMatrices*>(lanes[4 * row + t])->x[matrix],
            from + 4 * t, 4);
      }
    }
  }
}

}  // namespace ptx
}  // namespace emulator
