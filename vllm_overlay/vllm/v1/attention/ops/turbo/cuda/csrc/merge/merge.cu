// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The merge kernel's entry point. A module has one head size, from
// turbo_constants.h, which constants.py makes.
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "common/launch.cuh"
#include "common/tail_entry.cuh"
#include "merge/merge.cuh"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using Kernel = void (*)(turbo::MergeParams);

template <typename T>
Kernel kernel_of(bool with_raw, bool with_tail) {
  if (with_tail) return turbo::merge_kernel<T, true, true>;
  return with_raw ? turbo::merge_kernel<T, true>
                  : turbo::merge_kernel<T, false>;
}

Kernel kernel_of(const TensorView& output, bool with_raw, bool with_tail) {
  const DLDataType dtype = output.dtype();
  if (dtype == turbo::kBFloat16)
    return kernel_of<__nv_bfloat16>(with_raw, with_tail);
  if (dtype == turbo::kFloat16) return kernel_of<__half>(with_raw, with_tail);
  turbo::check_dtype("output", output, turbo::kFloat32);
  return kernel_of<float>(with_raw, with_tail);
}

// Check vectors [T, heads, D] in the output's dtype.
void check_tokens(const char* name, const TensorView& x, DLDataType dtype,
                  int64_t num_heads) {
  turbo::check_dtype(name, x, dtype);
  turbo::check_vectors(name, x, HEAD_SIZE);
  turbo::check_size(name, x, 1, num_heads);
}

// See turbo::MergeParams and merge.py for shapes and dtypes.
void merge(TensorView partial, TensorView partial_lse, TensorView seq_lens,
           TensorView output, TensorView query, TensorView key,
           TensorView value, int64_t num_kv_heads, bool with_raw,
           double score_factor, Optional<TensorView> query_start_loc,
           int64_t num_seqs, int64_t query_len, int64_t row_shift,
           Optional<TensorView> tail_pages, Optional<TensorView> tail_blocks,
           Optional<TensorView> packed_lens, int64_t num_rows, int64_t keys,
           int64_t values, int64_t key_scales, int64_t value_scales,
           Optional<TensorView> key_offset, int64_t sliding_window,
           Optional<TensorView> sinks, double soft_cap,
           Optional<TensorView> lse, Optional<TensorView> raw_output,
           Optional<TensorView> raw_lse, bool enable_pdl) {
  const int64_t num_heads = output.size(1);
  const DLDataType dtype = output.dtype();
  TVM_FFI_CHECK(num_heads % num_kv_heads == 0, ValueError)
      << "output: " << num_heads << " heads, no multiple of " << num_kv_heads;
  check_tokens("output", output, dtype, num_heads);
  check_tokens("query", query, dtype, num_heads);
  if (with_raw) {
    check_tokens("key", key, dtype, num_kv_heads);
    check_tokens("value", value, dtype, num_kv_heads);
  }
  const DLDevice device = output.device();
  turbo::check_device(device, output, partial, partial_lse, seq_lens, query,
                      key, value);
  turbo::MergeParams p = {};
  p.partial = static_cast<const float*>(partial.data_ptr());
  p.partial_lse = static_cast<const float*>(partial_lse.data_ptr());
  p.seq_lens = turbo::ints_of("seq_lens", seq_lens, num_seqs);
  p.output = output.data_ptr();
  p.query = query.data_ptr();
  p.key = key.data_ptr();
  p.value = value.data_ptr();
  p.output_strides = turbo::strides_of(output);
  p.query_strides = turbo::strides_of(query);
  p.key_strides = turbo::strides_of(key);
  p.value_strides = turbo::strides_of(value);
  p.score_factor = static_cast<float>(score_factor);
  p.num_heads = turbo::to_int("output", num_heads);
  p.heads_per_kv = p.num_heads / static_cast<int>(num_kv_heads);
  p.query_start_loc = turbo::starts_of(query_start_loc, num_seqs, device);
  p.query_len = turbo::to_int("query_len", query_len);
  p.num_queries = p.query_len * p.num_heads;
  p.num_splits = turbo::check_partials(partial, partial_lse, num_heads,
                                       HEAD_SIZE, num_seqs, query_len);
  TVM_FFI_CHECK(p.num_splits <= MAX_SPLITS, ValueError)
      << "partial: " << p.num_splits << " splits, more than " << MAX_SPLITS;
  p.row_shift = static_cast<int>(row_shift);
  p.with_raw = with_raw;
  if (raw_lse.has_value()) {
    TVM_FFI_CHECK(with_raw && raw_output.has_value(), ValueError)
        << "raw_lse: given without the raw tokens or their output";
    const TensorView& x = raw_output.value();
    const TensorView& y = raw_lse.value();
    check_tokens("raw_output", x, dtype, num_heads);
    turbo::check_size("raw_output", x, 0, output.size(0));
    turbo::check_shape("raw_lse", y, turbo::kFloat32,
                       {num_heads, output.size(0)});
    turbo::check_last_axis("raw_lse", y);
    turbo::check_device(device, x, y);
    p.raw_output = x.data_ptr();
    p.raw_lse = static_cast<const float*>(y.data_ptr());
    p.raw_strides = turbo::strides_of(x);
    p.stride_raw_lse = y.stride(0);
  }
  p.sliding_window = turbo::sliding_window_of(sliding_window);
  p.soft_cap = turbo::soft_cap_of(soft_cap, SOFT_CAP);
  TVM_FFI_CHECK(!(SOFT_CAP && key_offset.has_value()), ValueError)
      << "key_offset: given with a soft_cap";
  p.sinks = turbo::sinks_of(sinks, num_heads, device);
  const bool with_tail = tail_pages.has_value();
  if (lse.has_value()) {
    const TensorView& x = lse.value();
    TVM_FFI_CHECK(!with_raw && !with_tail && !sinks.has_value(), ValueError)
        << "lse: given with more than the partial results";
    turbo::check_dtype("output", output, turbo::kFloat32);
    turbo::check_shape("lse", x, turbo::kFloat32,
                       {num_seqs * query_len, num_heads});
    turbo::check_size("output", output, 0, num_seqs * query_len);
    turbo::check_contiguous("output", output);
    turbo::check_contiguous("lse", x);
    turbo::check_device(device, x);
    p.lse = static_cast<float*>(x.data_ptr());
  }
  if (with_tail) {
    TVM_FFI_CHECK(with_raw, ValueError)
        << "tail_pages: given without the raw tokens";
    TVM_FFI_CHECK(tail_blocks.has_value() && packed_lens.has_value(),
                  ValueError)
        << "tail_blocks, packed_lens: missing, though there are tail_pages";
    p.tail = turbo::tail_pages_of(tail_pages.value(), tail_blocks.value(),
                                  num_seqs, num_kv_heads, num_rows, keys,
                                  values, key_scales, value_scales, device);
    turbo::check_device(device, packed_lens.value());
    p.packed_lens =
        turbo::ints_of("packed_lens", packed_lens.value(), num_seqs);
    p.num_kv_heads = turbo::to_int("key", num_kv_heads);
    p.key_offset =
        turbo::key_offset_of(key_offset, num_kv_heads, HEAD_SIZE,
                             key_offset.has_value(), device, p.num_offsets);
  }

  const int rows = turbo::kMergeWarps >> p.row_shift;
  const dim3 grid(turbo::to_int("num_seqs", num_seqs),
                  (p.num_queries + rows - 1) / rows);
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const bool with_more = with_raw || sinks.has_value();
  turbo::launch(kernel_of(output, with_more, with_tail), grid,
                turbo::kMergeThreads, 0, device, p, enable_pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, merge);
