// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Store: rotates K and V, quantises them into their pages, rotates q, and
// brings tails up to date, in one launch.
#pragma once

#include "common/warp.cuh"
#include "store/single.cuh"
#include "store/tail.cuh"

namespace turbo {

// Blocks of kStoreThreads threads for which a multiprocessor has room.
template <int kParts>
constexpr int kMinBlocks = kParts * kLaneGroups == 1 ? 5 : 1;
// Pairs of a K and a V vector that a warp encodes, with kParts lanes per group,
// and queries that it rotates.
template <int kParts>
constexpr int kWarpPairs = kWarpColumns / 2 / kParts * kColumnVectors;
constexpr int kWarpQueries = kWarpColumns * kColumnVectors;

__device__ __forceinline__ int column_of_loader() {
  return threadIdx.x % 32 / kColumnLanes;
}

__device__ __forceinline__ int vector_of_loader() {
  return threadIdx.x % kColumnLanes / (kColumnLanes / kColumnVectors);
}

// Rotated integer i of a lane's group j, in one of its columns.
//
// kInRow: whether a part has consecutive coordinates, not every kParts-th.
template <int kParts, bool kInRow>
__device__ __forceinline__ float integer_of(const float (&y)[kKvBlocks][4],
                                            int column, int j, int i) {
  const int part = part_of_lane<kParts>();
  float result = 0.0f;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const int e = kInRow ? p * (SCALE_GROUP / kParts) + i : i * kParts + p;
    result = p == part ? y[block_of(j, e)][place_of(j, e) + column] : result;
  }
  return result;
}

// Coordinates of a group that a lane has. Only four lanes can share a trellis.
template <bool kIsKey, int kParts>
constexpr int kElementsOf =
    kIsTrellis<kIsKey> && kParts != kPathParts ? SCALE_GROUP
                                               : SCALE_GROUP / kParts;

// direction: with QUERY_DIRECTION, that of a key.
template <bool kIsKey, int kParts>
__device__ __forceinline__ void encode_column(
    const float (&y)[kKvBlocks][4], int exponent,
    const SideTables<kIsKey>& tables, const Place& place,
    const __half* direction = nullptr) {
  constexpr int kElements = kElementsOf<kIsKey, kParts>;
  float x[kLaneGroups][kElements];
#pragma unroll
  for (int j = 0; j < kLaneGroups; ++j) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x[j][i] = integer_of<kPartsOf<kElements>, kIsTrellis<kIsKey>>(
          y, kIsKey ? 0 : 1, j, i);
    }
  }
  using OwnDirection = DirectionOf<kIsKey, kLaneGroups, kElements>;
  encode_vector<kIsKey, kParts>(
      x, exponent, tables, place,
      OwnDirection::template of<kParts, kIsTrellis<kIsKey>>(direction));
}

// Store K, V or both for kWarpPairs (token, head) pairs.
template <bool kIsBf16, int kParts>
__device__ __forceinline__ void store_pairs(const KernelParams& params,
                                            const Tables& tables,
                                            int first_pair, bool with_key,
                                            bool with_value) {
  const int num_pairs = params.num_tokens * params.num_kv_heads;
  const int pair_column = threadIdx.x % kColumnLanes;
  const int pair =
      first_pair + pair_column / kParts * kColumnVectors + vector_of_lane();
  int slot = -1, head;
  const int token = params.by_kv_heads.divide(pair, head);
  if (pair < num_pairs) slot = static_cast<int>(params.slot_mapping[token]);
  float y[kKvBlocks][4];
  int exponent;
  {
    // Columns alternate between a K and a V vector.
    const int column = column_of_loader();
    const bool is_key = column % 2 == 0;
    const int loaded =
        first_pair + column / 2 / kParts * kColumnVectors + vector_of_loader();
    const bool is_loaded =
        loaded < num_pairs && (is_key ? with_key : with_value);
    uint32_t integers[kInBlocks][2];
    bool has_nan;
    load_integers<kIsBf16>(
        is_loaded ? vector_of(params, is_key, loaded) : nullptr,
        offset_of_pair(params, is_key && is_loaded, loaded), integers, exponent,
        has_nan);
    rotate(integers, params.kv_matrix, y);
  }
  start_next_kernel();
  Place place(params, slot, head);
  // Without a slot the direction is arbitrary.
  Position position;
  if ((WITH_TAIL != 0 || QUERY_DIRECTION != 0) && with_key && slot >= 0)
    position = Position(params, token);
  if (WITH_TAIL != 0 && with_key && slot >= 0) {
    const bool is_first =
        group_of_lane<kParts>(0) == 0 && part_of_lane<kParts>() == 0;
    place.tag = tail_tag(params, position, head, is_first);
  }
  const __half* direction = nullptr;
  if (QUERY_DIRECTION != 0 && with_key)
    direction = direction_of(params, position, head);
  const int key_exponent = from_loader(exponent, 2 * pair_column);
  const int value_exponent = from_loader(exponent, 2 * pair_column + 1);
  if (with_key)
    encode_column<true, kParts>(y, key_exponent, tables.key, place, direction);
  if (with_value)
    encode_column<false, kParts>(y, value_exponent, tables.value, place);
}

// Rotate kWarpQueries queries.
template <bool kIsBf16>
__device__ __forceinline__ void rotate_queries(const KernelParams& params,
                                               int first) {
  const int num_rows = params.num_queries * params.num_heads;
  const int row =
      first + column_of_loader() * kColumnVectors + vector_of_loader();
  const uint16_t* query = nullptr;
  if (row < num_rows) {
    query = query_of(params, row);
  }
  uint32_t integers[kInBlocks][2];
  int exponent;
  bool has_nan;
  load_integers<kIsBf16>(query, nullptr, integers, exponent, has_nan);
  float y[kQueryBlocks][4];
  rotate(integers, params.query_matrix, y);
  start_next_kernel();

  const uint32_t lanes_with_nan = __ballot_sync(~0u, has_nan);
  constexpr int kLoaders = kColumnLanes / kColumnVectors;
  const int lane = threadIdx.x % 32;
  if (lane % kLoaders == 0 && row < num_rows) {
    const bool is_nan = (lanes_with_nan >> lane & ((1 << kLoaders) - 1)) != 0;
    store_query_scale(params, row, exponent, is_nan);
  }
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    const int of_lane = first +
                        (2 * (lane % kColumnLanes) + column) * kColumnVectors +
                        vector_of_lane();
    if (of_lane >= num_rows) continue;
    __half2* p_row =
        params.rotated_query + static_cast<int64_t>(of_lane) * (HEAD_SIZE / 2);
#pragma unroll
    for (int i = 0; i < kQueryBlocks; ++i) {
      p_row[i * kVectorLanes + lane / 4 % kVectorLanes] =
          __floats2half2_rn(__fmul_rn(y[i][column], INVERSE_SQRT),
                            __fmul_rn(y[i][2 + column], INVERSE_SQRT));
    }
  }
}

template <int kParts>
__host__ __device__ inline int num_pair_warps(const StoreParams& params) {
  constexpr int kPairs = kWarpPairs<kParts>;
  const int num_pairs = params.num_tokens * params.num_kv_heads;
  return kIsSingle<kParts> ? num_pairs * kSingleWarps
                           : (num_pairs + kPairs - 1) / kPairs;
}

// kParts = 1 is for many tokens. Otherwise, for few tokens, K and V have warps
// of their own.
template <bool kIsBf16, int kParts>
__global__ void __launch_bounds__(kStoreThreads, kMinBlocks<kParts>)
    store_kernel(const KernelParams params) {
  __shared__ __align__(16) Tables tables;
  // The next kernel may begin only when all kernels before this one have ended,
  // because it waits for no more than this one. It begins only after vectors
  // are rotated. If it began together with this one, first instructions would
  // come slowly while caches are cold, as after a model's weights. cold_layers
  // of the decode benchmark measures that.
  wait_for_previous_kernel();
  if constexpr (WITH_TAIL != 0) {
    if (int(blockIdx.x) < params.tail_blocks) {
      start_next_kernel();
      update_tail<kIsBf16>(params, blockIdx.x);
      return;
    }
  }
  const int block = int(blockIdx.x) - params.tail_blocks;
  const int warp = (block * int(blockDim.x) + int(threadIdx.x)) / 32;
  const int pair_warps = num_pair_warps<kParts>(params);
  const int kv_warps = kParts > 1 ? 2 * pair_warps : pair_warps;
  const bool is_query = warp >= kv_warps;
  if constexpr (kIsSingle<kParts>) {
    if (!is_query || params.has_single_queries) {
      store_single<kIsBf16>(params, tables, warp / kSingleWarps);
      return;
    }
  }
  if (is_query) {
    const int64_t first = static_cast<int64_t>(warp - kv_warps) * kWarpQueries;
    if (first < static_cast<int64_t>(params.num_queries) * params.num_heads) {
      rotate_queries<kIsBf16>(params, static_cast<int>(first));
    }
    return;
  }
  if constexpr (!kIsSingle<kParts>) {
    load_tables(params, tables);
    const bool with_key = warp < pair_warps;
    const int first_pair =
        (with_key ? warp : warp - pair_warps) * kWarpPairs<kParts>;
    store_pairs<kIsBf16, kParts>(params, tables, first_pair, with_key,
                                 kParts == 1 || !with_key);
  }
}

// Warps that store K and V, and rotate queries.
template <int kParts>
inline int64_t num_store_warps(const KernelParams& params) {
  const int64_t num_rows = int64_t(params.num_queries) * params.num_heads;
  const int64_t warps = (kParts > 1 ? 2 : 1) * num_pair_warps<kParts>(params);
  if (kIsSingle<kParts> && params.has_single_queries) {
    return warps + num_rows * kSingleWarps;
  }
  return warps + (num_rows + kWarpQueries - 1) / kWarpQueries;
}

}  // namespace turbo
