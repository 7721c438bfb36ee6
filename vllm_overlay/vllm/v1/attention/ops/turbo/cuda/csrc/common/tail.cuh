// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Pages of the tail. They hold the newest tokens of running sequences
// in 8 bits: see formats/tail.py.
#pragma once

#include <cstdint>

#include "turbo_constants.h"

namespace turbo {

// Groups of coordinates that share a scale in a row.
constexpr int kTailGroups = HEAD_SIZE / SCALE_GROUP;

struct TailPages {
  uint8_t* pages;     // [num_blocks, H, N, C]
  const int* blocks;  // [B], a block per sequence; 0 for none
  int64_t stride_block;
  int64_t stride_head;
  int num_rows;  // R, up to TAIL_MAX_ROWS
  // Where planes begin in a page: K, V, and their scales.
  int keys, values, key_scales, value_scales;

  __device__ __forceinline__ uint8_t* page(int block, int kv_head) const {
    return pages + block * stride_block + kv_head * stride_head;
  }
};

}  // namespace turbo
