// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Shared memory, copies to it, and the kernels before and after this one.
// Lanes of a warp.
#pragma once

#include <cstdint>

namespace turbo {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copy 16 bytes, not through L1.
__device__ __forceinline__ void copy_async(uint32_t target,
                                           const uint8_t* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target),
               "l"(source)
               : "memory");
}

// The same where a condition holds, without a branch, of bytes so far from the
// addresses: instructions have such distances in them.
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

// Let the next kernel of the stream, if it was launched so, begin while this
// one runs.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Wait until the kernel before this one has ended, and its writes are seen.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Have more registers a lane, or fewer: a multiple of eight. All warps of a
// warpgroup call it (sm_90a).
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A number that all lanes have, which the compiler then knows, too.
__device__ __forceinline__ int uniform(int x) {
  return __reduce_max_sync(~0u, x);
}

// A number that the compiler does not compute from outside of a loop: registers
// that are full keep no addresses for the next turn.
__device__ __forceinline__ int of_turn(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Over the lanes up to this one.
__device__ __forceinline__ int inclusive_sum(int x, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int y = __shfl_up_sync(~0u, x, distance);
    if (lane >= distance) x += y;
  }
  return x;
}

}  // namespace turbo
