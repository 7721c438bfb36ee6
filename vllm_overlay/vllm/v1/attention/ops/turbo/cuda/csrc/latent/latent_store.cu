// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The entry point of MLA's store. A module includes turbo_constants.h of its
// layout.
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "common/launch.cuh"
#include "latent/pages.cuh"
#include "latent/store.cuh"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Check rows [>= T, size] in the model's dtype, which has 16 bits.
//
// elements: the elements that are loaded at once.
const uint16_t* rows_of(const char* name, const TensorView& x, bool is_bf16,
                        int64_t num_tokens, int64_t size, int64_t elements) {
  turbo::check_shape(name, x, is_bf16 ? turbo::kBFloat16 : turbo::kFloat16,
                     {turbo::kAnySize, size});
  turbo::check_last_axis(name, x);
  turbo::check_stride(name, x, 0, elements);
  turbo::check_address(name, x, elements * sizeof(uint16_t));
  TVM_FFI_CHECK(x.size(0) >= num_tokens, ValueError)
      << name << ": of " << x.size(0) << " tokens, not " << num_tokens;
  return static_cast<const uint16_t*>(x.data_ptr());
}

template <int kParts>
void launch_store(turbo::LatentStoreParams p, bool is_bf16, DLDevice device,
                  bool enable_pdl) {
  constexpr int kLatents = turbo::LatentShare<kParts>::kLatents;
  constexpr int kRopes = turbo::kBlockRopes;
  p.latent_blocks = (p.num_tokens + kLatents - 1) / kLatents;
  const int rope_blocks =
      turbo::kHasRope ? (p.num_tokens + kRopes - 1) / kRopes : 0;
  const auto kernel = is_bf16 ? turbo::latent_store_kernel<true, kParts>
                              : turbo::latent_store_kernel<false, kParts>;
  turbo::launch(kernel, p.latent_blocks + rope_blocks, turbo::kStoreThreads, 0,
                device, p, enable_pdl);
}

// See LatentStoreParams and latent_store.py for shapes and dtypes.
void latent_store(TensorView kv_cache, TensorView slot_mapping, TensorView kv_c,
                  Optional<TensorView> k_pe, TensorView tables,
                  Optional<TensorView> mean, int64_t parts, bool enable_pdl) {
  const DLDevice device = kv_cache.device();
  turbo::check_latent_pages(kv_cache);
  turbo::to_int("kv_cache", kv_cache.size(0) * kv_cache.size(1));  // slots
  turbo::check_device(device, slot_mapping, kv_c, tables);
  const int64_t* slots = turbo::slots_of(slot_mapping);
  turbo::check_contiguous("tables", tables);
  turbo::check_address("tables", tables, sizeof(uint4));
  const int64_t num_tokens = slot_mapping.size(0);
  const int block_size = turbo::to_int("kv_cache", kv_cache.size(1));
  const bool is_bf16 = kv_c.dtype() == turbo::kBFloat16;
  turbo::LatentStoreParams p(block_size);
  p.kv_c = rows_of("kv_c", kv_c, is_bf16, num_tokens, LATENT_RANK,
                   2 * turbo::kVectorElements);
  p.stride_kv_c_token = kv_c.stride(0);
  TVM_FFI_CHECK(k_pe.has_value() == turbo::kHasRope, ValueError)
      << "k_pe: the module is of " << ROPE_SIZE << " rotary coordinates";
  if (k_pe.has_value()) {
    turbo::check_device(device, k_pe.value());
    p.k_pe = rows_of("k_pe", k_pe.value(), is_bf16, num_tokens, ROPE_SIZE,
                     turbo::kVectorElements);
    p.stride_k_pe_token = k_pe.value().stride(0);
  }
  p.kv_cache = static_cast<uint8_t*>(kv_cache.data_ptr());
  p.slot_mapping = slots;
  p.tables = static_cast<const uint4*>(tables.data_ptr());
  p.mean = turbo::latent_mean_of("mean", mean, device);
  p.stride_cache_block = kv_cache.stride(0);
  p.num_tokens = turbo::to_int("slot_mapping", num_tokens);
  if (p.num_tokens == 0) return;
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const auto launch = parts == 1 ? launch_store<1> : launch_store<4>;
  launch(p, is_bf16, device, enable_pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(latent_store, latent_store);
