// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernels for test_cuda_emulator.py: right ones, and mistakes that the emulated
// GPU has to notice. Each is launched with a block of one warp or more.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstdint>

namespace {

struct Params {
  const float* x;
  float* y;
  int defect;  // which mistake to make; 0: none
};

constexpr int kThreads = 64;

// y[i] = sum of x, by lanes, and by warps through shared memory.
__global__ void sum(const Params p) {
  __shared__ float of_warps[2];
  const int thread = threadIdx.x, lane = thread % 32;
  float x = p.x[thread];
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  if (lane == 0) of_warps[thread / 32] = x;
  if (p.defect != 1) __syncthreads();
  const int last = p.defect == 2 ? 2 : 1;
  p.y[thread] = of_warps[0] + of_warps[last];
  if (p.defect == 3) p.y[thread] += blockIdx.x;
}

// y = x reversed within warps, whose lanes may run apart.
__global__ void reverse(const Params p) {
  extern __shared__ __align__(16) float row[];
  const int thread = threadIdx.x, lane = thread % 32;
  if (p.defect == 1 && lane >= 16) return;
  row[thread] = p.x[thread];
  if (p.defect == 2) {
    if (lane < 16) {
      __syncwarp();
    } else {
      __ballot_sync(~0u, true);
    }
  } else if (p.defect != 3) {
    __syncwarp();
  }
  p.y[thread] = row[thread ^ 31];
  if (p.defect == 4) p.y[thread + 1] = 0.0f;
  if (p.defect == 5) p.y[kThreads * gridDim.x] = 0.0f;
  if (p.defect == 6) row[kThreads] = 0.0f;
  if (p.defect == 7) *reinterpret_cast<float2*>(p.y + 1) = {0.0f, 0.0f};
}

// Each half of the block waits at its own barrier, for all of its threads.
__global__ void halves(const Params p) {
  __shared__ float row[kThreads];
  const int thread = threadIdx.x;
  const float x = p.x[thread];
  row[thread] = x;
  const int count = p.defect == 1 ? 64 : 32;
  asm volatile("bar.sync %0, %1;" ::"r"(1 + thread / 32), "r"(count)
               : "memory");
  p.y[thread] = row[thread ^ (p.defect == 2 ? 48 : 16)];
}

// y = x, by copies that are under way while others begin.
__global__ void copy(const Params p) {
  __shared__ __align__(16) float rows[2][4 * kThreads];
  const int thread = threadIdx.x;
  for (int i = 0; i < 2; ++i) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(
            __cvta_generic_to_shared(&rows[i][4 * thread]))),
        "l"(p.x + 4 * kThreads * i + 4 * thread)
        : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  if (p.defect == 0) {
    asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
  } else {
    asm volatile("cp.async.wait_group %0;" ::"n"(1) : "memory");
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 4; ++j)
      p.y[4 * kThreads * i + 4 * thread + j] = rows[i][4 * thread + j];
  }
}

// y[16, 8] = a[16, 16] b[16, 8] in fp16. x holds a and then b.
__global__ void multiply(const Params p) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float *a = p.x, *b = p.x + 256;
  const auto pair = [](float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  };
  uint32_t words[6];
  for (int i = 0; i < 4; ++i) {
    const float* row = a + 16 * (g + i % 2 * 8) + 2 * t + i / 2 * 8;
    words[i] = pair(row[0], row[1]);
  }
  for (int i = 0; i < 2; ++i) {
    const float* column = b + 8 * (2 * t + 8 * i) + g;
    words[4 + i] = pair(column[0], column[8]);
  }
  float d[4] = {};
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
        "r"(words[4]), "r"(words[5]));
  if (threadIdx.x >= 32) return;
  for (int i = 0; i < 4; ++i) p.y[8 * (g + i / 2 * 8) + 2 * t + i % 2] = d[i];
}

// y = x, by a kernel that may begin before the earlier kernel has ended.
__global__ void follow(const Params p) {
  const int thread = threadIdx.x;
  if (p.defect == 1) p.y[thread] = 0.0f;
  if (p.defect == 2 && thread >= 32) return;
  const float x = p.x[thread];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  p.y[thread] = x;
}

// y[8] = sums of x[8, 16], in fp16, by a product of a warpgroup with ones.
__global__ void multiply_group(const Params p) {
  extern __shared__ __align__(16) float row[];
  auto* const operand = reinterpret_cast<__half*>(row);
  const int thread = threadIdx.x;
  constexpr int kColumns = 8, kDepth = 16, kHalf = 8 * kColumns;
  if (thread < 32) {
    for (int i = thread; i < kColumns * kDepth; i += 32) {
      const int column = i / kDepth, k = i % kDepth;
      operand[k / 8 * kHalf + column * 8 + k % 8] = __float2half_rn(p.x[i]);
    }
  }
  if (p.defect != 1) __syncthreads();
  const uint32_t ones = 0x3C003C00;
  const uint32_t address =
      static_cast<uint32_t>(__cvta_generic_to_shared(operand));
  const uint64_t leading = kHalf * sizeof(__half) / 16;
  const uint64_t descriptor = address / 16 | leading << 16 | leading << 32;
  float d[4] = {};
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, %10;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(ones), "r"(ones), "r"(ones), "r"(ones), "l"(descriptor), "r"(0),
        "n"(0));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  const __half zero = __float2half_rn(0.0f);
  if (p.defect == 2 && thread == 0) operand[0] = zero;
  if (p.defect == 3) {
    __syncthreads();
    if (thread == 64) operand[1] = zero;
    __syncthreads();
  }
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(0) : "memory");
  if (p.defect == 4) __syncthreads();
  if (p.defect >= 4 && thread == 0) operand[0] = zero;
  if (thread < 4) p.y[2 * thread] = d[0], p.y[2 * thread + 1] = d[1];
}

// y[i] = sum of the eight numbers of x that lane i % 32 has of four 8 x 8
// matrices. One warp stores the matrices, and the other one loads them.
__global__ void matrices(const Params p) {
  __shared__ __align__(16) __half rows[4][8][8];
  const int thread = threadIdx.x, lane = thread % 32;
  const auto address =
      static_cast<uint32_t>(__cvta_generic_to_shared(rows[lane / 8][lane % 8]));
  uint32_t words[4];
  if (thread < 32) {
    for (int i = 0; i < 4; ++i) {
      const float* pair = p.x + 64 * i + 2 * lane;
      const __half2 both = __floats2half2_rn(pair[0], pair[1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&both);
    }
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::
            "r"(address),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
  }
  if (p.defect != 1) __syncthreads();
  if (thread >= 32) {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "r"(address)
        : "memory");
  }
  float sum = 0.0f;
  for (const uint32_t& word : words) {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(word));
    sum += both.x + both.y;
  }
  p.y[thread] = sum;
  if (p.defect == 2 && thread == 0) rows[0][0][0] = __float2half_rn(-1.0f);
}

using Kernel = void (*)(Params);
constexpr Kernel kKernels[] = {sum,      reverse, halves,         copy,
                               multiply, follow,  multiply_group, matrices};

using tvm::ffi::TensorView;

void emulated(int64_t kernel, TensorView x, TensorView y, int64_t defect,
              int64_t blocks) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim =
      dim3(kKernels[kernel] == multiply_group ? 2 * kThreads : kThreads);
  config.dynamicSmemBytes = kThreads * sizeof(float);
  const Params params = {static_cast<const float*>(x.data_ptr()),
                         static_cast<float*>(y.data_ptr()),
                         static_cast<int>(defect)};
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = kKernels[kernel] == follow ? 1 : 0;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kKernels[kernel], params);
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError)
      << cudaGetErrorString(error);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulated, emulated);
