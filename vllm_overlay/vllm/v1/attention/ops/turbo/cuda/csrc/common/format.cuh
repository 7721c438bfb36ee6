// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decoding of the turbo format in registers. The constants come from
// turbo_constants.h, which constants.py makes of format.py.
#pragma once

#include "common/value_levels.cuh"
#include "turbo_constants.h"

namespace turbo {

// The byte table KEY_NEGATIVE or KEY_POSITIVE, by four 4-bit codes.
//
// prmt takes a nibble below 8 as an index; of a nibble from 8 it gives the sign
// of the byte. Negative levels (codes below 8) are looked up by the codes, the
// others by their complements. The sum of both bytes is KEY_LEVEL_UNIT * level:
// the sign byte is -1 in the first table, whose counterpart is one too large,
// and 0 in the second. The tensor core adds their products, so nothing has to
// join the two.
__device__ __forceinline__ uint32_t negative_levels(uint32_t codes) {
  return permute(KEY_NEGATIVE_LOW, KEY_NEGATIVE_HIGH, codes);
}

__device__ __forceinline__ uint32_t positive_levels(uint32_t complements) {
  return permute(KEY_POSITIVE_LOW, KEY_POSITIVE_HIGH, complements);
}

}  // namespace turbo
