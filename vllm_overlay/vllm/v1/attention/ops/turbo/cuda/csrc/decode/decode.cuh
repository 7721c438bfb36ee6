// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention over pages of the turbo format: the warps of each segment.
#pragma once

#include "decode/partition.cuh"
#include "decode/segment.cuh"

namespace turbo {

// Attend to a range, which has segments of one or more sequences.
template <int kQueries, int kWarps>
__device__ __forceinline__ void attend_range(
    DecodeShared<kQueries, kWarps>& shared, const AttentionParams& p,
    const Partition& cut, int num_passes, const Team& team, int index) {
  const int lane = threadIdx.x % 32;
  const int head_passes = num_passes / p.num_kv_heads;
  const int first = index * cut.range;
  const int last = first + cut.range;
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < p.num_seqs && before < last; base += 32) {
    const int tiles = known_tiles(p, base + lane);
    const int counted = cut.counted(tiles);
    const int end = before + inclusive_sum(counted, lane) * num_passes;
    const int begin = end - counted * num_passes;
    uint32_t overlapping =
        __ballot_sync(~0u, begin < last && end > first && tiles > 0);
#pragma unroll 1
    for (; overlapping != 0; overlapping &= overlapping - 1) {
      const int i = __ffs(overlapping) - 1;
      const int seq = base + i;
      const int seq_tiles = __shfl_sync(~0u, tiles, i);
      const int pass_tiles = cut.counted(seq_tiles);
      const int seq_first = __shfl_sync(~0u, begin, i);
      int pass = max(first - seq_first, 0) / pass_tiles;
#pragma unroll 1
      for (; pass < num_passes; ++pass) {
        const int start = seq_first + pass * pass_tiles;
        if (start >= last) break;
        const int kv_head = pass / head_passes;
        Segment segment;
        segment.seq = seq;
        segment.kv_head = kv_head;
        segment.first_column = pass % head_passes * kQueries;
        segment.cache = p.kv_cache + kv_head * p.stride_cache_head;
        segment.num_tokens = p.num_tokens(seq);
        const int end = (segment.num_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
        const int known_tokens = p.num_tokens(seq, p.known_lens);
        const int known_end = (known_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
        const int pass_first = known_end - seq_tiles;
        segment.first_tile = pass_first + max(first - start, 0);
        segment.last_tile = min(pass_first + last - start, end);
        // The segment is past the tokens that are read here. The split with the
        // last token marks the partial result of this one. skip_empty marks
        // those of a sequence without tokens.
        if (segment.first_tile >= segment.last_tile) continue;
        if constexpr (KEY_OFFSET != 0)
          segment.first_seen_tile = SeenTokens(p, seq).first_tile();
        segment.split = index - start / cut.range;
        segment.ends = segment.last_tile == end;
        attend_segment<kQueries>(shared, p, segment, team);
      }
    }
    before = __shfl_sync(~0u, end, 31);
  }
}

template <int kQueries, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 1)
    decode_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared =
      *reinterpret_cast<DecodeShared<kQueries, kWarps>*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head_passes = (p.num_columns() + kQueries - 1) / kQueries;
  const int num_passes = p.num_kv_heads * head_passes;

  // The previous kernel stores the queries. One that writes lengths also writes
  // data that the next kernel reads without waiting.
  if (!p.lens_are_new) start_next_kernel();
  const Partition cut = partition(p, num_passes, int(gridDim.x) * kWarps, lane);
  wait_for_previous_kernel();
  if (p.lens_are_new) start_next_kernel();
  const Team team(cut.team_size);
  const int num_teams = int(gridDim.x) * kWarps / cut.team_size;
  // Each scheduler of all multiprocessors gets a warp before any gets a second.
  // A few ranges are then done sooner, and blocks without a range make room for
  // the next kernel.
  const int place = warp / kTeamWarps * int(gridDim.x) + int(blockIdx.x);
  int index = (place * kTeamWarps + warp % kTeamWarps) / cut.team_size;
#pragma unroll 1
  for (; index < cut.num_ranges; index += num_teams) {
    attend_range<kQueries>(shared, p, cut, num_passes, team, index);
  }
  skip_empty<kWarps>(p, warp, lane);
}

}  // namespace turbo
