// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The number of warps that decode a tile.
#pragma once

#include "turbo_constants.h"

namespace turbo {

// Warps that attend to a tile together, each with a share of its coordinates. A
// share is as many neighbouring scale groups as registers have room for.
constexpr int kTileWarps = HEAD_SIZE <= 256 ? 1 : HEAD_SIZE / 256;

}  // namespace turbo
