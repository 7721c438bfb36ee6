// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Store or rotation of a vector by a warp, or by several, for few tokens. It
// takes as long as its instructions take to be fetched, so they are few. Loops
// are not unrolled, and vectors of all kinds share code where they can.
#pragma once

#include "store/vector.cuh"

namespace turbo {

// Give a part consecutive coordinates: 4 * i + part becomes 4 * part + i.
__device__ __forceinline__ void put_in_row(float (&y)[kSingleElements]) {
  const int part = part_of_lane<kSingleParts>();
#pragma unroll
  for (int lanes = 1; lanes < kSingleParts; lanes *= 2) {
    const bool is_upper = (part & lanes) != 0;
#pragma unroll
    for (int i = 0; i < kSingleElements; ++i) {
      if (i & lanes) continue;
      const float sent = is_upper ? y[i] : y[i | lanes];
      const float received = __shfl_xor_sync(~0u, sent, lanes);
      y[i] = is_upper ? received : y[i];
      y[i | lanes] = is_upper ? y[i | lanes] : received;
    }
  }
}

// Store or rotate a vector by kSingleWarps warps. Vectors of K come first, then
// those of V, and then queries.
template <bool kIsBf16>
__device__ __forceinline__ void store_single(const KernelParams& params,
                                             Tables& tables, int vector) {
  const int num_pairs = params.num_tokens * params.num_kv_heads;
  const bool is_key = vector < num_pairs;
  const int pair = is_key ? vector : vector - num_pairs;
  const bool is_query = pair >= num_pairs;
  const int row = pair - num_pairs;
  const bool is_row = is_query && row < params.num_queries * params.num_heads;
  // Loads take long, so all are issued before the barrier.
  int slot = -1, head;
  const int token = params.by_kv_heads.divide(pair, head);
  SingleInput input = {};
  Position position;
  if (!is_query) slot = static_cast<int>(params.slot_mapping[token]);
  // A direction is needed later than the key. So its position is looked up
  // while the key is loaded, unless the key's load needs it.
  constexpr bool kIsLookedUpFirst =
      KEY_OFFSET != 0 || (WITH_TAIL != 0 && QUERY_DIRECTION == 0);
  if (is_key && kIsLookedUpFirst) position = Position(params, token);
  if (!is_query || is_row) {
    const bool has_offset = KEY_OFFSET != 0 && is_key;
    input = load_single<kIsBf16>(
        is_query ? query_of(params, row) : vector_of(params, is_key, pair),
        has_offset ? offset_of(params, position, head) : nullptr,
        params.single_matrix);
  }
  using OwnDirection = DirectionOf<true, 1, kSingleElements>;
  OwnDirection direction = {};
  if (QUERY_DIRECTION != 0 && is_key) {
    if (!kIsLookedUpFirst) position = Position(params, token);
    direction = OwnDirection::template of<kSingleParts, kIsTrellis<true>>(
        direction_of(params, position, head));
  }
  load_tables(params, tables);

  float y[1][kSingleElements];
  int exponent;
  bool has_nan;
  rotate_single<kIsBf16>(input, y, exponent, has_nan);
  start_next_kernel();
  if (is_query) {
    if (!is_row) return;
    const bool is_nan = __any_sync(~0u, has_nan);
    if (threadIdx.x % 32 == 0) {
      store_query_scale(params, row, exponent, is_nan);
    }
    auto* p_row = reinterpret_cast<__half*>(params.rotated_query) +
                  static_cast<int64_t>(row) * HEAD_SIZE;
#pragma unroll
    for (int i = 0; i < kSingleElements; ++i) {
      const int e = i * kSingleParts + part_of_lane<kSingleParts>();
      p_row[e * NUM_GROUPS + group_of_lane<kSingleParts>(0)] =
          __float2half_rn(__fmul_rn(y[0][i], INVERSE_SQRT));
    }
    return;
  }
  Place place(params, slot, head);
  if (is_key) {
    if (WITH_TAIL != 0 && slot >= 0) {
      const bool is_first = threadIdx.x % (32 * kSingleWarps) == 0;
      place.tag = tail_tag(params, position, head, is_first);
    }
    if constexpr (kIsTrellis<true>) put_in_row(y[0]);
    encode_vector<true, kSingleParts>(y, exponent, tables.key, place,
                                      direction);
  } else {
    if constexpr (kIsTrellis<false>) put_in_row(y[0]);
    encode_vector<false, kSingleParts>(y, exponent, tables.value, place);
  }
}

}  // namespace turbo
