// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The entry point of the kernel for many queries whose results the merge joins.
// A module has one instance: see instance.cuh.
#include <tvm/ffi/function.h>

#include "extend_wgmma/instance.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(
    extend_wgmma, turbo::attend_to_pages<RowsInstance<turbo::AttentionParams>>);
