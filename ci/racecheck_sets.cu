// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A kernel without a race, in which compute-sanitizer's racecheck reports some.
//
// Sets of four warps meet at barriers of their own, each set a different number
// of times, and then hand sums to each other between barriers of the whole
// block. The kernel decode_wgmma does the same.
#include <cuda_runtime.h>

#include <cstdio>

constexpr int kSets = 4, kSetThreads = 128, kColumns = 32;
constexpr int kBlocks = 132, kSegments = 8;

__device__ __forceinline__ void sync_set(int set) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + set), "r"(kSetThreads) : "memory");
}

__global__ void __launch_bounds__(kSets* kSetThreads)
    join_sets(float* output, const int* steps) {
  __shared__ float exchanged[kSets][kSetThreads];
  __shared__ float sums[kSets][kColumns];
  const int set = threadIdx.x / kSetThreads, i = threadIdx.x % kSetThreads;
  for (int segment = 0; segment < kSegments; ++segment) {
    float sum = i;
    for (int step = 0; step < steps[segment * kSets + set]; ++step) {
      exchanged[set][i] = sum;
      sync_set(set);
      sum += exchanged[set][(i + 37) % kSetThreads];
      sync_set(set);
    }
    if (i < kColumns) sums[set][i] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int other = 0; other < kSets; ++other)
      total += sums[other][i % kColumns];
    output[(blockIdx.x * kSegments + segment) * blockDim.x + threadIdx.x] =
        total;
    __syncthreads();
  }
}

int main() {
  int host_steps[kSegments * kSets];
  for (int i = 0; i < kSegments * kSets; ++i) host_steps[i] = 1 + i * 5 % 9;
  float* output;
  int* steps;
  cudaMalloc(&output,
             sizeof(float) * kBlocks * kSegments * kSets * kSetThreads);
  cudaMalloc(&steps, sizeof(host_steps));
  cudaMemcpy(steps, host_steps, sizeof(host_steps), cudaMemcpyHostToDevice);
  join_sets<<<kBlocks, kSets * kSetThreads>>>(output, steps);
  const cudaError_t status = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(status));
  return status != cudaSuccess;
}
