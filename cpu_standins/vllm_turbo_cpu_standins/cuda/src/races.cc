// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Finds accesses to the same memory that nothing orders. They are by threads of
// a block between barriers, or by two blocks. Barriers are named ones, those in
// shared memory, and __syncwarp. Shuffles and the like order nothing.
//
// A thread has a clock, which its barriers advance. It knows how far it has
// seen the clocks of others. Each two bytes of memory have the thread that
// wrote them last and those that have read them since. Accesses of single bytes
// are not checked. Products of warpgroups read their operands until they are
// waited for.
#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "state.h"

namespace emulator {
namespace {

constexpr size_t kCellBytes = 2;
constexpr size_t kPageBytes = 4096;

// The clocks at which the lanes of a warp have read a cell.
struct WarpReads {
  uint32_t clocks[kWarpSize] = {};
  int warp;
  int next;  // index, or -1
};

struct Cell {
  uint32_t write_block = 0, write_clock = 0;
  uint32_t read_block = 0;
  int reads = -1;  // by threads of read_block
  uint32_t products_block = 0;
  uint32_t products = 0;  // of products_block that read it and are not done
  uint16_t write_thread = 0;
  bool is_atomic = false;       // the write
  bool is_read_widely = false;  // by several blocks of the launch
  bool is_copied = false;
};

struct Page {
  Cell cells[kPageBytes / kCellBytes];
};

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t last_page = 0;
Page* last = nullptr;
std::vector<WarpReads> pool;
int unused = -1;  // the first of the pool; others by next
// Numbers of blocks. Nothing is known of older launches.
uint32_t block_number = 0, first_of_launch = 0;

std::vector<uint32_t> clocks;  // of threads
std::vector<uint32_t> seen;    // [thread][other]: up to this clock
uint32_t seen_by_all = 0;      // clocks below this

// A write of bytes that another thread wrote or read. It is harmless if they
// stay the same.
struct Pending {
  Access access = {};
  uint8_t before[16];
  int thread = -1;
  std::string message;
} pending;

Cell& cell_of(const uint8_t* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  const uintptr_t page = address / kPageBytes;
  if (page != last_page || last == nullptr) {
    auto& found = pages[page];
    if (found == nullptr) found = std::make_unique<Page>();
    last_page = page, last = found.get();
  }
  return last->cells[address % kPageBytes / kCellBytes];
}

bool is_seen(int thread, uint32_t clock) {
  return thread == current || clock < seen_by_all ||
         seen[current * clocks.size() + thread] >= clock;
}

// A thread whose read of the cell nothing orders before the current access; or
// -1.
int racing_reader(const Cell& cell) {
  if (cell.read_block != block_number) return -1;
  for (int i = cell.reads; i >= 0; i = pool[i].next) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const uint32_t clock = pool[i].clocks[lane];
      const int thread = pool[i].warp * kWarpSize + lane;
      if (clock != 0 && !is_seen(thread, clock)) return thread;
    }
  }
  return -1;
}

void note_read(Cell& cell) {
  if (cell.read_block != block_number) {
    cell.is_read_widely = cell.read_block >= first_of_launch;
    cell.read_block = block_number;
    cell.reads = -1;
  }
  const int warp = current / kWarpSize;
  int i = cell.reads;
  while (i >= 0 && pool[i].warp != warp) i = pool[i].next;
  if (i < 0) {
    i = unused;
    if (i >= 0) {
      unused = pool[i].next;
    } else {
      i = int(pool.size());
      pool.emplace_back();
    }
    pool[i] = {.warp = warp, .next = cell.reads};
    cell.reads = i;
  }
  pool[i].clocks[current % kWarpSize] = clocks[current];
}

void forget_reads(Cell& cell) {
  if (cell.read_block == block_number) {
    while (cell.reads >= 0) {
      const int next = pool[cell.reads].next;
      pool[cell.reads].next = unused;
      unused = cell.reads;
      cell.reads = next;
    }
  }
  cell.read_block = 0, cell.reads = -1, cell.is_read_widely = false;
}

void note_write(Cell& cell, const Access& access) {
  cell.write_block = block_number;
  cell.write_clock = clocks[current];
  cell.write_thread = uint16_t(current);
  cell.is_atomic = access.is_atomic;
  forget_reads(cell);
  if (access.is_copy) cell.is_copied = false;
}

// The access that an access races with. `what` is null if there is none.
struct Conflict {
  const char* what = nullptr;
  int thread = -1;  // -1 for another block

  std::string text() const {
    const std::string who = thread < 0 ? "" : std::to_string(thread) + " ";
    return std::string("that ") + (thread < 0 ? "" : "thread ") + who + what;
  }
};

Conflict conflict_of(const Cell& cell, const Access& access, bool is_shared) {
  const bool of_block = cell.write_block == block_number;
  if (of_block && cell.is_copied && !access.is_copy)
    return {"a copy is on its way to"};
  const bool are_atomic = access.is_atomic && cell.is_atomic;
  if (of_block && !are_atomic && !is_seen(cell.write_thread, cell.write_clock))
    return {"writes", cell.write_thread};
  if (!is_shared && !are_atomic && !of_block &&
      cell.write_block >= first_of_launch)
    return {"another block writes"};
  if (!access.writes) return {};
  if (cell.products_block == block_number && cell.products > 0)
    return {"a product reads that has not been waited for"};
  const int reader = racing_reader(cell);
  if (reader >= 0) return {"reads", reader};
  if (!is_shared &&
      (cell.is_read_widely ||
       (cell.read_block >= first_of_launch && cell.read_block != block_number)))
    return {"another block reads"};
  return {};
}

}  // namespace

void begin_launch_races() {
  // Addresses may have other contents in a new launch, and other meanings.
  pages.clear();
  last = nullptr;
  first_of_launch = block_number + 1;
}

void begin_block_races() {
  ++block_number;
  pool.clear();
  unused = -1;
  clocks.assign(block.threads.size(), 1);
  seen.assign(clocks.size() * clocks.size(), 0);
  seen_by_all = 0;
  pending.thread = -1;
}

void join(const std::vector<int>& threads) {
  const size_t count = clocks.size();
  if (threads.size() + block.num_ended >= count) {
    // The clocks of ended threads are included, because they are not advanced
    // any more.
    seen_by_all = *std::max_element(clocks.begin(), clocks.end()) + 1;
    std::fill(clocks.begin(), clocks.end(), seen_by_all);
    return;
  }
  for (const int thread : threads)
    seen[thread * count + thread] = clocks[thread];
  uint32_t* first = &seen[threads[0] * count];
  for (const int thread : threads) {
    const uint32_t* own = &seen[thread * count];
    for (size_t i = 0; i < count; ++i) first[i] = std::max(first[i], own[i]);
  }
  for (const int thread : threads) {
    std::copy(first, first + count, &seen[thread * count]);
    ++clocks[thread];
  }
}

void publish(Clocks& to) {
  const size_t count = clocks.size();
  uint32_t* own = &seen[current * count];
  own[current] = clocks[current]++;
  to.resize(count);
  for (size_t i = 0; i < count; ++i) to[i] = std::max(to[i], own[i]);
}

void see(const Clocks& from) {
  uint32_t* own = &seen[current * clocks.size()];
  for (size_t i = 0; i < from.size(); ++i) own[i] = std::max(own[i], from[i]);
}

void check_race(const Access& access, bool is_shared) {
  if (access.bytes < kCellBytes) return;
  const auto* p = static_cast<const uint8_t*>(access.p);
  for (size_t i = 0; i < access.bytes; i += kCellBytes) {
    Cell& cell = cell_of(p + i);
    const Conflict conflict = conflict_of(cell, access, is_shared);
    if (conflict.what != nullptr) {
      if (!access.writes || access.is_copy || cell.is_copied ||
          access.bytes > sizeof pending.before)
        fail(access, conflict.text() + ", and nothing orders the two");
      pending.access = access;
      std::memcpy(pending.before, p, access.bytes);
      pending.thread = current;
      pending.message = conflict.text();
      return;
    }
    if (access.writes) {
      note_write(cell, access);
    } else {
      note_read(cell);
    }
  }
}

void begin_product_read(const Site& site, const void* p, size_t bytes) {
  const Access access = {.p = p, .bytes = bytes, .writes = false};
  for (size_t i = 0; i < bytes; i += kCellBytes) {
    Cell& cell = cell_of(static_cast<const uint8_t*>(p) + i);
    const Conflict conflict = conflict_of(cell, access, true);
    if (conflict.what != nullptr)
      fail(site, "a product reads " + std::to_string(bytes) + " bytes " +
                     conflict.text() + ", and nothing orders the two");
    if (cell.products_block != block_number) {
      cell.products_block = block_number;
      cell.products = 0;
    }
    ++cell.products;
  }
}

void end_product_read(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kCellBytes) {
    Cell& cell = cell_of(static_cast<const uint8_t*>(p) + i);
    --cell.products;
    note_read(cell);
  }
}

void mark_copied(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kCellBytes)
    cell_of(static_cast<const uint8_t*>(p) + i).is_copied = true;
}

void settle() {
  if (pending.thread != current) return;
  pending.thread = -1;
  const Access& access = pending.access;
  if (std::memcmp(pending.before, access.p, access.bytes) != 0)
    fail(access, pending.message + ", and nothing orders the two");
}

}  // namespace emulator
