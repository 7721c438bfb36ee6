// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What modules begin with, whatever they include: compiled once for all of
// them.
#pragma once

#include <tvm/ffi/base_detail.h>

// Else all of TVM-FFI is inlined into each entry, where the compiler then
// spends two thirds of its time.
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
