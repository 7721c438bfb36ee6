// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The division of a decode batch's tiles among its warps.
#pragma once

#include "common/attention_params.cuh"
#include "common/tile_warps.cuh"

namespace turbo {

// The most warps that work on a segment together.
constexpr int kTeamWarps = 4;
static_assert(kTeamWarps % kTileWarps == 0);

// A warp takes two tiles at once. With KEY_OFFSET the two share an offset of K,
// so ranges and passes begin at even tiles.
__device__ __forceinline__ int whole_pairs(int tiles) {
  return KEY_OFFSET != 0 ? (tiles + 1) & ~1 : tiles;
}

// The seen tiles of a sequence, from the first tile of a range on.
using DecodeTiles = SeenTiles<KEY_OFFSET != 0 ? 2 : 1>;

// Seen tiles of a sequence, by its known length. Ranges are cut while the
// previous kernel may still run.
__device__ __forceinline__ int known_tiles(const AttentionParams& p, int seq) {
  return DecodeTiles(SeenTokens(p, seq, p.known_lens)).count;
}

// The tiles of all sequences, and of each pass over a sequence, are cut in that
// order into ranges of one size. A team of warps takes a range, or several if
// there are more ranges than teams. The GPU is then evenly busy, whatever the
// lengths.
struct Partition {
  int team_size;  // warps
  int range;      // tiles
  int num_ranges;
  // Whether ranges begin where passes do: tiles are counted as if each pass
  // were a whole number of ranges.
  bool aligned;

  // The tiles that a pass over `tiles` takes up in the ranges.
  __device__ __forceinline__ int counted(int tiles) const {
    return aligned ? (tiles + range - 1) / range * range : whole_pairs(tiles);
  }
};

// Call f with the tiles of each of a lane's sequences. Lengths of several
// sequences are loaded at once.
template <typename F>
__device__ __forceinline__ void for_each_length(const AttentionParams& p,
                                                int lane, F f) {
  constexpr int kSideBySide = 4;
#pragma unroll 1
  for (int base = lane; base < p.num_seqs; base += 32 * kSideBySide) {
    int tiles[kSideBySide];
#pragma unroll
    for (int i = 0; i < kSideBySide; ++i)
      tiles[i] = known_tiles(p, base + 32 * i);
#pragma unroll
    for (int i = 0; i < kSideBySide; ++i) f(tiles[i]);
  }
}

// A pass is over a sequence's tokens, for the queries of a KV head that attend
// at once. There are num_passes over a sequence. A team has the warps of a
// tile. It has kTeamWarps if a sequence would otherwise have more than
// num_splits partial results. With one split, a result does not depend on the
// rest of the batch. Ranges that begin where passes do need no additional
// split. They are used if they are not longer.
__device__ __noinline__ Partition partition(const AttentionParams& p,
                                            int num_passes, int num_warps,
                                            int lane) {
  int total = 0, longest = 0, num_filled = 0;
  for_each_length(p, lane, [&](int tiles) {
    total += whole_pairs(tiles);
    longest = max(longest, whole_pairs(tiles));
    num_filled += tiles > 0;
  });
  total = __reduce_add_sync(~0u, total) * num_passes;
  // At least one tile, even if no sequence has tokens, so that no range is
  // empty.
  longest = max(__reduce_max_sync(~0u, longest), 1);
  Partition result;
  result.team_size = kTileWarps;
  int num_teams = num_warps / kTileWarps;
  result.range = whole_pairs((total + num_teams - 1) / num_teams);
  if (p.num_splits == 1) {
    num_filled = __reduce_add_sync(~0u, num_filled) * num_passes;
    return {kTeamWarps, longest, num_filled, true};
  }
  // A range may begin inside a pass, so a pass may need one more split.
  const int least =
      whole_pairs((longest + p.num_splits - 2) / (p.num_splits - 1));
  if (result.range < least) {
    result.team_size = kTeamWarps;
    num_teams = num_warps / kTeamWarps;
    result.range = max(whole_pairs((total + num_teams - 1) / num_teams), 1);
  }
  const int splits = min(max(longest / result.range, 1), p.num_splits);
  const int range = max(((longest + splits - 1) / splits + 1) & ~1, 2);
  int teams = 0;
  for_each_length(p, lane,
                  [&](int tiles) { teams += (tiles + range - 1) / range; });
  teams = __reduce_add_sync(~0u, teams) * num_passes;
  result.range = max(result.range, least);
  result.aligned = teams <= num_teams && range <= result.range;
  if (result.aligned) result.range = range;
  result.num_ranges =
      result.aligned ? teams : (total + result.range - 1) / result.range;
  return result;
}

}  // namespace turbo
