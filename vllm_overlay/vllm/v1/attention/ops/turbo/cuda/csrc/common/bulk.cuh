// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Bulk copies to shared memory (sm_90), and the barriers that they complete on.
#pragma once

#include "common/warp.cuh"

namespace turbo {

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier),
               "r"(arrivals)
               : "memory");
}

// Let copies see barriers that were just made.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive, where copies of so many bytes are to complete, too.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void wait_barrier(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred is_done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1;\n"
      "@!is_done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copy a multiple of 16 bytes between addresses that are such multiples.
__device__ __forceinline__ void copy_bulk(uint32_t target, const void* source,
                                          int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Let the tensor core and bulk copies see what this thread has written.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Of some of a block's warps: barrier 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrive there without waiting for others.
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// As sync_threads, and whether the condition holds for any thread.
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
