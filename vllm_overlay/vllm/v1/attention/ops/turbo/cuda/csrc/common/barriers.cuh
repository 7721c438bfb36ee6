// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Barriers for some of a block's warps. Barriers in shared memory have phases,
// which warps wait for by parity. Others are named by a number.
#pragma once

#include "common/warp.cuh"

namespace turbo {

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier),
               "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void arrive_barrier(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}" ::"r"(barrier)
      : "memory");
}

__device__ __forceinline__ void wait_barrier(uint32_t barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred is_done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1;\n"
      "@!is_done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n"
      ".reg .pred is_done;\n"
      "again:\n"
      "mbarrier.test_wait.parity.shared::cta.b64 is_done, [%0], %1;\n"
      "@!is_done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Barrier 0 is that of __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrive at a barrier without waiting for other threads.
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Like sync_threads. Returns whether the condition holds for any thread.
__device__ __forceinline__ bool sync_threads_or(int barrier, int threads,
                                                bool condition) {
  int result;
  asm volatile(
      "{\n"
      ".reg .pred is_any, is_own;\n"
      "setp.ne.s32 is_own, %3, 0;\n"
      "bar.red.or.pred is_any, %1, %2, is_own;\n"
      "selp.s32 %0, 1, 0, is_any;\n"
      "}"
      : "=r"(result)
      : "r"(barrier), "r"(threads), "r"(int(condition))
      : "memory");
  return result != 0;
}

}  // namespace turbo
