// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Store: rotate and quantise K and V into their pages, rotate q, in one launch.
#pragma once

#include "store/single.cuh"
#include "common/warp.cuh"

namespace turbo {

// Blocks of STORE_THREADS that a multiprocessor is to have room for.
template <int PARTS>
constexpr int MIN_BLOCKS = PARTS * GROUPS_A_LANE == 1 ? 5 : 1;
// Pairs of a K and a V vector that a warp encodes, PARTS lanes a group, and
// queries that it rotates.
template <int PARTS>
constexpr int PAIRS_A_WARP = COLUMNS_A_WARP / 2 / PARTS * VECTORS_A_COLUMN;
constexpr int QUERIES_A_WARP = COLUMNS_A_WARP * VECTORS_A_COLUMN;

__device__ __forceinline__ int column_of_loader() {
  return threadIdx.x % 32 / LANES_A_COLUMN;
}

__device__ __forceinline__ int vector_of_loader() {
  return threadIdx.x % LANES_A_COLUMN / (LANES_A_COLUMN / VECTORS_A_COLUMN);
}

// One of a lane's rotated integers of a column, of its group j.
//
// IN_ROW: whether a part has coordinates in a row, not every PARTS-th.
template <int PARTS, bool IN_ROW>
__device__ __forceinline__ float integer_of(const float (&y)[KV_BLOCKS][4],
                                            int column, int j, int i) {
  const int part = part_of_lane<PARTS>();
  float result = 0.0f;
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    const int e = IN_ROW ? p * (SCALE_GROUP / PARTS) + i : i * PARTS + p;
    result = p == part ? y[block_of(j, e)][place_of(j, e) + column] : result;
  }
  return result;
}

// Coordinates of a group that a lane has. A trellis is shared by four lanes
// only.
template <bool IS_KEY, int PARTS>
constexpr int ELEMENTS =
    IS_TRELLIS<IS_KEY> && PARTS != PATH_PARTS ? SCALE_GROUP
                                              : SCALE_GROUP / PARTS;

template <bool IS_KEY, int PARTS>
__device__ __forceinline__ void encode_column(const float (&y)[KV_BLOCKS][4],
                                              int exponent,
                                              const SideTables<IS_KEY>& tables,
                                              const Place& place) {
  constexpr int N = ELEMENTS<IS_KEY, PARTS>;
  float x[GROUPS_A_LANE][N];
#pragma unroll
  for (int j = 0; j < GROUPS_A_LANE; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[j][i] =
          integer_of<PARTS_OF<N>, IS_TRELLIS<IS_KEY>>(y, IS_KEY ? 0 : 1, j, i);
    }
  }
  encode_vector<IS_KEY, PARTS>(x, exponent, tables, place.tile, place.token);
}

// Store K, V or both of PAIRS_A_WARP (token, head) pairs.
template <bool IS_BF16, int PARTS>
__device__ __forceinline__ void store_pairs(const KernelParams& params,
                                            const Tables& tables,
                                            int first_pair, bool with_key,
                                            bool with_value) {
  const int num_pairs = params.num_tokens * params.num_kv_heads;
  const int pair_column = threadIdx.x % LANES_A_COLUMN;
  const int pair =
      first_pair + pair_column / PARTS * VECTORS_A_COLUMN + vector_of_lane();
  int slot = -1, head;
  const int token = params.by_kv_heads.divide(pair, head);
  if (pair < num_pairs) slot = static_cast<int>(params.slot_mapping[token]);
  float y[KV_BLOCKS][4];
  int exponent;
  {
    // Columns are a K and a V vector by turns.
    const int column = column_of_loader();
    const bool is_key = column % 2 == 0;
    const int loaded =
        first_pair + column / 2 / PARTS * VECTORS_A_COLUMN + vector_of_loader();
    const bool is_loaded =
        loaded < num_pairs && (is_key ? with_key : with_value);
    uint32_t integers[IN_BLOCKS][2];
    bool has_nan;
    load_integers<IS_BF16>(
        is_loaded ? vector_of(params, is_key, loaded) : nullptr, integers,
        exponent, has_nan);
    rotate(integers, params.kv_matrix, y);
  }
  const Place place(params, slot, head);
  const int key_exponent = from_loader(exponent, 2 * pair_column);
  const int value_exponent = from_loader(exponent, 2 * pair_column + 1);
  if (with_key) encode_column<true, PARTS>(y, key_exponent, tables.key, place);
  if (with_value)
    encode_column<false, PARTS>(y, value_exponent, tables.value, place);
}

// Rotate QUERIES_A_WARP queries.
template <bool IS_BF16>
__device__ __forceinline__ void rotate_queries(const KernelParams& params,
                                               int first) {
  const int num_rows = params.num_queries * params.num_heads;
  const int row =
      first + column_of_loader() * VECTORS_A_COLUMN + vector_of_loader();
  const uint16_t* query = nullptr;
  if (row < num_rows) {
    query = query_of(params, row);
  }
  uint32_t integers[IN_BLOCKS][2];
  int exponent;
  bool has_nan;
  load_integers<IS_BF16>(query, integers, exponent, has_nan);
  float y[QUERY_BLOCKS][4];
  rotate(integers, params.query_matrix, y);

  const uint32_t lanes_with_nan = __ballot_sync(FULL_MASK, has_nan);
  constexpr int LOADERS = LANES_A_COLUMN / VECTORS_A_COLUMN;
  const int lane = threadIdx.x % 32;
  if (lane % LOADERS == 0 && row < num_rows) {
    const bool is_nan = (lanes_with_nan >> lane & ((1 << LOADERS) - 1)) != 0;
    store_query_scale(params, row, exponent, is_nan);
  }
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    const int of_lane =
        first + (2 * (lane % LANES_A_COLUMN) + column) * VECTORS_A_COLUMN +
        vector_of_lane();
    if (of_lane >= num_rows) continue;
    __half2* p_row =
        params.rotated_query + static_cast<int64_t>(of_lane) * (HEAD_SIZE / 2);
#pragma unroll
    for (int i = 0; i < QUERY_BLOCKS; ++i) {
      p_row[i * VECTOR_LANES + lane / 4 % VECTOR_LANES] =
          __floats2half2_rn(__fmul_rn(y[i][column], INVERSE_SQRT),
                            __fmul_rn(y[i][2 + column], INVERSE_SQRT));
    }
  }
}

template <int PARTS>
__host__ __device__ inline int num_pair_warps(const StoreParams& params) {
  constexpr int PAIRS = PAIRS_A_WARP<PARTS>;
  const int num_pairs = params.num_tokens * params.num_kv_heads;
  return IS_SINGLE<PARTS> ? num_pairs * SINGLE_WARPS
                          : (num_pairs + PAIRS - 1) / PAIRS;
}

// With PARTS = 1 for many tokens. Else for few: K and V go to warps of their
// own.
template <bool IS_BF16, int PARTS>
__global__ void __launch_bounds__(STORE_THREADS, MIN_BLOCKS<PARTS>)
    store_kernel(const KernelParams params) {
  __shared__ __align__(16) Tables tables;
  start_next_kernel();
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int pair_warps = num_pair_warps<PARTS>(params);
  const int kv_warps = PARTS > 1 ? 2 * pair_warps : pair_warps;
  const bool is_query = warp >= kv_warps;
  if constexpr (IS_SINGLE<PARTS>) {
    if (!is_query || params.has_single_queries) {
      store_single<IS_BF16>(params, tables, warp / SINGLE_WARPS);
      return;
    }
  }
  if (is_query) {
    const int64_t first =
        static_cast<int64_t>(warp - kv_warps) * QUERIES_A_WARP;
    if (first < static_cast<int64_t>(params.num_queries) * params.num_heads) {
      rotate_queries<IS_BF16>(params, static_cast<int>(first));
    }
    return;
  }
  if constexpr (!IS_SINGLE<PARTS>) {
    load_tables(params, tables);
    const bool with_key = warp < pair_warps;
    const int first_pair =
        (with_key ? warp : warp - pair_warps) * PAIRS_A_WARP<PARTS>;
    store_pairs<IS_BF16, PARTS>(params, tables, first_pair, with_key,
                                PARTS == 1 || !with_key);
  }
}

// Warps that store K and V, and rotate queries.
template <int PARTS>
inline int64_t num_store_warps(const KernelParams& params) {
  const int64_t num_rows = int64_t(params.num_queries) * params.num_heads;
  const int64_t warps = (PARTS > 1 ? 2 : 1) * num_pair_warps<PARTS>(params);
  if (IS_SINGLE<PARTS> && params.has_single_queries) {
    return warps + num_rows * SINGLE_WARPS;
  }
  return warps + (num_rows + QUERIES_A_WARP - 1) / QUERIES_A_WARP;
}

}  // namespace turbo
