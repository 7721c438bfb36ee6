// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The window kernel's entry point. A module is of one layout, that of
// turbo_constants.h, which constants.py makes.
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <algorithm>

#include "common/launch.cuh"
#include "common/window_entry.cuh"
#include "window/window.cuh"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Blocks of a sequence, at most.
constexpr int64_t kMaxSequenceBlocks = 8;

// See turbo::WindowParams and window.py for shapes and types.
void window(TensorView kv_cache, TensorView slot_mapping, TensorView key,
            TensorView value, Optional<TensorView> key_offset,
            TensorView window_pages, TensorView window_blocks,
            TensorView packed_lens, int64_t num_rows, int64_t keys,
            int64_t values, int64_t key_scales, int64_t value_scales,
            int64_t tags, int64_t places, int64_t num_window_tokens,
            TensorView block_table, TensorView seq_lens,
            TensorView query_start_loc) {
  turbo::check_pages("kv_cache", kv_cache, TILE_TOKENS, TILE_BYTES);
  turbo::check_dtype("slot_mapping", slot_mapping, turbo::kInt64);
  turbo::check_axes("slot_mapping", slot_mapping, 1);
  turbo::check_last_axis("slot_mapping", slot_mapping);
  const DLDevice device = kv_cache.device();
  turbo::check_device(device, slot_mapping, key, value, packed_lens,
                      block_table, seq_lens, query_start_loc);
  const int64_t num_tokens = slot_mapping.size(0);
  const int64_t num_kv_heads = kv_cache.size(1);
  turbo::check_axes("seq_lens", seq_lens, 1);
  const int64_t num_seqs = seq_lens.size(0);
  const bool is_bf16 = key.dtype().code == kDLBfloat;
  turbo::WindowParams p = {};
  static_cast<turbo::WindowPages&>(p) = turbo::window_pages_of(
      window_pages, window_blocks, num_seqs, num_kv_heads, num_rows, keys,
      values, key_scales, value_scales, device);
  p.tags = turbo::plane_of("window tags", window_pages, tags, num_rows,
                           KEY_CODE_BYTES);
  p.places = turbo::plane_of("window places", window_pages, places, num_rows,
                             sizeof(int));
  p.kv_cache = static_cast<const uint8_t*>(kv_cache.data_ptr());
  p.slot_mapping = static_cast<const int64_t*>(slot_mapping.data_ptr());
  p.key = turbo::vectors_of("key", key, is_bf16, num_tokens, num_kv_heads,
                            HEAD_SIZE);
  p.value = turbo::vectors_of("value", value, is_bf16, num_tokens, num_kv_heads,
                              HEAD_SIZE);
  turbo::check_dtype("block_table", block_table, turbo::kInt32);
  turbo::check_axes("block_table", block_table, 2);
  turbo::check_last_axis("block_table", block_table);
  TVM_FFI_CHECK(block_table.size(0) >= num_seqs, ValueError)
      << "block_table: " << block_table.size(0) << " rows, not " << num_seqs;
  p.block_table = static_cast<const int*>(block_table.data_ptr());
  p.seq_lens = turbo::ints_of("seq_lens", seq_lens, num_seqs);
  p.query_start_loc =
      turbo::ints_of("query_start_loc", query_start_loc, num_seqs + 1);
  p.packed_lens =
      const_cast<int*>(turbo::ints_of("packed_lens", packed_lens, num_seqs));
  p.key_offset =
      turbo::key_offset_of(key_offset, num_kv_heads, HEAD_SIZE,
                           key_offset.has_value(), device, p.num_offsets);
  p.stride_cache_block = kv_cache.stride(0);
  p.stride_cache_head = kv_cache.stride(1);
  p.stride_key_token = key.stride(0);
  p.stride_key_head = key.stride(1);
  p.stride_value_token = value.stride(0);
  p.stride_value_head = value.stride(1);
  p.stride_block_table = block_table.stride(0);
  p.num_window_tokens = turbo::to_int("num_window_tokens", num_window_tokens);
  p.num_tokens = turbo::to_int("slot_mapping", num_tokens);
  p.num_kv_heads = turbo::to_int("kv_cache", num_kv_heads);
  p.block_size = turbo::to_int("kv_cache", kv_cache.size(2));
  if (num_seqs == 0) return;
  // More blocks where sequences have more tokens.
  const int64_t blocks = std::clamp((num_tokens + num_seqs - 1) / num_seqs,
                                    int64_t{1}, kMaxSequenceBlocks);
  const dim3 grid(turbo::to_int("seq_lens", num_seqs), unsigned(blocks));
  const auto kernel = is_bf16 ? turbo::window_kernel<__nv_bfloat16>
                              : turbo::window_kernel<__half>;
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  turbo::launch(kernel, grid, turbo::kWindowThreads, 0, device, p);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(window, window);
