// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Store: rotate and quantise K and V into their pages, rotate q, in one launch.
#pragma once

#include "encode.cuh"
#include "trellis_parts.cuh"

namespace turbo {

struct StoreParams {
  const uint16_t* key;          // [T, H, D]
  const uint16_t* value;        // [T, H, D]
  const uint16_t* query;        // [B, Hq, D]
  uint8_t* kv_cache;            // [num_blocks, H, N, C]
  const int64_t* slot_mapping;  // [T], below 2**31
  const uint4* kv_matrix;       // fragments, by groups
  const uint4* single_matrix;   // of a vector that has a warp
  const uint4* query_matrix;    // fragments, in pairs of neighbours
  __half2* rotated_query;       // [B, Hq, D / 2]
  float* query_scale;           // [B, Hq]
  int64_t stride_key_token;
  int64_t stride_key_head;
  int64_t stride_value_token;
  int64_t stride_value_head;
  int64_t stride_query_token;
  int64_t stride_query_head;
  int64_t stride_cache_block;
  int64_t stride_cache_head;
  int num_tokens;
  int num_kv_heads;
  int num_queries;
  int num_heads;
  int block_size;
  float query_factor;
};

constexpr int STORE_THREADS = 128;
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
template <int PARTS>
__device__ __forceinline__ float integer_of(const float (&y)[KV_BLOCKS][4],
                                            int column, int j, int i) {
  const int part = part_of_lane<PARTS>();
  float result = 0.0f;
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    const int e = i * PARTS + p;
    result = p == part ? y[block_of(j, e)][place_of(j, e) + column] : result;
  }
  return result;
}

template <bool IS_KEY>
constexpr bool IS_TRELLIS = (IS_KEY ? KEY_BITS : VALUE_BITS) == 3;
template <bool IS_KEY>
using SideTables =
    std::conditional_t<IS_TRELLIS<IS_KEY>, WindowTables, FoldTables>;
struct Tables {
  SideTables<true> key;
  SideTables<false> value;
};

// Coordinates of a group that a lane has. A trellis is not shared.
template <bool IS_KEY, int PARTS>
constexpr int ELEMENTS = IS_TRELLIS<IS_KEY> ? SCALE_GROUP : SCALE_GROUP / PARTS;

// Quantise a rotated vector and write it.
//
// x: integers. exponent: of the vector, see load_integers.
// tile: or null to write nothing. token: place in the tile.
template <bool IS_KEY, int PARTS, int N>
__device__ __forceinline__ void encode_vector(float (&x)[GROUPS_A_LANE][N],
                                              int exponent,
                                              const SideTables<IS_KEY>& tables,
                                              uint8_t* tile, int token) {
  constexpr int CODES_OFFSET = IS_KEY ? 0 : VALUE_CODES_OFFSET;
  constexpr int SCALES_OFFSET =
      IS_KEY ? KEY_SCALES_OFFSET : VALUE_SCALES_OFFSET;
  constexpr int SHARES = PARTS_OF<N>;
  const float unit =
      __fmul_rn(power_of_two(exponent - ROTATION_EXPONENT), INVERSE_SQRT);
  uint32_t signs[GROUPS_A_LANE][WORDS_OF<N>];
  float largest[GROUPS_A_LANE];
  float largest_of_all = 0.0f;
#pragma unroll
  for (int j = 0; j < GROUPS_A_LANE; ++j) {
    largest[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < WORDS_OF<N>) signs[j][i] = 0;
      signs[j][word_of<N>(i)] += (__float_as_uint(x[j][i]) >> 31)
                                 << shift_of<N>(i);
      largest[j] = fmaxf(largest[j], fabsf(x[j][i]));
    }
    largest_of_all = fmaxf(largest_of_all, largest[j]);
    largest[j] = reduce_parts<Largest, SHARES>(largest[j]);
  }
  largest_of_all = reduce_vector<Largest, SHARES>(largest_of_all);
  largest_of_all = fminf(__fmul_rn(largest_of_all, unit), SCALE_MAX);
  const float normaliser =
      power_of_two(-max(exponent_of(largest_of_all), -ERROR_MAX_EXPONENT));
  const float normalised_unit = __fmul_rn(unit, normaliser);
  int floors[GROUPS_A_LANE];
  bool is_tiny = false;
#pragma unroll
  for (int j = 0; j < GROUPS_A_LANE; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float magnitude =
          __fmul_rn(fabsf(x[j][i]), normalised_unit);
      x[j][i] = IS_TRELLIS<IS_KEY> ? copysignf(magnitude, x[j][i]) : magnitude;
    }
    largest[j] = fminf(__fmul_rn(largest[j], unit), SCALE_MAX);
    floors[j] = scale_floor(largest[j]);
    // Where nothing is stored zeros are no concern.
    const bool is_counted =
        largest[j] > 0.0f ||
        (tile != nullptr && group_of_lane() + COLUMNS_A_WARP * j < NUM_GROUPS);
    is_tiny |= is_counted && largest[j] < 16 * SMALLEST_SCALE;
  }
  if (__any_sync(FULL_MASK, largest_of_all >= SCALE_MAX)) {
    // Magnitudes are limited; the sign comes first.
    const float limit = __fmul_rn(SCALE_MAX, normaliser);
#pragma unroll
    for (int j = 0; j < GROUPS_A_LANE; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        x[j][i] = fminf(fmaxf(x[j][i], -limit), limit);
    }
  }
  uint8_t* scales = tile + SCALES_OFFSET + token * (NUM_WORDS * WORD_BYTES);
  scales = tile == nullptr ? nullptr : scales;
  uint8_t* codes = tile + CODES_OFFSET;
  if constexpr (IS_TRELLIS<IS_KEY>) {
    encode_3_bits<IS_KEY, PARTS>(x, floors, normaliser, tables, codes, token,
                                 scales);
  } else {
    if (__any_sync(FULL_MASK, is_tiny)) {
      encode_4_bits<IS_KEY, true>(x, signs, floors, normaliser, tables, codes,
                                  token, scales);
    } else {
      encode_4_bits<IS_KEY, false>(x, signs, floors, normaliser, tables, codes,
                                   token, scales);
    }
  }
}

// Where a token's bytes go: a tile, or null, and a place in it.
struct Place {
  uint8_t* tile = nullptr;
  int token = 0;

  // slot: or -1.
  __device__ __forceinline__ Place(const StoreParams& params, int slot,
                                   int kv_head) {
    if (slot < 0) return;
    const int block = slot / params.block_size;
    const int position = slot - block * params.block_size;
    token = position % TILE_TOKENS;
    tile = params.kv_cache + block * params.stride_cache_block +
           kv_head * params.stride_cache_head +
           position / TILE_TOKENS * TILE_BYTES;
  }
};

__device__ __forceinline__ const uint16_t* vector_of(const StoreParams& params,
                                                     bool is_key, int pair) {
  const int64_t token = pair / params.num_kv_heads;
  const int64_t head = pair % params.num_kv_heads;
  return is_key ? params.key + token * params.stride_key_token +
                      head * params.stride_key_head
                : params.value + token * params.stride_value_token +
                      head * params.stride_value_head;
}

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
      x[j][i] = integer_of<PARTS_OF<N>>(y, IS_KEY ? 0 : 1, j, i);
    }
  }
  encode_vector<IS_KEY, PARTS>(x, exponent, tables, place.tile, place.token);
}

// Store K, V or both of PAIRS_A_WARP (token, head) pairs.
template <bool IS_BF16, int PARTS>
__device__ __forceinline__ void store_pairs(const StoreParams& params,
                                            const Tables& tables,
                                            int first_pair, bool with_key,
                                            bool with_value) {
  const int num_pairs = params.num_tokens * params.num_kv_heads;
  const int pair_column = threadIdx.x % LANES_A_COLUMN;
  const int pair =
      first_pair + pair_column / PARTS * VECTORS_A_COLUMN + vector_of_lane();
  int slot = -1;
  if (pair < num_pairs) {
    slot = static_cast<int>(params.slot_mapping[pair / params.num_kv_heads]);
  }
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
  const Place place(params, slot, pair % params.num_kv_heads);
  const int key_exponent = from_loader(exponent, 2 * pair_column);
  const int value_exponent = from_loader(exponent, 2 * pair_column + 1);
  if (with_key) encode_column<true, PARTS>(y, key_exponent, tables.key, place);
  if (with_value)
    encode_column<false, PARTS>(y, value_exponent, tables.value, place);
}

// Store a vector by a warp: all lanes have the same of it.
template <bool IS_KEY, bool IS_BF16>
__device__ __forceinline__ void store_single(const StoreParams& params,
                                             SingleInput& input, int slot,
                                             const SideTables<IS_KEY>& tables,
                                             int pair) {
  float y[GROUPS_A_LANE][SINGLE_ELEMENTS];
  int exponent;
  rotate_single<IS_BF16>(input, y, exponent);
  const Place place(params, slot, pair % params.num_kv_heads);
  if constexpr (IS_TRELLIS<IS_KEY>) {
    float x[GROUPS_A_LANE][SCALE_GROUP];
#pragma unroll
    for (int j = 0; j < GROUPS_A_LANE; ++j) {
#pragma unroll
      for (int e = 0; e < SCALE_GROUP; ++e) {
        x[j][e] = __shfl_sync(FULL_MASK, y[j][e / SINGLE_PARTS],
                              e % SINGLE_PARTS, SINGLE_PARTS);
      }
    }
    encode_vector<IS_KEY, SINGLE_PARTS>(x, exponent, tables, place.tile,
                                        place.token);
  } else {
    encode_vector<IS_KEY, SINGLE_PARTS>(y, exponent, tables, place.tile,
                                        place.token);
  }
}

// Rotate QUERIES_A_WARP queries.
template <bool IS_BF16>
__device__ __forceinline__ void rotate_queries(const StoreParams& params,
                                               int first) {
  const int num_rows = params.num_queries * params.num_heads;
  const int row =
      first + column_of_loader() * VECTORS_A_COLUMN + vector_of_loader();
  const uint16_t* query = nullptr;
  if (row < num_rows) {
    const int64_t token = row / params.num_heads;
    query = params.query + token * params.stride_query_token +
            row % params.num_heads * params.stride_query_head;
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
    const float unit = power_of_two(exponent - ROTATION_EXPONENT);
    params.query_scale[row] =
        is_nan ? as_float(0x7FC00000u) : __fmul_rn(unit, params.query_factor);
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
  return (params.num_tokens * params.num_kv_heads + PAIRS - 1) / PAIRS;
}

// With PARTS = 1 for many tokens. Else for few: K and V go to warps of their
// own.
template <bool IS_BF16, int PARTS>
__global__ void __launch_bounds__(STORE_THREADS)
    store_kernel(const StoreParams params) {
  __shared__ Tables tables;
  constexpr bool IS_SINGLE = HAS_SINGLES && PARTS == SINGLE_PARTS;
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int pair_warps = num_pair_warps<PARTS>(params);
  const int kv_warps = PARTS > 1 ? 2 * pair_warps : pair_warps;
  const bool with_key = warp < pair_warps;
  const int first_pair =
      (with_key ? warp : warp - pair_warps) * PAIRS_A_WARP<PARTS>;
  // Loads take long.
  SingleInput input;
  int slot = -1;
  if (IS_SINGLE && warp < kv_warps) {
    slot = static_cast<int>(
        __ldg(params.slot_mapping + first_pair / params.num_kv_heads));
    input = load_single(vector_of(params, with_key, first_pair),
                        params.single_matrix);
  }
  const int warp_in_block = threadIdx.x / 32;
  if (warp_in_block == 0) fill_tables<true>(tables.key);
  if (warp_in_block == (blockDim.x > 32)) fill_tables<false>(tables.value);
  __syncthreads();
  if (warp < kv_warps) {
    if constexpr (IS_SINGLE) {
      if (with_key) {
        store_single<true, IS_BF16>(params, input, slot, tables.key,
                                    first_pair);
      } else {
        store_single<false, IS_BF16>(params, input, slot, tables.value,
                                     first_pair);
      }
    } else {
      store_pairs<IS_BF16, PARTS>(params, tables, first_pair, with_key,
                                  PARTS == 1 || !with_key);
    }
    return;
  }
  const int64_t first = static_cast<int64_t>(warp - kv_warps) * QUERIES_A_WARP;
  if (first < static_cast<int64_t>(params.num_queries) * params.num_heads) {
    rotate_queries<IS_BF16>(params, static_cast<int>(first));
  }
}

template <int PARTS>
inline cudaError_t store(const StoreParams& params, bool is_bf16, int threads,
                         cudaStream_t stream) {
  const int num_rows = params.num_queries * params.num_heads;
  const int warps = (PARTS > 1 ? 2 : 1) * num_pair_warps<PARTS>(params) +
                    (num_rows + QUERIES_A_WARP - 1) / QUERIES_A_WARP;
  if (warps == 0) return cudaSuccess;
  const int blocks = (32 * warps + threads - 1) / threads;
  if (is_bf16) {
    store_kernel<true, PARTS><<<blocks, threads, 0, stream>>>(params);
  } else {
    store_kernel<false, PARTS><<<blocks, threads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace turbo
