// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the parts of the emulator know of each other. None of this is seen by
// kernels.
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
  const char* waits_at = "";  // what operation
  int waits_barrier = -1;     // or which barrier
  Site waits_site;
  bool predicate = false;  // of the last barrier
  // Whether the launch before may still run, for all that it knows.
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

// Wait for what has an address in shared memory; let those go on that do.
void wait_at(const char* what, uint32_t address, const Site& site);
void wake_waiting(uint32_t address);
void begin_block_warpgroups();

uint8_t* stack_of(int thread);
// "thread 3 of block (1, 0, 0)"
std::string place_of(int thread);
std::string text_of(const Site& site);

// What memory there is: see memory.cc.
struct Access {
  const void* p;
  size_t bytes;
  bool writes;
  bool is_atomic = false;  // such do not race with each other
  bool is_copy = false;    // the end of one that was under way
  const void* pc = nullptr;
};
void begin_memory(const Launch& launch);
void begin_block_memory();
// Of the running thread, before it is done.
void check(const Access& access);
[[noreturn]] void fail(const Access& access, const std::string& message);
bool is_shared(const void* p);

// Which accesses are in order: see races.cc.
void begin_launch_races();
void begin_block_races();
// The threads see each other's accesses up to now.
void join(const std::vector<int>& threads);
// What the running thread has seen, and done up to now, for others to see.
using Clocks = std::vector<uint32_t>;
void publish(Clocks& to);
void see(const Clocks& from);
void check_race(const Access& access, bool is_shared);
// Bytes that a copy is on its way to; nothing else may touch them.
void mark_copied(const void* p, size_t bytes);
// From now on, and until its end, a product of the running thread's warp reads
// shared memory: nothing may write there. The end is a read of the thread's.
void begin_product_read(const Site& site, const void* p, size_t bytes);
void end_product_read(const void* p, size_t bytes);
// Look at what the running thread has written since.
void settle();

}  // namespace emulator
