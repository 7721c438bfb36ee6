// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A module's instance of the kernel for many queries. extend_wgmma.py defines
// ROWS_CONSUMERS and so on, a macro per number of a RowsPlan, and includes
// turbo_constants.h of the layout.
#pragma once

#include <type_traits>

#include "common/attention_entry.cuh"
#include "extend_wgmma/extend_wgmma.cuh"

namespace {

template <typename Params>
struct RowsInstance {
  using Plan =
      turbo::RowsPlan<ROWS_CONSUMERS, ROWS_PRODUCERS, ROWS_BLOCKS, ROWS_TILES,
                      ROWS_STAGES, ROWS_COPIES, ROWS_REGISTERS,
                      ROWS_HOLDS_QUERIES, ROWS_ROW_TILES, ROWS_OVERLAPS,
                      std::is_same_v<Params, turbo::OutputParams>>;
  static constexpr int kThreads = Plan::kThreads;
  static constexpr size_t kSharedBytes = sizeof(turbo::RowsShared<Plan>);
  static_assert(Plan::kBlocks * (kSharedBytes + 1024) <= 228 * 1024);
  static constexpr auto kKernel = turbo::extend_wgmma_kernel<Plan, Params>;
  static int num_blocks() { return Plan::kBlocks; }
};

}  // namespace
