// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The soft cap of attention logits, from exp2: tanh.approx.f32 is off by 2^-11,
// 0.02 of a score near a cap of 50. Here an error is up to about 2^-22 of the
// cap, a rounding or two of a score near it, also where scores are small.
#pragma once

#include "common/numbers.cuh"
#include "common/soft_cap.cuh"

namespace turbo {

// cap - 2 cap / (e^(2 s / cap) + 1); of -inf -cap, so that what is not seen has
// to be left out behind it.
__device__ __forceinline__ float SoftCap::operator()(float score) const {
  const float power = exp2_approx(factor * score);
  return fmaf(-2.0f * cap, reciprocal_approx(power + 1.0f), cap);
}

}  // namespace turbo
