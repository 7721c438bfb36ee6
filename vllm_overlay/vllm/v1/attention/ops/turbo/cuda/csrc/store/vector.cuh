// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the encoder of K and V has.
#pragma once

#include "store/params.cuh"
#include "store/quantize.cuh"

namespace turbo {

struct Tables {
  SideTables<true> key;
  SideTables<false> value;
};

}  // namespace turbo
