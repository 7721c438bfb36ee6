// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The emulated GPU. Threads of a block are fibers that run by turns, and give
// way only where they wait for each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)
      : x(x), y(y), z(z) {}
};

// Indices of the running thread, and sizes. Each switch sets them.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

using Site = std::source_location;

// A launch of one kernel.
struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  // Whether it may begin before the previous launch has ended.
  bool overlaps;
  // The function that each thread runs.
  void (*body)(void* kernel, const void* params);
  void* kernel;
  const void* params;
  size_t params_bytes;
};

// Run all blocks, one after the other. Returns an error, or an empty string.
std::string run(const Launch& launch);

// End the launch with an error of the running thread.
[[noreturn]] void fail(const std::string& message);
[[noreturn]] void fail(const Site& site, const std::string& message);

// An operation that lanes of a warp do together. Each waits for all lanes of
// the mask, and the last to come completes it for all.
//
// name: the operation. All lanes have to be at the same one, in the same line.
// operand: the lane's own, with room for its result.
// complete: is called with the operands by lane, null for lanes that are not in
//   the mask.
using Complete = void (*)(void* const (&operands)[kWarpSize]);
void together(const char* name, const Site& site, uint32_t mask, void* operand,
              Complete complete);
// Bring lanes together. They see each other's writes afterwards.
void sync_warp(const Site& site, uint32_t mask);

// Wait for `count` threads of the block at a barrier, or for all that have not
// ended, if it is zero. Returns whether the predicate held for any.
bool sync_block(const Site& site, unsigned barrier, unsigned count,
                bool predicate = false);

// Arrive at a barrier without waiting.
void arrive_block(const Site& site, unsigned barrier, unsigned count);

// A variable in shared memory. A block has one.
struct SharedSlot {
  const char* name;
  uint64_t launch = 0;  // the launch for which it has its place
  uint8_t* place = nullptr;
};
void* shared_storage(SharedSlot& slot, size_t bytes, size_t alignment);
uint8_t* dynamic_shared();
// Addresses in shared memory have 32 bits.
uint32_t shared_address(const void* p);
// The pointer to so many bytes, which have to be in shared memory.
uint8_t* shared_pointer(const Site& site, uint32_t address, size_t bytes);

// Copies that arrive when they are waited for, and not before.
void copy_async(const Site& site, uint32_t target, const void* source,
                size_t bytes);
void commit_copies();
void wait_copies(int pending);

// Let the next launch begin; wait for the previous one.
void start_dependents();
void wait_for_prerequisites();

// T: may be an array.
template <typename T>
struct SharedVariable {
  SharedSlot slot;
  T& get() {
    return *static_cast<T*>(shared_storage(slot, sizeof(T), alignof(T)));
  }
};

}  // namespace emulator
