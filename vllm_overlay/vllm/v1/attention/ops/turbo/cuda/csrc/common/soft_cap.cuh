// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The soft cap of attention logits: a score s becomes cap * tanh(s / cap).
//
// From exp2, for tanh.approx.f32 is off by 2^-11: 0.02 of a score near a cap of
// 50. Here an error is up to about 2^-22 of the cap, a rounding or two of a
// score near it, also where scores are small.
#pragma once

#include "common/numbers.cuh"

namespace turbo {

struct SoftCap {
  float cap;     // in base 2, as scores are
  float factor;  // 2 log2(e) / cap

  // cap - 2 cap / (e^(2 s / cap) + 1); of -inf -cap, so that what is not seen
  // has to be left out behind it.
  __device__ __forceinline__ float operator()(float score) const {
    const float power = exp2_approx(factor * score);
    return fmaf(-2.0f * cap, reciprocal_approx(power + 1.0f), cap);
  }
};

}  // namespace turbo
