// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The interface between the parts of the emulator. Kernels do not see it.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "emulator/machine.h"

namespace emulator {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;

// Bytes that are to be copied to shared memory.
struct Copy {
  uint8_t* target;
  const uint8_t* source;
  size_t bytes;
};

struct Thread {
  enum class State { kReady, kWaits, kEnded };

  jmp_buf context;
  bool has_begun = false;
  State state = State::kReady;
  const char* waits_at = "";  // the operation
  int waits_barrier = -1;     // or the barrier
  Site waits_site;
  bool predicate = false;  // of the last barrier
  // Whether the previous launch may still run, as far as the thread knows.
  bool may_overlap = false;
  // Groups of copies that have not been waited for, and the open one.
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open_group;
};

struct Block {
  std::vector<Thread> threads;
  int num_ended = 0;
};
extern Block block;
extern int current;  // the running thread; -1 between them
// Whether the emulator itself works on threads' memory.
extern bool is_internal;

// Wait at an address in shared memory; wake the threads that wait there.
void wait_at(const char* what, uint32_t address, const Site& site);
void wake_waiting(uint32_t address);
void begin_block_warpgroups();

uint8_t* stack_of(int thread);
// "thread 3 of block (1, 0, 0)"
std::string place_of(int thread);
std::string text_of(const Site& site);

// Accesses to memory: see memory.cc.
struct Access {
  const void* p;
  size_t bytes;
  bool writes;
  bool is_atomic = false;  // atomics do not race with each other
  bool is_copy = false;    // the end of a copy that was under way
  // Where it is in the code, as an address or as a place in the source.
  const void* pc = nullptr;
  Site site = {};
};
void begin_memory(const Launch& launch);
void begin_block_memory();
// Check an access of the running thread, before the access is done.
void check(const Access& access);
[[noreturn]] void fail(const Access& access, const std::string& message);
bool is_shared(const void* p);

// The order of accesses: see races.cc.
void begin_launch_races();
void begin_block_races();
// Let threads see each other's accesses up to now.
void join(const std::vector<int>& threads);
// The accesses that the running thread has made or seen up to now.
using Clocks = std::vector<uint32_t>;
void publish(Clocks& to);
void see(const Clocks& from);
void check_race(const Access& access, bool is_shared);
// Mark bytes that a copy is under way to. Nothing else may touch them.
void mark_copied(const void* p, size_t bytes);
// From now on, until its end, a product of the running thread's warp reads
// shared memory, and nothing may write there. The end counts as a read by the
// thread.
void begin_product_read(const Site& site, const void* p, size_t bytes);
void end_product_read(const void* p, size_t bytes);
// Check the bytes of the running thread's pending write: see races.cc.
void settle();

}  // namespace emulator
