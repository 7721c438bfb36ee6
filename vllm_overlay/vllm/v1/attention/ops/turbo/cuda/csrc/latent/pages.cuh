// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Checks of MLA's pages and mean in entry points, on the host.
#pragma once

#include "common/tensors.cuh"

namespace turbo {

// Check pages [num_blocks, N, C] of bytes: whole tiles, each aligned.
inline void check_latent_pages(const TensorView& x) {
  check_shape("kv_cache", x, kBytes,
              {kAnySize, kAnySize, TILE_BYTES / TILE_TOKENS});
  check_last_axis("kv_cache", x);
  TVM_FFI_CHECK(x.size(1) > 0 && x.size(1) % TILE_TOKENS == 0, ValueError)
      << "kv_cache: blocks of " << x.size(1) << " tokens, no multiple of "
      << TILE_TOKENS;
  TVM_FFI_CHECK(x.stride(1) == x.size(2), ValueError)
      << "kv_cache: tokens are " << x.stride(1) << " bytes apart, not "
      << x.size(2);
  check_stride("kv_cache", x, 0, kPageAlignment);
  check_address("kv_cache", x, kPageAlignment);
}

// Check the mean of latents, [LATENT_RANK] of fp32; null for none.
inline const float* latent_mean_of(const char* name,
                                   const Optional<TensorView>& mean,
                                   DLDevice device) {
  if (!mean.has_value()) return nullptr;
  const TensorView& x = mean.value();
  check_device(device, x);
  check_shape(name, x, kFloat32, {LATENT_RANK});
  check_last_axis(name, x);
  check_address(name, x, sizeof(float4));
  return static_cast<const float*>(x.data_ptr());
}

}  // namespace turbo
