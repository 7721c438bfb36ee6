// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Launches of kernels, which may begin while the previous kernel still runs,
// and the reporting of their errors.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>

namespace turbo {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError)
        << cudaGetErrorName(error) << ": " << cudaGetErrorString(error);
  }
}

// Whether an error says that a kernel cannot be launched here. Other errors may
// come from a kernel that has run.
inline bool is_refusal(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorNotSupported:
      return true;
    default:
      return false;
  }
}

// Check a call that loads or launches a kernel. A refusal raises an error of
// its own class, which build.py defines.
inline void check_launch(cudaError_t error) {
  if (is_refusal(error)) {
    cudaGetLastError();  // so that no later check finds it, PyTorch's say
    TVM_FFI_THROW(TurboLaunchRefused)
        << cudaGetErrorName(error) << ": " << cudaGetErrorString(error);
  }
  check(error);
}

// A positive number per device, computed at its first use. Threads that ask for
// it first at the same time all compute it.
class NumberByDevice {
 public:
  template <typename F>
  int get(int device, F work_out) {
    TVM_FFI_ICHECK(0 <= device && device < kMaxDevices) << device;
    int number = numbers_[device].load(std::memory_order_acquire);
    if (number == 0) {
      number = work_out();
      numbers_[device].store(number, std::memory_order_release);
    }
    return number;
  }

 private:
  static constexpr int kMaxDevices = 64;
  std::atomic<int> numbers_[kMaxDevices] = {};
};

inline int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Allow a kernel so many bytes of shared memory on the current device.
template <typename Params>
void allow_shared_bytes(void (*kernel)(Params), size_t bytes) {
  check_launch(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
}

// The blocks of a kernel on a device, which is the current one.
//
// Instance: has the kernel, its bytes of shared memory, and the blocks per
//   multiprocessor. It is internal to its module. Otherwise all modules of the
//   process would share one number.
template <typename Instance>
int blocks_of(int device) {
  static NumberByDevice known;
  return known.get(device, [device] {
    allow_shared_bytes(Instance::kKernel, Instance::kSharedBytes);
    return Instance::num_blocks() *
           attribute_of(device, cudaDevAttrMultiProcessorCount);
  });
}

// Launch a kernel on the device's stream. The device is the current one.
//
// enable_pdl: whether the kernel may begin before the previous one has ended,
//   on GPUs that can (programmatic dependent launch). The kernel then waits by
//   itself: see wait_for_previous_kernel.
template <typename Params>
void launch(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes,
            DLDevice device, const Params& params, bool enable_pdl) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(
      TVMFFIEnvGetStream(device.device_type, device.device_id));
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  if (enable_pdl) {
    const int major =
        attribute_of(device.device_id, cudaDevAttrComputeCapabilityMajor);
    config.numAttrs = major >= 9 ? 1 : 0;
  }
  check_launch(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace turbo
