// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decode attention over pages of the turbo format: which warps attend to what.
#pragma once

#include "segment.cuh"

namespace turbo {

__device__ __forceinline__ int num_tiles(const DecodeParams& p, int seq) {
  if (seq >= p.num_seqs) return 0;
  const int tokens = p.num_tokens(seq);
  return tokens > 0 ? (tokens + TILE_TOKENS - 1) / TILE_TOKENS : 0;
}

// How the tiles of all sequences and rows, in that order, are cut into ranges
// of one size, one a team of warps, so that the GPU is evenly busy whatever the
// lengths. If there are more, a team has several.
struct Partition {
  int team_size;
  int range;  // tiles
  int num_ranges;
  bool aligned;  // whether ranges begin where rows do: tiles are counted as if
                 // each row were a whole number of ranges

  // The tiles that a row of `tiles` counts as.
  __device__ __forceinline__ int counted(int tiles) const {
    return aligned ? (tiles + range - 1) / range * range : tiles;
  }
};

// Call f with the tiles of each of a lane's sequences. Their lengths are loaded
// side by side.
template <typename F>
__device__ __forceinline__ void for_each_length(const DecodeParams& p, int lane,
                                                F f) {
  constexpr int kSideBySide = 4;
#pragma unroll 1
  for (int base = lane; base < p.num_seqs; base += 32 * kSideBySide) {
    int tiles[kSideBySide];
#pragma unroll
    for (int i = 0; i < kSideBySide; ++i)
      tiles[i] = num_tiles(p, base + 32 * i);
#pragma unroll
    for (int i = 0; i < kSideBySide; ++i) f(tiles[i]);
  }
}

// A row is a KV head's queries of one pass. Teams are warps, or kTeamWarps
// where a sequence would otherwise have more than num_splits partial results.
// With one split, a result does not depend on what else is in the batch. Ranges
// that begin where rows do need no split more; they are taken if they are no
// longer.
__device__ __noinline__ Partition partition(const DecodeParams& p, int num_rows,
                                            int num_warps, int lane) {
  int total = 0, longest = 0, num_filled = 0;
  for_each_length(p, lane, [&](int tiles) {
    total += tiles;
    longest = max(longest, tiles);
    num_filled += tiles > 0;
  });
  total = __reduce_add_sync(~0u, total) * num_rows;
  longest = __reduce_max_sync(~0u, longest);
  Partition result;
  result.team_size = 1;
  result.range = (total + num_warps - 1) / num_warps;
  if (p.num_splits == 1) {
    num_filled = __reduce_add_sync(~0u, num_filled) * num_rows;
    return {kTeamWarps, longest, num_filled, true};
  }
  // A range may begin inside a row, so a row may need one more split.
  const int least = (longest + p.num_splits - 2) / (p.num_splits - 1);
  int num_teams = num_warps;
  if (result.range < least) {
    result.team_size = kTeamWarps;
    num_teams /= kTeamWarps;
    result.range = max((total + num_teams - 1) / num_teams, 1);
  }
  const int parts = min(max(longest / result.range, 1), p.num_splits);
  const int range = max(((longest + parts - 1) / parts + 1) & ~1, 2);
  int teams = 0;
  for_each_length(p, lane,
                  [&](int tiles) { teams += (tiles + range - 1) / range; });
  teams = __reduce_add_sync(~0u, teams) * num_rows;
  result.range = max(result.range, least);
  result.aligned = teams <= num_teams && range <= result.range;
  if (result.aligned) result.range = range;
  result.num_ranges = result.aligned
                          ? teams
                          : (total + result.range - 1) / max(result.range, 1);
  return result;
}

// Mark the partial results of sequences without tokens.
template <int WARPS>
__device__ __forceinline__ void skip_empty(const DecodeParams& p, int warp,
                                           int lane) {
  const int num_partials = p.num_splits * p.num_queries();
#pragma unroll 1
  for (int seq = int(blockIdx.x); seq < p.num_seqs; seq += int(gridDim.x)) {
    if (num_tiles(p, seq) > 0) continue;
#pragma unroll 1
    for (int i = 32 * warp + lane; i < num_partials; i += 32 * WARPS) {
      p.partial_lse[int64_t(seq) * num_partials + i] = -INFINITY;
    }
  }
}

// Attend to a range: to parts of any few sequences.
template <bool PAIRED, int WARPS, int STAGES>
__device__ __forceinline__ void attend_range(
    Shared<PAIRED, WARPS, STAGES>& shared, const DecodeParams& p,
    const Partition& cut, int num_rows, const Team& team, int index) {
  const int lane = threadIdx.x % 32;
  const int passes = num_rows / p.num_kv_heads;
  const int first = index * cut.range;
  const int last = first + cut.range;
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < p.num_seqs && before < last; base += 32) {
    const int tiles = num_tiles(p, base + lane);
    const int counted = cut.counted(tiles);
    const int end = before + inclusive_sum(counted, lane) * num_rows;
    const int begin = end - counted * num_rows;
    uint32_t overlapping =
        __ballot_sync(~0u, begin < last && end > first && tiles > 0);
#pragma unroll 1
    for (; overlapping != 0; overlapping &= overlapping - 1) {
      const int i = __ffs(overlapping) - 1;
      const int seq = base + i;
      const int seq_tiles = __shfl_sync(~0u, tiles, i);
      const int row_tiles = cut.counted(seq_tiles);
      const int seq_first = __shfl_sync(~0u, begin, i);
      int row = max(first - seq_first, 0) / row_tiles;
#pragma unroll 1
      for (; row < num_rows; ++row) {
        const int start = seq_first + row * row_tiles;
        if (start >= last) break;
        const int kv_head = row / passes;
        Segment segment;
        segment.seq = seq;
        segment.kv_head = kv_head;
        segment.first_column = row % passes * kPassColumns<PAIRED>;
        segment.cache = p.kv_cache + kv_head * p.stride_cache_head;
        segment.first_tile = max(first - start, 0);
        segment.last_tile = min(last - start, seq_tiles);
        segment.num_tokens = p.num_tokens(seq);
        segment.split = index - start / cut.range;
        segment.ends = segment.last_tile == seq_tiles;
        attend<PAIRED>(shared, p, segment, team);
      }
    }
    before = __shfl_sync(~0u, end, 31);
  }
}

template <bool PAIRED, int WARPS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS, 1)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared =
      *reinterpret_cast<Shared<PAIRED, WARPS, STAGES>*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int passes =
      (p.num_columns() + kPassColumns<PAIRED> - 1) / kPassColumns<PAIRED>;
  const int num_rows = p.num_kv_heads * passes;
  start_next_kernel();

  // Lengths are known before the kernel before this one, which stores the
  // queries, has ended.
  const Partition cut = partition(p, num_rows, int(gridDim.x) * WARPS, lane);
  wait_for_previous_kernel();
  const Team team(cut.team_size);
  const int num_teams = int(gridDim.x) * WARPS / cut.team_size;
  int index = (int(blockIdx.x) * WARPS + warp) / cut.team_size;
#pragma unroll 1
  for (; index < cut.num_ranges; index += num_teams) {
    attend_range<PAIRED>(shared, p, cut, num_rows, team, index);
  }
  skip_empty<WARPS>(p, warp, lane);
}

}  // namespace turbo
