// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The extend kernel's entry point. A module has one instance: extend.py defines
// EXTEND_COLUMNS, EXTEND_WARPS, EXTEND_STAGES and EXTEND_MAX_SHARED_BYTES, and
// has turbo_constants.h of the layout included.
#include <tvm/ffi/function.h>

#include "common/attention_entry.cuh"
#include "extend/extend.cuh"

namespace {

struct Extend {
  static constexpr int kThreads = 32 * EXTEND_WARPS;
  static constexpr size_t kSharedBytes =
      sizeof(turbo::ExtendShared<EXTEND_COLUMNS, EXTEND_WARPS, EXTEND_STAGES>);
  static_assert(kSharedBytes <= EXTEND_MAX_SHARED_BYTES);
  static constexpr auto kKernel =
      turbo::extend_kernel<EXTEND_COLUMNS, EXTEND_WARPS, EXTEND_STAGES>;

  // As many as there is room for.
  static int num_blocks(int device) {
    static turbo::NumberByDevice known;
    return known.get(device, [device] {
      turbo::allow_shared_bytes(kKernel, kSharedBytes);
      int per_sm = 0;
      turbo::check_launch(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &per_sm, kKernel, kThreads, kSharedBytes));
      TVM_FFI_CHECK(per_sm > 0, TurboLaunchRefused)
          << "no room for a block of " << kSharedBytes << " bytes";
      return per_sm *
             turbo::attribute_of(device, cudaDevAttrMultiProcessorCount);
    });
  }
};

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend, turbo::attend_to_pages<Extend>);
