// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// How far vectors of a tensor are apart.
#pragma once

#include <cstdint>

namespace turbo {

// Of [T, heads, D], in elements.
struct Strides {
  int64_t token, head;
};

}  // namespace turbo
