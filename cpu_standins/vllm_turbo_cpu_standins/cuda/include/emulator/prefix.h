// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The beginning of all modules, which is compiled once for all of them.
#pragma once

#include <tvm/ffi/base_detail.h>

// Otherwise all of TVM-FFI is inlined into each entry, and the compiler spends
// most of its time there.
#undef TVM_FFI_INLINE
#define TVM_FFI_INLINE inline

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
