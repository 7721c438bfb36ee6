// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The decode kernel's entry point. A module has one instance: cuda_decode.py
// defines DECODE_PAIRED and DECODE_WARPS, and has turbo_constants.h of the
// layout included.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

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
  turbo::DecodeParams p;
  p.query = static_cast<const __half*>(query.data_ptr());
  p.query_scale = static_cast<const float*>(query_scale.data_ptr());
  p.kv_cache = static_cast<const uint8_t*>(kv_cache.data_ptr());
  p.block_table = static_cast<const int*>(block_table.data_ptr());
  p.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  p.partial = static_cast<float*>(partial.data_ptr());
  p.partial_lse = static_cast<float*>(partial_lse.data_ptr());
  p.stride_cache_block = kv_cache.stride(0);
  p.stride_cache_head = kv_cache.stride(1);
  p.stride_block_table = static_cast<int>(block_table.stride(0));
  p.query_start_loc = nullptr;
  if (query_start_loc.has_value()) {
    p.query_start_loc =
        static_cast<const int*>(query_start_loc.value().data_ptr());
  }
  p.query_len = static_cast<int>(query_len);
  p.with_newest = with_newest;
  p.most_hidden = with_newest ? 0 : p.query_len - 1;
  p.num_seqs = static_cast<int>(num_seqs);
  p.num_kv_heads = static_cast<int>(kv_cache.size(1));
  p.group = static_cast<int>(query.size(1)) / p.num_kv_heads;
  p.tiles_per_block = static_cast<int>(kv_cache.size(2)) / TILE_TOKENS;
  p.num_splits = static_cast<int>(partial.size(0) / (num_seqs * query_len));
  const DLDevice device = query.device();
  const int num_blocks = prepare(device.device_id);
  turbo::launch(kKernel, num_blocks, kThreads, kSharedBytes, device, p);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode);
