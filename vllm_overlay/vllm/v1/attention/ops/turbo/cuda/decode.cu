// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The decode kernel's entry point. A module has one instance: cuda_decode.py
// defines DECODE_PAIRED and DECODE_WARPS, and has turbo_constants.h of the
// layout included.
#include "attention_params.cuh"
#include "decode.cuh"
#include "launch.cuh"

namespace {

using turbo::check;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Pairs of tiles in flight a warp.
constexpr int kStages = 2;
constexpr int kThreads = 32 * DECODE_WARPS;
constexpr size_t kSharedBytes =
    sizeof(turbo::Shared<DECODE_PAIRED, DECODE_WARPS, kStages>);
constexpr auto kKernel =
    turbo::decode_kernel<DECODE_PAIRED, DECODE_WARPS, kStages>;

// Multiprocessors of the device, made ready at the first call.
int prepare(int device) {
  constexpr int kMaxDevices = 64;
  static int num_sms[kMaxDevices] = {};
  TVM_FFI_ICHECK(device < kMaxDevices) << device;
  if (num_sms[device] == 0) {
    check(cudaFuncSetAttribute(
        kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    check(cudaDeviceGetAttribute(&num_sms[device],
                                 cudaDevAttrMultiProcessorCount, device));
  }
  return num_sms[device];
}

// See turbo::DecodeParams and cuda_decode.py for shapes and types.
void decode(TensorView query, TensorView query_scale, TensorView kv_cache,
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode);
