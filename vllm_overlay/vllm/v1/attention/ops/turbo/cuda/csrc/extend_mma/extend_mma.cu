// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The extend kernel's entry point. A module has one instance: extend_mma.py
// defines EXTEND_CONSUMERS and so on, a macro per number of an ExtendPlan, and
// EXTEND_MAX_SHARED_BYTES. It includes turbo_constants.h of the layout.
#include <tvm/ffi/function.h>

#include "common/attention_entry.cuh"
#include "extend_mma/extend_mma.cuh"

namespace {

struct Extend {
  using Plan = turbo::ExtendPlan<EXTEND_CONSUMERS, EXTEND_PRODUCERS,
                                 EXTEND_BLOCKS, EXTEND_SPLITS, EXTEND_OVERLAPS,
                                 EXTEND_STAGES, EXTEND_COPIES>;
  static constexpr int kThreads = Plan::kThreads;
  static constexpr size_t kSharedBytes = sizeof(turbo::ExtendShared<Plan>);
  static_assert(kSharedBytes <= EXTEND_MAX_SHARED_BYTES);
  static constexpr auto kKernel = turbo::extend_mma_kernel<Plan>;

  // As many per multiprocessor as there is room for.
  static int num_blocks() {
    int count = 0;
    turbo::check_launch(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &count, kKernel, kThreads, kSharedBytes));
    TVM_FFI_CHECK(count > 0, TurboLaunchRefused)
        << "no room for a block of " << kSharedBytes << " bytes";
    return count;
  }
};

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend_mma, turbo::attend_to_pages<Extend>);
