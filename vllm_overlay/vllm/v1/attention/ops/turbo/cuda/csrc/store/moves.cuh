// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Moves of a key's four-bit codes to other levels, which make its error more
// orthogonal to the key and to a direction: see reference.unbias._moved.
#pragma once

#include "store/direction.cuh"
#include "store/levels.cuh"

namespace turbo {

// The rest of a key's square after a code's move to another level.
__device__ __forceinline__ float rest_of_move(float x, float decoded,
                                              float moved,
                                              const Unbiasing& key) {
  const float mended =
      __fsub_rn(rounded_product(x, moved), rounded_product(x, decoded));
  return __fsub_rn(key.rest, mended);
}

// The cost of such a move, without a direction.
__device__ __forceinline__ float cost_of_move(float x, float decoded,
                                              float moved,
                                              const Unbiasing& key) {
  const float rest = rest_of_move(x, decoded, moved, key);
  const float error = error_of(x, decoded);
  const float moved_error = error_of(x, moved);
  const float across =
      __fsub_rn(__fmul_rn(moved_error, moved_error), __fmul_rn(error, error));
  // Powers of two may be multiplied in any order.
  const float weighted = __fmul_rn(
      across, __fmul_rn(key.square, 1.0f / (1 << PRODUCT_FRACTION_BITS)));
  return __fmaf_rn(__fmul_rn(rest, rest), BIAS_WEIGHT, weighted);
}

// A lane's best move.
struct Move {
  float cost;
  int place;          // of the code: the coordinate, less that of the lane
  uint32_t outwards;  // not zero for a move away from zero
  float rest, along;  // what the move leaves
};

// Move a lane's code.
template <int kGroups, int kElements>
__device__ __forceinline__ void apply_move(
    const Move& move, uint32_t (&words)[kGroups][kWordsOf<kElements>]) {
  constexpr int kStep = kPartsOf<kElements> * NUM_GROUPS;
  const int i = move.place / kStep;
  const int group = move.place % kStep / kWarpColumns;
  const uint32_t step = (move.outwards ? 1u : ~0u) << shift_of<kElements>(i);
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int w = 0; w < kWordsOf<kElements>; ++w) {
      const bool is_chosen = j == group && w == word_of<kElements>(i);
      words[j][w] += is_chosen ? step : 0;
    }
  }
}

// Move up to DIRECTED_MOVES codes, the best one in each turn.
//
// direction: relative to the signs of the coordinates.
// key, along: the rest, and the error's product with the direction, are those
//   of the codes.
// words: the codes, see key_codes.
template <int kGroups, int kElements>
__device__ __forceinline__ void move_codes(
    const float (&x)[kGroups][kElements], const float (&scales)[kGroups],
    const Direction<kGroups, kElements>& direction, const FoldTables& tables,
    Unbiasing key, float along,
    uint32_t (&words)[kGroups][kWordsOf<kElements>]) {
  constexpr int kParts = kPartsOf<kElements>;
  constexpr int kNone = HEAD_SIZE;
  constexpr uint32_t kOutwards = sizeof(tables.moves[0]);
  const int first =
      part_of_lane<kParts>() * NUM_GROUPS + group_of_lane<kParts>(0);
  const uint32_t moves = shared_address(tables.moves);
  const float pull = __fmul_rn(key.square, DIRECTION_PULL);
#pragma unroll 1
  for (int turn = 0; turn < DIRECTED_MOVES; ++turn) {
    const float by_rest = __fmul_rn(key.rest, BIAS_WEIGHT);
    const float by_along = __fmul_rn(__fmul_rn(along, pull), kAlongUnit);
    const float before = cost_of_products(key.rest, along, pull);
    Move own = {before, kNone, 0, key.rest, along};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const float z = direction.at(j, i);
        const float slope =
            __fadd_rn(__fmul_rn(by_rest, x[j][i]), __fmul_rn(by_along, z));
        const uint32_t outwards = slope > 0.0f ? kOutwards : 0;
        const uint32_t index =
            words[j][word_of<kElements>(i)] >> shift_of<kElements>(i) & 15;
        // A level that cannot be moved has infinity as its other level. The
        // cost is then infinite or NaN.
        const float2 levels =
            load_shared_2(moves + outwards + index * kFoldBytes);
        const float decoded = __fmul_rn(levels.x, scales[j]);
        const float moved = __fmul_rn(levels.y, scales[j]);
        const float own_along = __fadd_rn(
            along, __fsub_rn(rounded_along(error_of(x[j][i], moved), z),
                             rounded_along(error_of(x[j][i], decoded), z)));
        const float cost = __fadd_rn(cost_of_move(x[j][i], decoded, moved, key),
                                     cost_along(own_along, pull));
        if (cost < own.cost) {
          own = {cost, i * kParts * NUM_GROUPS + kWarpColumns * j, outwards,
                 rest_of_move(x[j][i], decoded, moved, key), own_along};
        }
      }
    }
    // The turns of reductions go on from that of `along`.
    const float best = reduce_vector<Least, kParts>(own.cost, 1);
    const int mine = own.cost == best ? own.place + first : kNone;
    const int chosen = reduce_vector<Least, kParts>(mine, 0);
    const bool worth = best < before;
    const bool is_chosen = worth && mine == chosen;
    if (is_chosen) apply_move<kGroups, kElements>(own, words);
    // The lane of the chosen code has what is left.
    const float rest =
        reduce_vector<Least, kParts>(is_chosen ? own.rest : INFINITY, 1);
    const float rest_along =
        reduce_vector<Least, kParts>(is_chosen ? own.along : INFINITY, 0);
    key.rest = worth ? rest : key.rest;
    along = worth ? rest_along : along;
  }
}

}  // namespace turbo
