// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Hooks that compiled code calls. It calls those of the thread sanitizer before
// accesses to memory. It calls those of the undefined behaviour sanitizer if an
// index or an address is wrong. Host code also calls them, and is not checked.
#include <atomic>

#include "state.h"

namespace {

inline void look_at(const void* p, size_t bytes, bool writes, const void* pc,
                    bool is_atomic = false) {
  if (emulator::current < 0 || emulator::is_internal) return;
  emulator::check({.p = p,
                   .bytes = bytes,
                   .writes = writes,
                   .is_atomic = is_atomic,
                   .pc = pc});
}

// A place in the source, as the compiler lays it out.
struct SourcePlace {
  const char* file;
  uint32_t line, column;
};

[[noreturn]] void fail_at(const SourcePlace& place, const char* message) {
  emulator::fail(std::string(message) + " (" + place.file + ":" +
                 std::to_string(place.line) + ")");
}

}  // namespace

#define ACCESS_HOOKS(bytes)                                \
  void __tsan_read##bytes(void* p) {                       \
    look_at(p, bytes, false, __builtin_return_address(0)); \
  }                                                        \
  void __tsan_write##bytes(void* p) {                      \
    look_at(p, bytes, true, __builtin_return_address(0));  \
  }                                                        \
  void __tsan_unaligned_read##bytes(void* p) {             \
    look_at(p, bytes, false, __builtin_return_address(0)); \
  }                                                        \
  void __tsan_unaligned_write##bytes(void* p) {            \
    look_at(p, bytes, true, __builtin_return_address(0));  \
  }                                                        \
  void __tsan_volatile_read##bytes(void* p) {              \
    look_at(p, bytes, false, __builtin_return_address(0)); \
  }                                                        \
  void __tsan_volatile_write##bytes(void* p) {             \
    look_at(p, bytes, true, __builtin_return_address(0));  \
  }

// Atomics of host code. Kernels have none of these.
#define ATOMIC_HOOKS(bits, T)                                                 \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                    \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                              \
  }                                                                           \
  void __tsan_atomic##bits##_store(volatile T* p, T x, int) {                 \
    __atomic_store_n(p, x, __ATOMIC_SEQ_CST);                                 \
  }                                                                           \
  T __tsan_atomic##bits##_exchange(volatile T* p, T x, int) {                 \
    return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST);                       \
  }                                                                           \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T x, int) {                \
    return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);                        \
  }                                                                           \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T x, int) {                \
    return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);                        \
  }                                                                           \
  T __tsan_atomic##bits##_fetch_or(volatile T* p, T x, int) {                 \
    return __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST);                         \
  }                                                                           \
  T __tsan_atomic##bits##_fetch_and(volatile T* p, T x, int) {                \
    return __atomic_fetch_and(p, x, __ATOMIC_SEQ_CST);                        \
  }                                                                           \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* x, T y, \
                                                    int, int) {               \
    return __atomic_compare_exchange_n(p, x, y, false, __ATOMIC_SEQ_CST,      \
                                       __ATOMIC_SEQ_CST);                     \
  }                                                                           \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* x, T y,   \
                                                  int, int) {                 \
    return __tsan_atomic##bits##_compare_exchange_strong(p, x, y, 0, 0);      \
  }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)

void __tsan_read_range(void* p, size_t bytes) {
  look_at(p, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) {
  look_at(p, bytes, true, __builtin_return_address(0));
}

ATOMIC_HOOKS(8, uint8_t)
ATOMIC_HOOKS(16, uint16_t)
ATOMIC_HOOKS(32, uint32_t)
ATOMIC_HOOKS(64, uint64_t)
void __tsan_atomic_thread_fence(int) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
void __tsan_atomic_signal_fence(int) {}

void __ubsan_handle_out_of_bounds(const SourcePlace* place, void*) {
  fail_at(*place, "an index is past the end of its array");
}
void __ubsan_handle_type_mismatch_v1(const SourcePlace* place, void*) {
  fail_at(*place, "an address is not aligned for what is there");
}
}

unsigned atomicOr(unsigned* p, unsigned x) {
  look_at(p, sizeof *p, true, __builtin_return_address(0), true);
  const unsigned before = *p;
  *p |= x;
  return before;
}
