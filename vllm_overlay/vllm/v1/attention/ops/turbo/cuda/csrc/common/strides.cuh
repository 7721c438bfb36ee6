// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The distances between a tensor's vectors.
#pragma once

#include <cstdint>

namespace turbo {

// Strides of [T, heads, D], in elements.
struct Strides {
  int64_t token, head;
};

}  // namespace turbo
