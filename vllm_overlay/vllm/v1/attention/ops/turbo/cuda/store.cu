// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The store's entry point: called through ctypes by cuda_store.py.
#include "store.cuh"

// parts: lanes that share a scale group; 1 for many tokens.
extern "C" int turbo_store(const turbo::StoreParams* params, int is_bf16,
                           int parts, int threads, void* stream) {
  const auto launch = parts == 1   ? turbo::store<1>
                      : parts == 2 ? turbo::store<2>
                                   : turbo::store<4>;
  return launch(*params, is_bf16 != 0, threads,
                static_cast<cudaStream_t>(stream));
}
