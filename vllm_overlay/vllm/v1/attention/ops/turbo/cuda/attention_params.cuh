// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the entry points of attention to pages take of their tensors.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "segment.cuh"

namespace turbo {

// See DecodeParams and cuda_decode.py for shapes and types.
inline DecodeParams params_of(
    tvm::ffi::TensorView query, tvm::ffi::TensorView query_scale,
    tvm::ffi::TensorView kv_cache, tvm::ffi::TensorView block_table,
    tvm::ffi::TensorView seq_lens, tvm::ffi::TensorView partial,
    tvm::ffi::TensorView partial_lse,
    const tvm::ffi::Optional<tvm::ffi::TensorView>& query_start_loc,
    int64_t num_seqs, int64_t query_len, bool with_newest) {
  DecodeParams p;
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
  return p;
}

}  // namespace turbo
