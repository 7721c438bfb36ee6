// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The gather kernel's entry point. A module includes turbo_constants.h of its
// layout.
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "common/launch.cuh"
#include "latent/gather.cuh"
#include "latent/pages.cuh"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using GatherKernel = void (*)(turbo::LatentGatherParams);

GatherKernel kernel_of(DLDataType dtype) {
  if (dtype == turbo::kBFloat16)
    return turbo::latent_gather_kernel<__nv_bfloat16>;
  if (dtype == turbo::kFloat16) return turbo::latent_gather_kernel<__half>;
  TVM_FFI_CHECK(dtype == turbo::kFloat32, TypeError)
      << "output: of " << dtype << ", not of bf16, fp16 or fp32";
  return turbo::latent_gather_kernel<float>;
}

// See LatentGatherParams and latent_gather.py for shapes and dtypes.
void latent_gather(TensorView kv_cache, TensorView output,
                   TensorView block_table, TensorView cu_seq_lens,
                   TensorView token_to_seq, int64_t num_tokens,
                   Optional<TensorView> seq_starts, Optional<TensorView> mean,
                   bool enable_pdl) {
  const DLDevice device = kv_cache.device();
  turbo::check_latent_pages(kv_cache);
  turbo::check_device(device, kv_cache, output, block_table, cu_seq_lens,
                      token_to_seq);
  const GatherKernel kernel = kernel_of(output.dtype());
  turbo::check_axes("output", output, 2);
  turbo::check_size("output", output, 1, LATENT_RANK + ROPE_SIZE);
  turbo::check_last_axis("output", output);
  turbo::check_stride("output", output, 0, turbo::kVectorElements);
  turbo::check_address("output", output,
                       turbo::kVectorElements * (output.dtype().bits / 8));
  TVM_FFI_CHECK(output.size(0) >= num_tokens, ValueError)
      << "output: " << output.size(0) << " rows, not " << num_tokens;
  turbo::LatentGatherParams p = {};
  p.kv_cache = static_cast<const uint8_t*>(kv_cache.data_ptr());
  p.output = output.data_ptr();
  p.block_table = turbo::block_table_of(block_table, 0);
  p.cu_seq_lens = turbo::ints_of("cu_seq_lens", cu_seq_lens, 1);
  p.token_to_seq = turbo::ints_of("token_to_seq", token_to_seq, num_tokens);
  if (seq_starts.has_value()) {
    turbo::check_device(device, seq_starts.value());
    p.seq_starts = turbo::ints_of("seq_starts", seq_starts.value(), 1);
  }
  p.mean = turbo::latent_mean_of("mean", mean, device);
  p.stride_cache_block = kv_cache.stride(0);
  p.stride_output_token = output.stride(0);
  p.stride_block_table = turbo::to_int("block_table", block_table.stride(0));
  p.block_size = turbo::to_int("kv_cache", kv_cache.size(1));
  p.num_tokens = turbo::to_int("num_tokens", num_tokens);
  TVM_FFI_CHECK(num_tokens == 0 || block_table.size(0) > 0, ValueError)
      << "block_table: no sequence";
  const dim3 grid((p.num_tokens + turbo::kGatherWarps - 1) /
                  turbo::kGatherWarps);
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  turbo::launch(kernel, grid, turbo::kGatherThreads, 0, device, p, enable_pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(latent_gather, latent_gather);
