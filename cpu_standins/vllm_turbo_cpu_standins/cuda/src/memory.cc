// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The memory that threads may touch: their stacks, the block's shared
// variables, and the tensors that the kernel was given. Copies to shared memory
// are here as well.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "state.h"

namespace emulator {
namespace {

// The most shared memory of a block, as on an H100.
constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr size_t kArenaBytes = 4 << 20;
// Space between shared variables, so that accesses past one do not hit another.
constexpr size_t kGap = 4096;
// The address of the shared memory's first byte.
constexpr uint32_t kFirstAddress = 1 << 10;
// The bytes of memory before it is written, which are NaN in any type.
constexpr int kPoison = 0xFF;

struct Range {
  const uint8_t* begin;
  const uint8_t* end;
  const char* name;

  bool has(const void* p, size_t bytes) const {
    const auto* first = static_cast<const uint8_t*>(p);
    return begin <= first && first + bytes <= end;
  }
};

struct Shared {
  std::vector<Range> variables;
  size_t used = 0;         // of the arena
  size_t total_bytes = 0;  // of variables
  size_t dynamic_bytes = 0;
  uint64_t launch = 0;
};

Shared shared;
std::vector<Range> tensors;
Range params;
Range own_image, image;  // of this library, and of the kernel's

uint8_t* arena() {
  static auto* memory = static_cast<uint8_t*>(
      mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return memory;
}

// The memory of the library that has an address.
Range image_of(const void* address) {
  struct Search {
    const void* address;
    Range found;
  } search = {address, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        const auto* base = reinterpret_cast<const uint8_t*>(info->dlpi_addr);
        Range whole = {base, base, "image"};
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type == PT_LOAD)
            whole.end =
                std::max(whole.end, base + header.p_vaddr + header.p_memsz);
        }
        auto& search = *static_cast<Search*>(data);
        if (!whole.has(search.address, 1)) return 0;
        search.found = whole;
        return 1;
      },
      &search);
  return search.found;
}

uint8_t* allocate_shared(const char* name, size_t bytes, size_t alignment) {
  shared.total_bytes += bytes;
  if (shared.total_bytes > kMaxSharedBytes)
    fail(std::string("no room in shared memory for ") + name);
  shared.used = (shared.used + alignment - 1) / alignment * alignment;
  uint8_t* place = arena() + shared.used;
  shared.used += bytes + kGap;
  shared.variables.push_back({place, place + bytes, name});
  std::memset(place, kPoison, bytes);
  return place;
}

std::string text_of(const void* p) {
  std::ostringstream text;
  text << p;
  return text.str();
}

}  // namespace

void begin_memory(const Launch& launch) {
  if (own_image.begin == nullptr) own_image = image_of(&threadIdx);
  if (!image.has(launch.kernel, 1)) image = image_of(launch.kernel);
  const auto* p = static_cast<const uint8_t*>(launch.params);
  params = {p, p + launch.params_bytes, "parameters"};
  shared.variables.clear();
  shared.used = shared.total_bytes = 0;
  shared.dynamic_bytes = launch.shared_bytes;
  ++shared.launch;
  // The first variable has the largest alignment that a kernel may ask for.
  allocate_shared("dynamic shared memory", launch.shared_bytes, 1024);
}

void begin_block_memory() { std::memset(arena(), kPoison, shared.used); }

bool is_shared(const void* p) {
  return arena() <= p && p < arena() + kArenaBytes;
}

void fail(const Access& access, const std::string& message) {
  std::string text = access.writes ? "writes " : "reads ";
  text += std::to_string(access.bytes) + " bytes " + message;
  if (access.pc != nullptr) {
    const auto offset = static_cast<const uint8_t*>(access.pc) - image.begin;
    text += " [pc " + text_of(reinterpret_cast<const void*>(offset)) + "]";
  }
  if (access.site.line() != 0) text += " (" + text_of(access.site) + ")";
  fail(text);
}

void check(const Access& access) {
  settle();
  const uint8_t* stack = stack_of(current);
  const auto* p = static_cast<const uint8_t*>(access.p);
  if (stack <= p && p + access.bytes <= stack + kStackBytes) return;
  const auto has = [&](const Range& range) {
    return range.has(p, access.bytes);
  };
  const bool in_shared = is_shared(p);
  const auto& ranges = in_shared ? shared.variables : tensors;
  const auto found = std::find_if(ranges.begin(), ranges.end(), has);
  if (found == ranges.end()) {
    if (has(own_image) || has(image) || (has(params) && !access.writes)) return;
    fail(access, in_shared ? "of shared memory, of no variable"
                           : "of global memory, of no tensor: " + text_of(p));
  }
  // The next access finds it at once.
  if (!in_shared && found != tensors.begin())
    std::iter_swap(tensors.begin(), tensors.begin() + (found - ranges.begin()));
  const bool is_power = (access.bytes & (access.bytes - 1)) == 0;
  if (is_power && reinterpret_cast<uintptr_t>(p) % access.bytes != 0)
    fail(access, "at an address that is no multiple");
  if (access.writes && !in_shared && block.threads[current].may_overlap)
    fail(access, "before it has waited for the kernel before it");
  check_race(access, in_shared);
}

void* shared_storage(SharedSlot& slot, size_t bytes, size_t alignment) {
  if (slot.launch != shared.launch) {
    slot.launch = shared.launch;
    slot.place = allocate_shared(slot.name, bytes, alignment);
  }
  return slot.place;
}

uint8_t* dynamic_shared() { return arena(); }

uint32_t shared_address(const void* p) {
  if (!is_shared(p))
    fail("takes the shared address of memory that is not shared");
  return kFirstAddress + uint32_t(static_cast<const uint8_t*>(p) - arena());
}

uint8_t* shared_pointer(const Site& site, uint32_t address, size_t bytes) {
  uint8_t* p = arena() + (address - kFirstAddress);
  if (address < kFirstAddress || address - kFirstAddress >= kArenaBytes)
    fail(site, "reads an address that is not of shared memory");
  if (address % bytes != 0)
    fail(site, "reads shared memory at an address that is no multiple of " +
                   std::to_string(bytes));
  return p;
}

void copy_async(const Site& site, uint32_t target, const void* source,
                size_t bytes) {
  uint8_t* p = shared_pointer(site, target, bytes);
  check({.p = p, .bytes = bytes, .writes = true});
  check({.p = source, .bytes = bytes, .writes = false});
  // The copy may arrive at any time from now on, until it is waited for.
  std::memset(p, kPoison, bytes);
  mark_copied(p, bytes);
  block.threads[current].open_group.push_back(
      {p, static_cast<const uint8_t*>(source), bytes});
}

void commit_copies() {
  Thread& self = block.threads[current];
  self.groups.push_back(std::move(self.open_group));
  self.open_group.clear();
}

void wait_copies(int pending) {
  auto& groups = block.threads[current].groups;
  while (int(groups.size()) > pending) {
    for (const Copy& copy : groups.front()) {
      check({.p = copy.target,
             .bytes = copy.bytes,
             .writes = true,
             .is_copy = true});
      std::memcpy(copy.target, copy.source, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace emulator

extern "C" {

// Memory that kernels may touch from now on, until it is taken back.
__attribute__((visibility("default"))) void turbo_emulator_permit(
    const void* p, size_t bytes) {
  const auto* begin = static_cast<const uint8_t*>(p);
  emulator::tensors.push_back({begin, begin + bytes, "tensor"});
}

__attribute__((visibility("default"))) void turbo_emulator_forbid_all() {
  emulator::tensors.clear();
}
}
