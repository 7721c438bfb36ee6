// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Checks of the tail's tensors in entry points, on the host.
#pragma once

#include "common/tensors.cuh"
#include "common/tail.cuh"

namespace turbo {

// Check that a plane of the pages begins at a multiple of 16 bytes, which are
// loaded at once, and ends inside a page.
//
// width: bytes of a row.
inline int plane_of(const char* name, const TensorView& pages, int64_t start,
                    int64_t num_rows, int64_t width) {
  const int64_t page_bytes = pages.size(2) * pages.size(3);
  TVM_FFI_CHECK(start >= 0 && start % kPageAlignment == 0 &&
                    start + num_rows * width <= page_bytes,
                ValueError)
      << name << ": " << num_rows << " rows of " << width << " bytes from "
      << start << " on, in pages of " << page_bytes;
  return static_cast<int>(start);
}

// See TailPages, and formats/tail.py for where planes begin.
inline TailPages tail_pages_of(const TensorView& pages,
                               const TensorView& blocks, int64_t num_seqs,
                               int64_t num_kv_heads, int64_t num_rows,
                               int64_t keys, int64_t values, int64_t key_scales,
                               int64_t value_scales, DLDevice device) {
  check_axes("tail_pages", pages, 4);
  check_pages("tail_pages", pages, 1, pages.size(3));
  check_size("tail_pages", pages, 1, num_kv_heads);
  TVM_FFI_CHECK(0 < num_rows && num_rows <= TAIL_MAX_ROWS, ValueError)
      << "tail_pages: " << num_rows << " rows, not 1 to " << TAIL_MAX_ROWS;
  TailPages w;
  w.pages = static_cast<uint8_t*>(pages.data_ptr());
  w.blocks = ints_of("tail_blocks", blocks, num_seqs);
  w.stride_block = pages.stride(0);
  w.stride_head = pages.stride(1);
  w.num_rows = static_cast<int>(num_rows);
  constexpr int kScales = 2 * kTailGroups;
  w.keys = plane_of("tail keys", pages, keys, num_rows, HEAD_SIZE);
  w.values = plane_of("tail values", pages, values, num_rows, HEAD_SIZE);
  w.key_scales =
      plane_of("tail key_scales", pages, key_scales, num_rows, kScales);
  w.value_scales =
      plane_of("tail value_scales", pages, value_scales, num_rows, kScales);
  check_device(device, pages, blocks);
  return w;
}

}  // namespace turbo
