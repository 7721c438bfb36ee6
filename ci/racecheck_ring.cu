// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A kernel without a race, in which compute-sanitizer's racecheck reports some.
//
// Two warps write stages of a ring, and two others read them. Barriers in
// shared memory tell when a stage is full and when it is empty; a warp's first
// lane arrives for the warp. The kernels of extends do the same.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

constexpr int kStages = 3, kProducers = 2, kConsumers = 2;
constexpr int kThreads = 32 * (kProducers + kConsumers);
constexpr int kBlocks = 396, kSteps = 20;

__device__ __forceinline__ uint32_t address(uint64_t& barrier) {
  return uint32_t(__cvta_generic_to_shared(&barrier));
}

__device__ __forceinline__ void init(uint64_t& barrier, int warps) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)),
      "r"(warps)
      : "memory");
}

__device__ __forceinline__ void arrive(uint64_t& barrier, int lane) {
  __syncwarp();
  if (lane != 0) return;
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}" ::"r"(address(barrier))
      : "memory");
}

__device__ __forceinline__ void wait(uint64_t& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred is_done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1;\n"
      "@!is_done bra again;\n"
      "}" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
}

__global__ void __launch_bounds__(kThreads) pass_stages(float* output) {
  __shared__ float stages[kStages][kProducers][32];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      init(full[i], kProducers), init(empty[i], kConsumers);
  }
  __syncthreads();
  float sum = 0.0f;
  for (int step = 0; step < kSteps; ++step) {
    const int stage = step % kStages, parity = step / kStages % 2;
    if (warp < kProducers) {
      wait(empty[stage], parity ^ 1);
      stages[stage][warp][lane] = float(step + lane);
      arrive(full[stage], lane);
    } else {
      wait(full[stage], parity);
      for (int i = 0; i < kProducers; ++i) sum += stages[stage][i][lane];
      arrive(empty[stage], lane);
    }
  }
  output[blockIdx.x * kThreads + threadIdx.x] = sum;
}

int main() {
  float* output;
  cudaMalloc(&output, sizeof(float) * kBlocks * kThreads);
  pass_stages<<<kBlocks, kThreads>>>(output);
  const cudaError_t status = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(status));
  return status != cudaSuccess;
}
