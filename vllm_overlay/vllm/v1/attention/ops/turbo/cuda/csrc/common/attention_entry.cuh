// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The entry point of kernels that attend to pages.
#pragma once

#include <tvm/ffi/extra/cuda/device_guard.h>

#include "common/attention_params.cuh"
#include "common/launch.cuh"
#include "common/tensors.cuh"

namespace turbo {

static_assert(!(KEY_OFFSET && SOFT_CAP),
              "an offset cannot be added back to capped scores");

// The parameters except queries and partial results. See AttentionParams and
// decode.py for shapes and dtypes.
//
// packed_lens: lengths without the tokens that the tail has. The
//   kernel before this one writes them.
inline AttentionParams params_of(int64_t num_heads, TensorView kv_cache,
                                 TensorView block_table, TensorView seq_lens,
                                 const Optional<TensorView>& query_start_loc,
                                 int64_t num_seqs, int64_t query_len,
                                 bool with_raw,
                                 const Optional<TensorView>& packed_lens,
                                 int64_t sliding_window) {
  check_pages("kv_cache", kv_cache, TILE_TOKENS, TILE_BYTES);
  const int64_t num_kv_heads = kv_cache.size(1);
  TVM_FFI_CHECK(num_heads % num_kv_heads == 0, ValueError)
      << "query: " << num_heads << " heads, no multiple of " << num_kv_heads;
  const DLDevice device = kv_cache.device();
  check_device(device, block_table, seq_lens);
  AttentionParams p = {};
  p.kv_cache = static_cast<const uint8_t*>(kv_cache.data_ptr());
  p.block_table = block_table_of(block_table, num_seqs);
  p.known_lens = ints_of("seq_lens", seq_lens, num_seqs);
  p.seq_lens = p.known_lens;
  p.lens_are_new = packed_lens.has_value();
  if (p.lens_are_new) {
    const TensorView& x = packed_lens.value();
    check_device(device, x);
    p.seq_lens = ints_of("packed_lens", x, num_seqs);
  }
  p.stride_cache_block = kv_cache.stride(0);
  p.stride_cache_head = kv_cache.stride(1);
  p.stride_block_table = to_int("block_table", block_table.stride(0));
  p.query_start_loc = starts_of(query_start_loc, num_seqs, device);
  p.query_len = to_int("query_len", query_len);
  p.with_raw = with_raw;
  p.most_hidden = with_raw ? 0 : p.query_len - 1;
  p.sliding_window = sliding_window_of(sliding_window);
  p.num_seqs = to_int("num_seqs", num_seqs);
  p.num_kv_heads = to_int("kv_cache", num_kv_heads);
  p.heads_per_kv = static_cast<int>(num_heads / num_kv_heads);
  p.tiles_per_block = static_cast<int>(kv_cache.size(2)) / TILE_TOKENS;
  return p;
}

// Queries that the store kernel has rotated.
inline void add_queries(AttentionParams& p, const TensorView& query,
                        const TensorView& query_scale, DLDevice device) {
  check_dtype("query", query, kFloat16);
  check_size("query", query, 2, HEAD_SIZE);
  check_contiguous("query", query);
  check_address("query", query, sizeof(__half2));
  check_dtype("query_scale", query_scale, kFloat32);
  check_contiguous("query_scale", query_scale);
  check_device(device, query, query_scale);
  p.query = static_cast<const __half*>(query.data_ptr());
  p.query_scale = static_cast<const float*>(query_scale.data_ptr());
}

// Queries as the model has them, [T, Hq, D].
inline void add_original_queries(AttentionParams& p, const char* name,
                                 const TensorView& query, int64_t num_tokens,
                                 int64_t num_heads, DLDevice device) {
  check_device(device, query);
  p.is_bf16 = query.dtype() == kBFloat16;
  if (!p.is_bf16) check_dtype(name, query, kFloat16);
  check_vectors(name, query, HEAD_SIZE);
  check_size(name, query, 0, num_tokens);
  check_size(name, query, 1, num_heads);
  p.original_query = query.data_ptr();
  p.original_strides = strides_of(query);
}

inline void add_partials(AttentionParams& p, const TensorView& query,
                         const TensorView& partial,
                         const TensorView& partial_lse) {
  check_device(query.device(), partial, partial_lse);
  p.partial = static_cast<float*>(partial.data_ptr());
  p.partial_lse = static_cast<float*>(partial_lse.data_ptr());
  p.num_splits = check_partials(partial, partial_lse, query.size(1), HEAD_SIZE,
                                p.num_seqs, p.query_len);
}

// original_query: the query as the model has it, [T, Hq, D].
inline void add_offset(AttentionParams& p, const TensorView& query,
                       const TensorView& kv_cache,
                       const Optional<TensorView>& original_query,
                       const Optional<TensorView>& key_offset,
                       double offset_factor) {
  const DLDevice device = kv_cache.device();
  p.key_offset = key_offset_of(key_offset, kv_cache.size(1), HEAD_SIZE,
                               KEY_OFFSET, device, p.num_offsets);
  if (p.key_offset == nullptr) return;
  TVM_FFI_CHECK(original_query.has_value(), ValueError)
      << "original_query: missing, though there is a key_offset";
  add_original_queries(p, "original_query", original_query.value(),
                       query.size(0), query.size(1), device);
  p.offset_factor = static_cast<float>(offset_factor);
}

// Check the tensors and launch a kernel.
//
// Instance: see blocks_of. It also has kThreads, the kernel's threads per
//   block.
template <typename Instance>
void attend_to_pages(TensorView query, TensorView query_scale,
                     TensorView kv_cache, TensorView block_table,
                     TensorView seq_lens, TensorView partial,
                     TensorView partial_lse,
                     Optional<TensorView> query_start_loc, int64_t num_seqs,
                     int64_t query_len, bool with_raw,
                     Optional<TensorView> packed_lens,
                     Optional<TensorView> original_query,
                     Optional<TensorView> key_offset, double offset_factor,
                     int64_t sliding_window, double soft_cap, bool enable_pdl) {
  check_axes("query", query, 3);
  AttentionParams p =
      params_of(query.size(1), kv_cache, block_table, seq_lens, query_start_loc,
                num_seqs, query_len, with_raw, packed_lens, sliding_window);
  add_queries(p, query, query_scale, kv_cache.device());
  add_partials(p, query, partial, partial_lse);
  add_offset(p, query, kv_cache, original_query, key_offset, offset_factor);
  p.soft_cap = soft_cap_of(soft_cap, SOFT_CAP);
  const DLDevice device = kv_cache.device();
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  launch(Instance::kKernel, blocks_of<Instance>(device.device_id),
         Instance::kThreads, Instance::kSharedBytes, device, p, enable_pdl);
}

}  // namespace turbo
