// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The parameters of the store, and the places of its vectors and bytes.
#pragma once

#include "common/divisor.cuh"
#include "common/vectors.cuh"
#include "common/tail.cuh"
#include "store/rotate.cuh"

namespace turbo {

// True if the store needs the places of tokens in their sequences.
constexpr bool kHasPositions =
    KEY_OFFSET != 0 || WITH_TAIL != 0 || QUERY_DIRECTION != 0;

// With WITH_TAIL: the rows that are written and counted.
struct StoreTail : TailPages {
  const int* block_table;  // [R, max_blocks], of packed pages
  int* packed_lens;        // [R], written
  int64_t stride_block_table;
  int tags, places;  // where these planes begin
  int num_tokens;    // most that attention takes from a page
};

struct StoreParams {
  const uint16_t* key;          // [T, H, D]
  const uint16_t* value;        // [T, H, D]
  const uint16_t* query;        // [B, Hq, D]
  uint8_t* kv_cache;            // [num_blocks, H, N, C]
  const int64_t* slot_mapping;  // [T], below 2**31
  const uint4* kv_matrix;       // fragments, by groups
  const uint4* single_matrix;   // for a vector that has a warp
  const uint4* query_matrix;    // fragments, in pairs of neighbours
  __half2* rotated_query;       // [B, Hq, D / 2]
  float* query_scale;           // [B, Hq]
  const uint4* tables;          // Tables
  // With KEY_OFFSET: the offset that the store takes off K, by a token's place
  // in its sequence.
  const float* key_offset;  // [G, H, D]
  // With kHasPositions: the sequences of tokens.
  const int* seq_lens;         // [R]
  const int* query_start_loc;  // [R + 1]
  StoreTail tail;
  Strides key_strides, value_strides, query_strides;
  int64_t stride_cache_block;
  int64_t stride_cache_head;
  int num_tokens;
  int num_kv_heads;
  int num_queries;
  int num_heads;
  int block_size;
  float query_factor;
  int num_offsets;  // G
  int num_seqs;     // R
};

// The most queries that have warps of their own. More take less time by eights.
constexpr int kMaxSingleQueries = 512;

struct KernelParams : StoreParams {
  Divisor by_kv_heads, by_heads, by_block;
  // Whether queries have warps of their own, as K and V then have.
  bool has_single_queries;
  // Blocks of the tails, which are the first of the grid, and the
  // blocks of each sequence that write rows.
  int tail_blocks = 0, tail_writers = 0;
  // With QUERY_DIRECTION: the direction that errors of keys are to be
  // orthogonal to, by a token's place in its sequence.
  int num_directions = 0;              // G
  const __half* directions = nullptr;  // [G, H, D]

  explicit KernelParams(const StoreParams& params)
      : StoreParams(params),
        by_kv_heads(params.num_kv_heads),
        by_heads(params.num_heads),
        by_block(params.block_size),
        has_single_queries(params.num_queries * params.num_heads <=
                           kMaxSingleQueries) {}
};

// The place of a token's bytes: a tile, or null, and the token's index in it. A
// key also has the tag of its row in the tail, or null.
struct Place {
  uint8_t* tile = nullptr;
  int token = 0;
  uint8_t* tag = nullptr;

  // slot: -1 for none.
  __device__ __forceinline__ Place(const KernelParams& params, int slot,
                                   int kv_head) {
    if (slot < 0) return;
    int position;
    const int block = params.by_block.divide(slot, position);
    token = position % TILE_TOKENS;
    tile = params.kv_cache + block * params.stride_cache_block +
           kv_head * params.stride_cache_head +
           position / TILE_TOKENS * TILE_BYTES;
  }
};

__device__ __forceinline__ const uint16_t* vector_of(const KernelParams& params,
                                                     bool is_key, int pair) {
  int head;
  const int64_t token = params.by_kv_heads.divide(pair, head);
  return is_key ? params.key + token * params.key_strides.token +
                      head * params.key_strides.head
                : params.value + token * params.value_strides.token +
                      head * params.value_strides.head;
}

// The sequence of a token: the last one that begins at the token or before it.
// Sequences without tokens begin where the next one does.
__device__ __forceinline__ int sequence_of(const KernelParams& params,
                                           int token) {
  // A load takes long, so several are in flight at once.
  constexpr int kParts = 8;
  int first = 0, count = params.num_seqs;
#pragma unroll 1
  while (count > 1) {
    const int size = (count + kParts - 1) / kParts;
    int passed = 0;
#pragma unroll
    for (int i = 1; i < kParts; ++i) {
      const int place = min(i * size, count - 1);
      const bool begins = params.query_start_loc[first + place] <= token;
      passed += i * size < count && begins;
    }
    first += passed * size;
    count = min(size, count - passed * size);
  }
  return first;
}

// The sequence of a token, and the token's index in it. Those of padding are
// arbitrary.
struct Position {
  int seq = 0, seq_len = 0, index = 0;

  Position() = default;
  __device__ __forceinline__ Position(const KernelParams& params, int token)
      : seq(sequence_of(params, token)),
        seq_len(__ldcg(params.seq_lens + seq)),
        index(seq_len + token - __ldcg(params.query_start_loc + seq + 1)) {}
};

// The offset of a key.
__device__ __forceinline__ const float* offset_of(const KernelParams& params,
                                                  const Position& position,
                                                  int kv_head) {
  const int offset =
      position.index <= 0
          ? 0
          : min(position.index / OFFSET_SEGMENT + 1, params.num_offsets - 1);
  return params.key_offset +
         (int64_t(offset) * params.num_kv_heads + kv_head) * HEAD_SIZE;
}

// The offset of a pair's key; null for values, and if there is none.
__device__ __forceinline__ const float* offset_of_pair(
    const KernelParams& params, bool is_key, int pair) {
  if (KEY_OFFSET == 0 || !is_key) return nullptr;
  int head;
  const int token = params.by_kv_heads.divide(pair, head);
  return offset_of(params, Position(params, token), head);
}

// The direction for a key.
__device__ __forceinline__ const __half* direction_of(
    const KernelParams& params, const Position& position, int kv_head) {
  const int row = min(max(position.index, 0) / DIRECTION_SEGMENT,
                      params.num_directions - 1);
  return params.directions +
         (int64_t(row) * params.num_kv_heads + kv_head) * HEAD_SIZE;
}

// The tag of a stored key's row, or null if none is kept. The sequence may have
// no page, or newer tokens of the step may take the row.
//
// is_first: true for one of the key's lanes, which writes the row's position.
__device__ __forceinline__ uint8_t* tail_tag(const KernelParams& params,
                                             const Position& position,
                                             int kv_head, bool is_first) {
  const StoreTail& tail = params.tail;
  const int block = tail.blocks[position.seq];
  if (block == 0 || position.index < position.seq_len - tail.num_rows)
    return nullptr;
  const int row = unsigned(position.index) % unsigned(tail.num_rows);
  uint8_t* page = tail.page(block, kv_head);
  if (is_first)
    reinterpret_cast<int*>(page + tail.places)[row] = position.index + 1;
  return page + tail.tags + row * KEY_CODE_BYTES;
}

__device__ __forceinline__ const uint16_t* query_of(const KernelParams& params,
                                                    int row) {
  int head;
  const int64_t token = params.by_heads.divide(row, head);
  return params.query + token * params.query_strides.token +
         head * params.query_strides.head;
}

__device__ __forceinline__ void store_query_scale(const KernelParams& params,
                                                  int row, int exponent,
                                                  bool is_nan) {
  const float unit = power_of_two(exponent - ROTATION_EXPONENT);
  params.query_scale[row] = is_nan ? __uint_as_float(0x7FC00000u)
                                   : __fmul_rn(unit, params.query_factor);
}

}  // namespace turbo
