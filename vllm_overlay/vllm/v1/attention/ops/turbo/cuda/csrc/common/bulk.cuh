// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Bulk copies to shared memory (sm_90), which complete on barriers.
#pragma once

#include "common/barriers.cuh"

namespace turbo {

// Make barriers that were just initialised visible to bulk copies.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive, and let the phase also wait for copies of so many bytes.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

// Copy a multiple of 16 bytes. Both addresses are multiples of 16 bytes.
__device__ __forceinline__ void copy_bulk(uint32_t target, const void* source,
                                          int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Have a multiple of 16 bytes brought to the L2 cache. The address is a
// multiple of 16 bytes.
__device__ __forceinline__ void prefetch_bulk(const void* source, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source),
               "r"(bytes));
}

// Make this thread's writes visible to the tensor core and to bulk copies.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace turbo
