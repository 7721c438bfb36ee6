// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The extend kernel's entry point. A module has one instance: cuda_extend.py
// defines EXTEND_COLUMNS, EXTEND_WARPS, EXTEND_STAGES and
// EXTEND_MAX_SHARED_BYTES, and has turbo_constants.h of the layout included.
#include "attention_params.cuh"
#include "extend.cuh"
#include "launch.cuh"

namespace {

using turbo::check;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr int kThreads = 32 * EXTEND_WARPS;
constexpr size_t kSharedBytes =
    sizeof(turbo::ExtendShared<EXTEND_COLUMNS, EXTEND_WARPS, EXTEND_STAGES>);
static_assert(kSharedBytes <= EXTEND_MAX_SHARED_BYTES);
constexpr auto kKernel =
    turbo::extend_kernel<EXTEND_COLUMNS, EXTEND_WARPS, EXTEND_STAGES>;

// Blocks that the device has room for, made ready at the first call.
int prepare(int device) {
  constexpr int kMaxDevices = 64;
  static int num_blocks[kMaxDevices] = {};
  TVM_FFI_ICHECK(device < kMaxDevices) << device;
  if (num_blocks[device] == 0) {
    int num_sms = 0, per_sm = 0;
    check(cudaFuncSetAttribute(
        kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount,
                                 device));
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_sm, kKernel, kThreads, kSharedBytes));
    TVM_FFI_ICHECK(per_sm > 0) << kSharedBytes;
    num_blocks[device] = num_sms * per_sm;
  }
  return num_blocks[device];
}

// See turbo::DecodeParams and cuda_extend.py for shapes and types.
void extend(TensorView query, TensorView query_scale, TensorView kv_cache,
            TensorView block_table, TensorView seq_lens, TensorView partial,
            TensorView partial_lse, Optional<TensorView> query_start_loc,
            int64_t num_seqs, int64_t query_len, bool with_newest) {
  const turbo::DecodeParams p = turbo::params_of(
      query, query_scale, kv_cache, block_table, seq_lens, partial, partial_lse,
      query_start_loc, num_seqs, query_len, with_newest);
  const DLDevice device = query.device();
  const int num_blocks = prepare(device.device_id);
  turbo::launch(kKernel, num_blocks, kThreads, kSharedBytes, device, p);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend, extend);
