// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Helpers for warps: shared memory, copies to it, registers, lanes, and the
// kernels before and after this one.
#pragma once

#include <cstdint>

namespace turbo {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copy 16 bytes, bypassing L1.
__device__ __forceinline__ void copy_async(uint32_t target,
                                           const uint8_t* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target),
               "l"(source)
               : "memory");
}

// Copy 16 bytes if a condition holds, without a branch. kTarget and kSource are
// immediate offsets from the addresses, in bytes.
template <int kTarget, int kSource>
__device__ __forceinline__ void copy_async_if(bool condition, uint32_t target,
                                              const uint8_t* source) {
  asm volatile(
      "{\n"
      ".reg .pred is_copied;\n"
      "setp.ne.s32 is_copied, %2, 0;\n"
      "@is_copied cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16;\n"
      "}" ::"r"(target),
      "l"(source), "r"(int(condition)), "n"(kTarget), "n"(kSource)
      : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait for all but this lane's latest kPending groups of copies.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Copy 32 bytes from memory to L2, without waiting.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Let the next kernel of the stream begin while this one runs, if it was
// launched to do so.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Wait until the previous kernel has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Raise or lower the registers per lane to a multiple of eight. All warps of a
// warpgroup call these functions (sm_90a).
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A number that is the same in all lanes, made known as such to the compiler.
__device__ __forceinline__ int uniform(int x) {
  return __reduce_max_sync(~0u, x);
}

// Keep the compiler from computing a number outside of a loop. It would hold
// addresses for the next iteration in registers, and none are free.
__device__ __forceinline__ int of_turn(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The sum over the lanes up to this one.
__device__ __forceinline__ int inclusive_sum(int x, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int y = __shfl_up_sync(~0u, x, distance);
    if (lane >= distance) x += y;
  }
  return x;
}

}  // namespace turbo
