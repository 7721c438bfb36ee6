// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The extend kernel's entry point. A module has one instance: extend.py
// defines EXTEND_COLUMNS, EXTEND_WARPS, EXTEND_STAGES and
// EXTEND_MAX_SHARED_BYTES, and has turbo_constants.h of the layout included.
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "decode/attention_params.cuh"
#include "extend/extend.cuh"
#include "common/launch.cuh"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr int kThreads = 32 * EXTEND_WARPS;
constexpr size_t kSharedBytes =
    sizeof(turbo::ExtendShared<EXTEND_COLUMNS, EXTEND_WARPS, EXTEND_STAGES>);
static_assert(kSharedBytes <= EXTEND_MAX_SHARED_BYTES);
constexpr auto kKernel =
    turbo::extend_kernel<EXTEND_COLUMNS, EXTEND_WARPS, EXTEND_STAGES>;

// Blocks that the current device has room for.
int num_blocks(int device) {
  static turbo::NumberByDevice known;
  return known.get(device, [device] {
    turbo::allow_shared_bytes(kKernel, kSharedBytes);
    int per_sm = 0;
    turbo::check_launch(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_sm, kKernel, kThreads, kSharedBytes));
    TVM_FFI_CHECK(per_sm > 0, TurboLaunchRefused)
        << "no room for a block of " << kSharedBytes << " bytes";
    return per_sm * turbo::attribute_of(device, cudaDevAttrMultiProcessorCount);
  });
}

// See turbo::DecodeParams and extend.py for shapes and types.
void extend(TensorView query, TensorView query_scale, TensorView kv_cache,
            TensorView block_table, TensorView seq_lens, TensorView partial,
            TensorView partial_lse, Optional<TensorView> query_start_loc,
            int64_t num_seqs, int64_t query_len, bool with_newest) {
  const turbo::DecodeParams p = turbo::params_of(
      query, query_scale, kv_cache, block_table, seq_lens, partial, partial_lse,
      query_start_loc, num_seqs, query_len, with_newest);
  const DLDevice device = kv_cache.device();
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  turbo::launch(kKernel, num_blocks(device.device_id), kThreads, kSharedBytes,
                device, p);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend, extend);
