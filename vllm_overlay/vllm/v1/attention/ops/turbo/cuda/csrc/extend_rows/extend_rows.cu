// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The entry point of the kernel for many queries. A module has one instance:
// extend_rows.py defines ROWS_CONSUMERS, ROWS_PRODUCERS, ROWS_BLOCKS,
// ROWS_TILES, ROWS_COPIES and ROWS_REGISTERS, and has turbo_constants.h of the
// layout included.
#include <tvm/ffi/function.h>

#include "common/attention_entry.cuh"
#include "extend_rows/extend_rows.cuh"

namespace {

struct ExtendRows {
  using Plan = turbo::RowsPlan<ROWS_CONSUMERS, ROWS_PRODUCERS, ROWS_BLOCKS,
                               ROWS_TILES, ROWS_STAGES, ROWS_COPIES,
                               ROWS_REGISTERS, ROWS_HOLDS_QUERIES>;
  static constexpr int kThreads = Plan::kThreads;
  static constexpr size_t kSharedBytes = sizeof(turbo::RowsShared<Plan>);
  static_assert(Plan::kBlocks * (kSharedBytes + 1024) <= 228 * 1024);
  static constexpr auto kKernel = turbo::extend_rows_kernel<Plan>;

  static int num_blocks(int device) {
    static turbo::NumberByDevice known;
    return known.get(device, [device] {
      turbo::allow_shared_bytes(kKernel, kSharedBytes);
      return Plan::kBlocks *
             turbo::attribute_of(device, cudaDevAttrMultiProcessorCount);
    });
  }
};

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend_rows, turbo::attend_to_pages<ExtendRows>);
