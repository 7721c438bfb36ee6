// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The emulated GPU: threads of a block are fibers that run by turns, and give
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

// Of the running thread. Each switch sets them.
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
  // Whether it may begin before the launch before it has ended.
  bool overlaps;
  // What each thread does.
  void (*body)(void* kernel, const void* params);
  void* kernel;
  const void* params;
  size_t params_bytes;
};

// Run all blocks, one after the other. Returns what went wrong; empty: nothing.
std::string run(const Launch& launch);

// End the launch with an error, of the running thread's.
[[noreturn]] void fail(const std::string& message);
[[noreturn]] void fail(const Site& site, const std::string& message);

// An operation that lanes of a warp do together. Each waits for all lanes of
// the mask, and the last to come completes it for all.
//
// name: all are to be at the same operation, in the same line.
// operand: the lane's own, with room for its result.
// complete: given the operands by lane, null where a lane is not in the mask.
using Complete = void (*)(void* const (&operands)[kWarpSize]);
void together(const char* name, const Site& site, uint32_t mask, void* operand,
              Complete complete);
// The same, after which lanes see each other's writes.
void sync_warp(const Site& site, uint32_t mask);

// Wait for `count` threads of the block at a barrier, or for all that have not
// ended, if it is zero. Returns whether the predicate held for any.
bool sync_block(const Site& site, unsigned barrier, unsigned count,
                bool predicate = false);

// Arrive there without waiting.
void arrive_block(const Site& site, unsigned barrier, unsigned count);

// A variable in shared memory, of which a block has one.
struct SharedSlot {
  const char* name;
  uint64_t launch = 0;  // for which it has its place
  uint8_t* place = nullptr;
};
void* shared_storage(SharedSlot& slot, size_t bytes, size_t alignment);
uint8_t* dynamic_shared();
// Addresses in shared memory have 32 bits.
uint32_t shared_address(const void* p);
// Of so many bytes, which there have to be.
uint8_t* shared_pointer(const Site& site, uint32_t address, size_t bytes);

// Copies that come some time before they are waited for: not before.
void copy_async(const Site& site, uint32_t target, const void* source,
                size_t bytes);
void commit_copies();
void wait_copies(int pending);

// Let the next launch begin; wait for the one before.
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
