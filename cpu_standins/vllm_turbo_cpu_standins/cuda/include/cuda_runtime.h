// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The part of CUDA's header of this name that the kernels use, with names that
// nvcc knows by itself. See translate.py for constructs without a counterpart
// in C++.
#pragma once

#include <tvm/ffi/c_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "emulator/collectives.h"
#include "emulator/instructions.h"
#include "emulator/machine.h"
#include "emulator/numbers.h"

// Tensors on the CPU are the emulated GPU's.
#define kDLCUDA kDLCPU

#define __host__
#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __CUDA_ARCH__ 900

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

inline int max(int a, int b) { return std::max(a, b); }
inline int min(int a, int b) { return std::min(a, b); }
inline unsigned max(unsigned a, unsigned b) { return std::max(a, b); }
inline unsigned min(unsigned a, unsigned b) { return std::min(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }

inline int __float_as_int(float x) { return int(emulator::bits_of(x)); }
inline unsigned __float_as_uint(float x) { return emulator::bits_of(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rd(float a, float b) {
  return emulator::rounded_down(a, b, a + b);
}
inline float __fmaf_rd(float a, float b, float c) {
  return emulator::rounded_down(double(a) * b, c, std::fma(a, b, c));
}

inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t(a) * b >> 32);
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16;
}
inline int __viaddmin_s32(int a, int b, int c) {
  return min(int(unsigned(a) + unsigned(b)), c);
}
// It has no sign mode.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned result;
  emulator::ptx::permute({}, result, a, b, selector & 0x7777u);
  return result;
}

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
void __stcg(T* p, T x) {
  *p = x;
}

unsigned atomicOr(unsigned* p, unsigned x);

inline size_t __cvta_generic_to_shared(const void* p) {
  return emulator::shared_address(p);
}

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidKernelImage = 200,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidPtx = 218,
  cudaErrorJitCompilerNotFound = 221,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};

using cudaStream_t = void*;

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

const char* cudaGetErrorName(cudaError_t error);
// Says why the last launch failed.
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                   int device);

namespace emulator {

// The launch has the kernel and its parameters.
cudaError_t launch(const cudaLaunchConfig_t& config, Launch launch);

}  // namespace emulator

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel,
                                                          int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

template <typename Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Params), const Params& params) {
  const auto body = [](void* kernel, const void* params) {
    reinterpret_cast<void (*)(Params)>(kernel)(
        *static_cast<const Params*>(params));
  };
  return emulator::launch(*config, {.body = body,
                                    .kernel = reinterpret_cast<void*>(kernel),
                                    .params = &params,
                                    .params_bytes = sizeof(Params)});
}
