// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The merge kernel's entry point. A module is of one head size, that of
// turbo_merge_constants.h, which cuda_merge.py generates.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "launch.cuh"
#include "merge.cuh"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using Kernel = void (*)(turbo::MergeParams);

template <typename T>
Kernel kernel_of(bool with_newest) {
  return with_newest ? turbo::merge_kernel<T, true>
                     : turbo::merge_kernel<T, false>;
}

Kernel kernel_of(DLDataType dtype, bool with_newest) {
  if (dtype.code == kDLBfloat) return kernel_of<__nv_bfloat16>(with_newest);
  return dtype.bits == 16 ? kernel_of<__half>(with_newest)
                          : kernel_of<float>(with_newest);
}

// See turbo::MergeParams and cuda_merge.py for shapes and types.
void merge(TensorView partial, TensorView partial_lse, TensorView seq_lens,
           TensorView output, TensorView query, TensorView key,
           TensorView value, int64_t num_kv_heads, bool with_newest,
           double score_factor, Optional<TensorView> query_start_loc,
           int64_t num_seqs, int64_t query_len, int64_t row_shift) {
  turbo::MergeParams p;
  p.partial = static_cast<const float*>(partial.data_ptr());
  p.partial_lse = static_cast<const float*>(partial_lse.data_ptr());
  p.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  p.output = output.data_ptr();
  p.query = query.data_ptr();
  p.key = key.data_ptr();
  p.value = value.data_ptr();
  p.stride_output_token = output.stride(0);
  p.stride_output_head = output.stride(1);
  p.stride_query_token = query.stride(0);
  p.stride_query_head = query.stride(1);
  p.stride_key_token = key.stride(0);
  p.stride_key_head = key.stride(1);
  p.stride_value_token = value.stride(0);
  p.stride_value_head = value.stride(1);
  p.score_factor = static_cast<float>(score_factor);
  p.num_heads = static_cast<int>(output.size(1));
  p.group = p.num_heads / static_cast<int>(num_kv_heads);
  p.query_start_loc = nullptr;
  if (query_start_loc.has_value()) {
    p.query_start_loc =
        static_cast<const int*>(query_start_loc.value().data_ptr());
  }
  p.query_len = static_cast<int>(query_len);
  p.num_queries = p.query_len * p.num_heads;
  p.num_splits = static_cast<int>(partial.size(0) / (num_seqs * query_len));
  p.row_shift = static_cast<int>(row_shift);

  const int rows = turbo::kMergeWarps >> p.row_shift;
  const dim3 grid(num_seqs, (p.num_queries + rows - 1) / rows);
  turbo::launch(kernel_of(output.dtype(), with_newest), grid,
                turbo::kMergeThreads, 0, output.device(), p);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, merge);
