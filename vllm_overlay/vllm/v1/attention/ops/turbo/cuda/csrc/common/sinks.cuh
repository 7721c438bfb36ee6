// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention sinks: a logit without a value per query head.
#pragma once

#include "common/numbers.cuh"
#include "turbo_constants.h"

namespace turbo {

// Floating-point dtypes of a tensor.
enum class Floats { kBFloat16, kHalf, kFloat };

struct Sinks {
  const void* logits;  // [Hq], or null: none
  Floats type;

  // The logit of a query head, as a score in base 2.
  __device__ __forceinline__ float load(int head) const {
    float logit;
    if (type == Floats::kFloat) {
      logit = static_cast<const float*>(logits)[head];
    } else {
      const auto bits = static_cast<const uint16_t*>(logits)[head];
      logit = type == Floats::kHalf ? half_as_float(bits)
                                    : __uint_as_float(uint32_t(bits) << 16);
    }
    return LOG2_E * logit;
  }
};

}  // namespace turbo
