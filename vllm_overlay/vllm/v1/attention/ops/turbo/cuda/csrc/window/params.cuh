// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the window kernel is given, and where a token's packed key is.
#pragma once

#include <type_traits>

#include "common/window.cuh"

namespace turbo {

struct WindowParams : WindowPages {
  const uint8_t* kv_cache;      // [num_blocks, H, N, C]
  const int64_t* slot_mapping;  // [T], below 2**31
  const uint16_t* key;          // [T, H, D]
  const uint16_t* value;        // [T, H, D]
  const int* block_table;       // [B, max_blocks]
  const int* seq_lens;          // [B]
  const int* query_start_loc;   // [B + 1]
  int* packed_lens;             // [B], written
  const float* key_offset;      // [G, H, D], or null: none
  int64_t stride_cache_block;
  int64_t stride_cache_head;
  int64_t stride_key_token;
  int64_t stride_key_head;
  int64_t stride_value_token;
  int64_t stride_value_head;
  int64_t stride_block_table;
  int tags, places;       // where these planes begin
  int num_window_tokens;  // that attention takes from a page, at most
  int num_tokens;         // T
  int num_kv_heads;       // H
  int block_size;         // N
  int num_offsets;        // G
};

// A sequence of the step, whose last tokens are the step's.
struct WindowSequence {
  const int* table;
  int block;      // its page; 0: none
  int seq_len;    // the step's tokens included
  int end;        // its last token of the step's, and one more
  int first_own;  // position of its first of them

  __device__ __forceinline__ WindowSequence(const WindowParams& p, int seq)
      : table(p.block_table + seq * p.stride_block_table),
        block(p.blocks[seq]),
        seq_len(p.seq_lens[seq]),
        end(p.query_start_loc[seq + 1]) {
    first_own = seq_len - (end - p.query_start_loc[seq]);
  }
  // Tokens before the step's whose rows attention may read: none of a row that
  // a token of the step takes.
  __device__ __forceinline__ int num_read(const WindowParams& p) const {
    const int left = p.num_rows - (seq_len - first_own);
    return max(min(min(p.num_window_tokens, left), first_own), 0);
  }
  // The first position of the step's that has a row in the end.
  __device__ __forceinline__ int first_written(const WindowParams& p) const {
    return max(max(first_own, seq_len - p.num_rows), 0);
  }
  // The token of a position among the step's.
  __device__ __forceinline__ int token_of(int position) const {
    return end - seq_len + position;
  }
};

// A tag is as many pieces of a token's packed codes, or branches and then path,
// each loaded at once.
using TagPiece = std::conditional_t<KEY_CODE_BYTES % 16 == 0, uint4, uint2>;
constexpr int kTagPieces = KEY_CODE_BYTES / int(sizeof(TagPiece));
static_assert(KEY_ROW_BYTES % sizeof(TagPiece) == 0);
static_assert(KEY_CODE_BYTES % sizeof(TagPiece) == 0);

// Where a piece of a token's tag is in the pages, of head 0.
__device__ __forceinline__ const uint8_t* packed_piece(const WindowParams& p,
                                                       const WindowSequence& s,
                                                       int position,
                                                       int piece) {
  const int index = unsigned(position) / unsigned(p.block_size);
  const int place = position - index * p.block_size;
  const int token = place % TILE_TOKENS;
  const int byte = piece * int(sizeof(TagPiece));
  const int in_tile =
      byte < KEY_ROW_BYTES
          ? token * KEY_ROW_BYTES + byte
          : PATHS_OFFSET + token * (HEAD_SIZE / 8) + byte - KEY_ROW_BYTES;
  return p.kv_cache + s.table[index] * p.stride_cache_block +
         place / TILE_TOKENS * TILE_BYTES + in_tile;
}

__device__ __forceinline__ bool differ(uint4 a, uint4 b) {
  return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0;
}

__device__ __forceinline__ bool differ(uint2 a, uint2 b) {
  return ((a.x ^ b.x) | (a.y ^ b.y)) != 0;
}

}  // namespace turbo
