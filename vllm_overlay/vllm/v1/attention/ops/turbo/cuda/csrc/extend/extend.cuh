// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention of sequences' last few dozen tokens to pages of the turbo format:
// which blocks attend to what.
#pragma once

#include "extend/ranges.cuh"
#include "extend/segment.cuh"

namespace turbo {

template <int kBlockColumns, int kWarps, int kStages>
__global__ void __launch_bounds__(32 * kWarps, kWarps > 4 ? 1 : 2)
    extend_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared =
      *reinterpret_cast<ExtendShared<kBlockColumns, kWarps, kStages>*>(
          shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Lengths are known before the kernel before this one, which stores the
  // queries, has ended, unless it writes them. Then it also writes what the
  // next kernel reads at once.
  if (p.lens_are_new) wait_for_previous_kernel();
  start_next_kernel();
  using Cut = Cuts<kBlockColumns, kStepTiles>;
  const Ranges cut = Cut::ranges(p, lane);
  if (threadIdx.x == 0) shared.ranges = cut;
  __syncthreads();
  const Ranges& ranges = shared.ranges;
  wait_for_previous_kernel();
#pragma unroll 1
  for (int index = blockIdx.x; index < ranges.count; index += int(gridDim.x)) {
    Cut::for_each_segment(p, ranges, index, [&](const Segment& segment) {
      attend_segment(shared, p, segment);
    });
  }
  skip_empty<kWarps>(p, warp, lane);
}

}  // namespace turbo
