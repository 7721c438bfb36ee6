// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The decode kernel's entry point. A module has one instance: decode.py defines
// DECODE_QUERIES, DECODE_WARPS and DECODE_SCALES_BY_WARP, and includes
// turbo_constants.h of the layout.
#include <tvm/ffi/function.h>

#include "common/attention_entry.cuh"
#include "decode/decode.cuh"

namespace {

struct Decode {
  static constexpr int kThreads = 32 * DECODE_WARPS;
  static constexpr size_t kSharedBytes =
      sizeof(turbo::DecodeShared<DECODE_QUERIES, DECODE_WARPS>);
  static constexpr auto kKernel =
      turbo::decode_kernel<DECODE_QUERIES, DECODE_WARPS>;
  static int num_blocks() { return 1; }
};

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, turbo::attend_to_pages<Decode>);
