// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The parameters of the soft cap of attention logits: a score s becomes
// cap * tanh(s / cap). common/cap_scores.cuh has the function.
#pragma once

namespace turbo {

struct SoftCap {
  float cap;     // in base 2, as scores are
  float factor;  // 2 log2(e) / cap

  __device__ __forceinline__ float operator()(float score) const;
};

}  // namespace turbo
