// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Threads as fibers: their turns, and their waits for each other.
#include "emulator/machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "state.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Block block;
int current = -1;
bool is_internal = false;

namespace {

// Lanes of a warp that gather for an operation.
struct Gathering {
  const char* name;
  Site site;
  uint32_t mask, arrived = 0;
  void* operands[kWarpSize];
};

struct Barrier {
  unsigned count = 0;
  bool predicate = false;
  std::vector<int> arrived;
};

std::vector<Gathering> gatherings;
std::map<unsigned, Barrier> barriers;
const Launch* launched;
jmp_buf scheduler;
std::string error;

uint8_t* stacks() {
  static auto* memory = static_cast<uint8_t*>(
      mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return memory;
}

// Switch to the scheduler. The thread goes on here later.
void give_way() {
  settle();
  if (_setjmp(block.threads[current].context) == 0) _longjmp(scheduler, 1);
}

void wait_for(const char* what, int barrier, const Site& site) {
  Thread& self = block.threads[current];
  self.state = Thread::State::kWaits;
  self.waits_at = what, self.waits_barrier = barrier, self.waits_site = site;
  give_way();
}

std::string describe_wait(const Thread& thread) {
  return std::string("waits at ") + thread.waits_at +
         (thread.waits_barrier < 0 ? ""
                                   : std::to_string(thread.waits_barrier)) +
         " (" + text_of(thread.waits_site) + ")";
}

void wake(int thread) { block.threads[thread].state = Thread::State::kReady; }

// Let the threads at a barrier go on, if all are there.
void pass_if_complete(unsigned id) {
  Barrier& barrier = barriers[id];
  const size_t wanted = barrier.count != 0
                            ? barrier.count
                            : block.threads.size() - block.num_ended;
  if (barrier.arrived.empty() || barrier.arrived.size() < wanted) return;
  const Barrier passed = std::move(barrier);
  barriers.erase(id);
  join(passed.arrived);
  for (const int thread : passed.arrived) {
    Thread& other = block.threads[thread];
    // Other threads arrived and went on, or wait elsewhere.
    const bool waits = thread != current && other.waits_barrier == int(id) &&
                       other.state == Thread::State::kWaits;
    if (waits || thread == current) other.predicate = passed.predicate;
    if (waits) wake(thread);
  }
}

void thread_main() {
  launched->body(launched->kernel, launched->params);
  settle();
  if (block.threads[current].may_overlap)
    fail("ends without having waited for the kernel before it");
  block.threads[current].state = Thread::State::kEnded;
  ++block.num_ended;
  pass_if_complete(0);
  _longjmp(scheduler, 1);
}

// Start or resume the current thread, until it gives way.
void run_current() {
  Thread& thread = block.threads[current];
  threadIdx.x = unsigned(current) % launched->block.x;
  threadIdx.y = unsigned(current) / launched->block.x;
  if (_setjmp(scheduler) != 0) return;
  if (thread.has_begun) _longjmp(thread.context, 1);
  thread.has_begun = true;
  thread.may_overlap = launched->overlaps;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack_of(current);
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, thread_main, 0);
  setcontext(&context);
}

std::string describe_stop() {
  std::string text = "no thread can go on:";
  std::string before;
  int shown = 0;
  for (size_t i = 0; i < block.threads.size(); ++i) {
    const Thread& thread = block.threads[i];
    if (thread.state != Thread::State::kWaits) continue;
    const std::string wait = describe_wait(thread);
    if (wait == before || ++shown > 8) continue;
    text += "\n  " + place_of(int(i)) + " " + wait;
    before = wait;
  }
  if (block.num_ended > 0)
    text += "\n  " + std::to_string(block.num_ended) + " threads have ended";
  return text;
}

void run_block() {
  const dim3& size = launched->block;
  block.threads.clear();
  block.threads.resize(size.x * size.y * size.z);
  block.num_ended = 0;
  gatherings.assign((block.threads.size() + kWarpSize - 1) / kWarpSize, {});
  barriers.clear();
  begin_block_memory();
  begin_block_races();
  begin_block_warpgroups();
  const int count = int(block.threads.size());
  while (block.num_ended < count) {
    bool moves = false;
    for (int i = 0; i < count; ++i) {
      if (block.threads[i].state != Thread::State::kReady) continue;
      moves = true;
      current = i;
      run_current();
      current = -1;
      if (!error.empty()) return;
    }
    if (!moves) {
      error = describe_stop();
      return;
    }
  }
}

}  // namespace

uint8_t* stack_of(int thread) { return stacks() + thread * kStackBytes; }

std::string place_of(int thread) {
  const uint3& b = blockIdx;
  return "thread " + std::to_string(thread) + " of block (" +
         std::to_string(b.x) + ", " + std::to_string(b.y) + ", " +
         std::to_string(b.z) + ")";
}

std::string text_of(const Site& site) {
  return std::string(site.file_name()) + ":" + std::to_string(site.line());
}

void fail(const std::string& message) {
  is_internal = false;
  error = place_of(current) + ": " + message;
  _longjmp(scheduler, 1);
}

void fail(const Site& site, const std::string& message) {
  fail(message + " (" + text_of(site) + ")");
}

std::string run(const Launch& launch) {
  launched = &launch;
  error.clear();
  blockDim = launch.block;
  gridDim = launch.grid;
  threadIdx = {};
  begin_memory(launch);
  begin_launch_races();
  for (unsigned z = 0; z < launch.grid.z; ++z) {
    for (unsigned y = 0; y < launch.grid.y; ++y) {
      for (unsigned x = 0; x < launch.grid.x && error.empty(); ++x) {
        blockIdx = {x, y, z};
        run_block();
      }
    }
  }
  return error;
}

void together(const char* name, const Site& site, uint32_t mask, void* operand,
              Complete complete) {
  const int lane = current % kWarpSize;
  const int first = current - lane;
  Gathering& own = gatherings[current / kWarpSize];
  const int size = std::min<int>(kWarpSize, int(block.threads.size()) - first);
  const uint32_t there = size == kWarpSize ? kAllLanes : (1u << size) - 1u;
  if ((mask >> lane & 1u) == 0)
    fail(site, std::string(name) + " with a mask without the lane itself");
  if (own.arrived == 0) {
    own.name = name, own.site = site, own.mask = mask;
    std::fill(std::begin(own.operands), std::end(own.operands), nullptr);
  } else if (std::strcmp(own.name, name) != 0 || own.mask != mask ||
             own.site.line() != site.line() ||
             std::strcmp(own.site.file_name(), site.file_name()) != 0) {
    fail(site, std::string("lanes of a warp differ: this one is at ") + name +
                   ", others are at " + own.name + " (" + text_of(own.site) +
                   ")");
  }
  own.operands[lane] = operand;
  own.arrived |= 1u << lane;
  if (own.arrived != (mask & there)) {
    wait_for(name, -1, site);
    return;
  }
  own.arrived = 0;
  is_internal = true;
  complete(own.operands);
  is_internal = false;
  for (int i = 0; i < size; ++i) {
    if (own.operands[i] != nullptr) wake(first + i);
  }
}

void sync_warp(const Site& site, uint32_t mask) {
  int thread = current;
  together("syncwarp", site, mask, &thread,
           [](void* const(&operands)[kWarpSize]) {
             std::vector<int> threads;
             for (void* operand : operands) {
               if (operand) threads.push_back(*static_cast<int*>(operand));
             }
             join(threads);
           });
}

namespace {

// Arrive at a barrier. Returns whether this thread was the last to come.
bool arrive_at(const Site& site, unsigned id, unsigned count, bool predicate) {
  if (count % kWarpSize != 0 || count > block.threads.size() || id > 15)
    fail(site, "no such barrier: " + std::to_string(id) + " of " +
                   std::to_string(count) + " threads");
  Barrier& barrier = barriers[id];
  if (barrier.arrived.empty()) {
    barrier.count = count;
  } else if (barrier.count != count) {
    fail(site, "others wait at barrier " + std::to_string(id) + " for " +
                   std::to_string(barrier.count) + " threads, this one for " +
                   std::to_string(count));
  }
  barrier.arrived.push_back(current);
  barrier.predicate |= predicate;
  pass_if_complete(id);
  return !barriers.contains(id) || barriers[id].arrived.empty();
}

}  // namespace

bool sync_block(const Site& site, unsigned id, unsigned count, bool predicate) {
  if (!arrive_at(site, id, count, predicate))
    wait_for("barrier ", int(id), site);
  return block.threads[current].predicate;
}

void arrive_block(const Site& site, unsigned id, unsigned count) {
  arrive_at(site, id, count, false);
}

void wait_at(const char* what, uint32_t address, const Site& site) {
  wait_for(what, int(address), site);
}

void wake_waiting(uint32_t address) {
  for (Thread& thread : block.threads) {
    if (thread.state == Thread::State::kWaits &&
        thread.waits_barrier == int(address))
      thread.state = Thread::State::kReady;
  }
}

void start_dependents() {}
void wait_for_prerequisites() { block.threads[current].may_overlap = false; }

}  // namespace emulator
