// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The soft cap of attention logits, computed with exp2. The error of
// tanh.approx.f32, 2^-11, would be 0.02 of a score near a cap of 50. The error
// here is at most about 2^-22 of the cap, for small scores as well. It is one
// or two roundings of a score near the cap.
#pragma once

#include "common/numbers.cuh"
#include "common/soft_cap.cuh"

namespace turbo {

// cap - 2 cap / (e^(2 s / cap) + 1). A score of -inf becomes -cap, so hidden
// tokens are masked after the cap.
__device__ __forceinline__ float SoftCap::operator()(float score) const {
  const float power = exp2_approx(factor * score);
  return fmaf(-2.0f * cap, reciprocal_approx(power + 1.0f), cap);
}

}  // namespace turbo
