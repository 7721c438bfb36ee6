// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Launches of kernels that begin while the one before them still runs.
#pragma once

#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

namespace turbo {

inline void check(cudaError_t error) {
  TVM_FFI_ICHECK(error == cudaSuccess) << cudaGetErrorString(error);
}

// Whether a kernel can begin before the one before it ends.
inline bool can_overlap(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                               device));
  return major >= 9;
}

// The kernel has to wait by itself: see wait_for_previous_kernel.
template <typename Params>
void launch(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes,
            DLDevice device, const Params& params) {
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
  config.numAttrs = can_overlap(device.device_id) ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace turbo
