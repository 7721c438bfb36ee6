// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The decode kernel's entry point. A module has one instance: decode.py
// defines DECODE_PAIRED and DECODE_WARPS, and has turbo_constants.h of the
// layout included.
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "decode/attention_params.cuh"
#include "decode/decode.cuh"
#include "common/launch.cuh"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Pairs of tiles in flight a warp.
constexpr int kStages = 2;
constexpr int kThreads = 32 * DECODE_WARPS;
constexpr size_t kSharedBytes =
    sizeof(turbo::Shared<DECODE_PAIRED, DECODE_WARPS, kStages>);
constexpr auto kKernel =
    turbo::decode_kernel<DECODE_PAIRED, DECODE_WARPS, kStages>;

// Blocks on the current device: one a multiprocessor.
int num_blocks(int device) {
  static turbo::NumberByDevice known;
  return known.get(device, [device] {
    turbo::allow_shared_bytes(kKernel, kSharedBytes);
    return turbo::attribute_of(device, cudaDevAttrMultiProcessorCount);
  });
}

// See turbo::DecodeParams and decode.py for shapes and types.
void decode(TensorView query, TensorView query_scale, TensorView kv_cache,
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode);
