// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Merge of the partial results of decode attention to latents. A block joins
// the results of a row, which is a head of a query token.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common/numbers.cuh"
#include "common/vectors.cuh"
#include "common/warp.cuh"
#include "turbo_constants.h"

namespace turbo {

constexpr int kMergeLanes = LATENT_RANK / 4;  // threads that share a split
constexpr int kMergeSplits = 4;               // splits at once
constexpr int kMergeThreads = kMergeLanes * kMergeSplits;

struct LatentMergeParams {
  const float* partial;        // [B, S, Q, Hq, LATENT_RANK]
  const float* partial_lse;    // [B, S, Q, Hq], base 2
  const int* query_start_loc;  // [B + 1], or null: T = B * Q
  const float* mean;           // [LATENT_RANK], added to outputs, or null: none
  void* output;                // [T, Hq, LATENT_RANK]
  float* lse;                  // [T, Hq], base e
  Strides output_strides, lse_strides;
  int num_heads;
  int query_len;
  int num_splits;
};

template <typename T>
__device__ __forceinline__ void latent_merge(const LatentMergeParams& p) {
  __shared__ float weights[LATENT_MAX_SPLITS];
  __shared__ float4 sums[kMergeSplits - 1][kMergeLanes];
  __shared__ float shared_lse;
  __shared__ int shared_count;  // splits up to the last that was written
  const int num_rows = p.query_len * p.num_heads;
  const int seq = blockIdx.y, row = blockIdx.x;
  const int token = row / p.num_heads, head = row - token * p.num_heads;
  wait_for_previous_kernel();
  int first_token = seq * p.query_len;
  if (p.query_start_loc != nullptr) {
    first_token = p.query_start_loc[seq];
    if (token >= p.query_start_loc[seq + 1] - first_token) return;
  }
  const int64_t first = int64_t(seq) * p.num_splits * num_rows + row;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    float largest = -INFINITY;
    int count = 0;
    for (int s = lane; s < p.num_splits; s += 32) {
      const float x = __ldcg(p.partial_lse + first + int64_t(s) * num_rows);
      weights[s] = x;
      largest = fmaxf(largest, x);
      if (x != -INFINITY) count = s + 1;
    }
    count = __reduce_max_sync(~0u, count);
    for (int mask = 16; mask > 0; mask /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    const float reference = largest == -INFINITY ? 0.0f : largest;
    float total = 0.0f;
    for (int s = lane; s < p.num_splits; s += 32)
      total += exp2_approx(weights[s] - reference);
    for (int mask = 16; mask > 0; mask /= 2)
      total += __shfl_xor_sync(~0u, total, mask);
    const float inverse = total != 0.0f ? 1.0f / total : 0.0f;
    for (int s = lane; s < p.num_splits; s += 32)
      weights[s] = exp2_approx(weights[s] - reference) * inverse;
    if (lane == 0) {
      shared_count = count;
      shared_lse =
          total != 0.0f ? (reference + log2f(total)) / LOG2_E : -INFINITY;
    }
  }
  __syncthreads();
  const int place = threadIdx.x % kMergeLanes;
  const int group = threadIdx.x / kMergeLanes;
  const float* source = p.partial + first * LATENT_RANK + 4 * place;
  const int64_t stride = int64_t(num_rows) * LATENT_RANK;
  float4 sum = {};
  const int count = shared_count;
  // The last group has the fewest splits. A row without tokens stays zero.
  if (p.mean != nullptr && group == kMergeSplits - 1 && count > 0)
    sum = __ldg(reinterpret_cast<const float4*>(p.mean) + place);
#pragma unroll 4
  for (int s = group; s < count; s += kMergeSplits) {
    const float weight = weights[s];
    if (weight == 0.0f) continue;  // it may not have been written
    const float4 x =
        __ldcg(reinterpret_cast<const float4*>(source + s * stride));
    sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
    sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
  }
  if (group > 0) sums[group - 1][place] = sum;
  __syncthreads();
  if (group > 0) return;
#pragma unroll
  for (int i = 0; i < kMergeSplits - 1; ++i) {
    const float4 x = sums[i][place];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const int64_t t = first_token + token;
  T* output = static_cast<T*>(p.output) + t * p.output_strides.token +
              head * p.output_strides.head + 4 * place;
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float4*>(output) = sum;
  } else if constexpr (std::is_same_v<T, __half>) {
    const __half2 low = __floats2half2_rn(sum.x, sum.y);
    const __half2 high = __floats2half2_rn(sum.z, sum.w);
    *reinterpret_cast<uint2*>(output) = {as_bits(low), as_bits(high)};
  } else {
    const __nv_bfloat162 low = __floats2bfloat162_rn(sum.x, sum.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(sum.z, sum.w);
    *reinterpret_cast<uint2*>(output) = {as_bits(low), as_bits(high)};
  }
  if (place == 0)
    p.lse[t * p.lse_strides.token + head * p.lse_strides.head] = shared_lse;
}

template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    latent_merge_kernel(const __grid_constant__ LatentMergeParams p) {
  latent_merge<T>(p);
}

}  // namespace turbo
