// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The entry point of decode attention by columns. A module has one instance:
// decode_wgmma.py defines COLUMNS, COLUMNS_SETS and COLUMNS_STAGES, and
// includes turbo_constants.h of the layout.
#include <tvm/ffi/function.h>

#include "common/attention_entry.cuh"
#include "decode_wgmma/decode_wgmma.cuh"

namespace {

struct DecodeColumns {
  using Plan = turbo::ColumnsPlan<COLUMNS, COLUMNS_SETS, COLUMNS_STAGES>;
  static constexpr int kThreads = Plan::kThreads;
  static constexpr size_t kSharedBytes = sizeof(turbo::ColumnsShared<Plan>);
  static constexpr auto kKernel = turbo::decode_wgmma_kernel<Plan>;
  static int num_blocks() { return 1; }
};

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_wgmma,
                              turbo::attend_to_pages<DecodeColumns>);
