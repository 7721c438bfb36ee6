// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The tail, in blocks of the store's launch. Rows of the step's newest
// tokens are written. Rows of tokens before them are counted if they still
// match the packed codes. The store writes a key's codes to its tag as well:
// see CodePlace.
//
// The first block of a sequence counts, and the others write.
#pragma once

#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "common/vectors.cuh"
#include "store/params.cuh"

namespace turbo {

// The most blocks that write a sequence's rows.
constexpr int kMaxTailWriters = 8;
// Heads whose tags a thread has in flight at once.
constexpr int kTagsInFlight = 4;
// Slots that a thread has in flight at once.
constexpr int kSlotsInFlight = 4;

// Lanes that have a vector, kVector coordinates of each 128.
constexpr int kRowLanes = HEAD_SIZE < 128 ? HEAD_SIZE / kVector : 32;
constexpr int kRowChunks = HEAD_SIZE < 128 ? 1 : HEAD_SIZE / 128;
constexpr int kRowVectors = 32 / kRowLanes;  // of a warp, side by side
constexpr int kGroupLanes = SCALE_GROUP / kVector;

// A sequence of the step, whose last tokens are the step's.
struct TailSequence {
  const int* table;
  int block;      // its page; 0: none
  int seq_len;    // the step's tokens included
  int end;        // one past its last token, among the step's
  int first_raw;  // position of its first token of the step

  __device__ __forceinline__ TailSequence(const KernelParams& p, int seq)
      : table(p.tail.block_table + seq * p.tail.stride_block_table),
        block(p.tail.blocks[seq]),
        seq_len(p.seq_lens[seq]),
        end(p.query_start_loc[seq + 1]) {
    first_raw = seq_len - (end - p.query_start_loc[seq]);
  }
  // Tokens before the step's whose rows attention may read. Rows that tokens of
  // the step take are not among them.
  __device__ __forceinline__ int num_read(const StoreTail& w) const {
    const int left = w.num_rows - (seq_len - first_raw);
    return max(min(min(w.num_tokens, left), first_raw), 0);
  }
  // The first position of the step whose row is kept at the end of the step.
  __device__ __forceinline__ int first_written(const StoreTail& w) const {
    return max(max(first_raw, seq_len - w.num_rows), 0);
  }
  // The index, among the step's tokens, of the token at a position.
  __device__ __forceinline__ int token_of(int position) const {
    return end - seq_len + position;
  }
};

// A tag has this many pieces of a token's packed codes, or of its branches and
// then its path. A piece is loaded at once.
using TagPiece = std::conditional_t<KEY_CODE_BYTES % 16 == 0, uint4, uint2>;
constexpr int kTagPieces = KEY_CODE_BYTES / int(sizeof(TagPiece));
static_assert(KEY_ROW_BYTES % sizeof(TagPiece) == 0);
static_assert(KEY_CODE_BYTES % sizeof(TagPiece) == 0);

// The address in pages of a piece of a token's tag, for head 0.
__device__ __forceinline__ const uint8_t* packed_piece(const KernelParams& p,
                                                       const TailSequence& s,
                                                       int position,
                                                       int piece) {
  int place;
  const int index = p.by_block.divide(position, place);
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

// Whether the step stores other sequences' tokens to blocks of the tokens whose
// rows are counted. That happens if a prefix is found while it is computed. All
// threads of a block call it.
__device__ __forceinline__ bool is_being_stored(const KernelParams& p,
                                                const TailSequence& s,
                                                int num_read) {
  const int first_token = s.token_of(s.first_raw);
  const int first = unsigned(s.first_raw - num_read) / unsigned(p.block_size);
  const int last = unsigned(s.first_raw - 1) / unsigned(p.block_size);
  bool found = false;
#pragma unroll kSlotsInFlight
  for (int i = threadIdx.x; i < p.num_tokens; i += int(blockDim.x)) {
    const int slot = static_cast<int>(p.slot_mapping[i]);
    if (slot < 0 || (i >= first_token && i < s.end)) continue;
    int place;
    const int block = p.by_block.divide(slot, place);
    for (int j = first; j <= last; ++j) found |= s.table[j] == block;
  }
  return __syncthreads_or(found);
}

// The number of rows, from the nearest token on, that match the packed codes in
// all heads. No row counts if tokens are being stored to these blocks, because
// that may be over or not. All threads of a block call it.
__device__ __forceinline__ int count_rows(const KernelParams& p,
                                          const TailSequence& s) {
  __shared__ uint32_t wrong[2];
  static_assert(TAIL_MAX_ROWS <= 64);
  const StoreTail& w = p.tail;
  const int num_read = s.num_read(w);
  if (threadIdx.x < 2) wrong[threadIdx.x] = 0;
  // This call is also a barrier.
  if (num_read == 0 || is_being_stored(p, s, num_read)) return 0;
  const uint8_t* page = w.page(s.block, 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < num_read * kTagPieces; i += int(blockDim.x)) {
    const int index = i / kTagPieces, piece = i % kTagPieces;
    const int position = s.first_raw - 1 - index;
    const int row = unsigned(position) % unsigned(w.num_rows);
    const uint8_t* packed = packed_piece(p, s, position, piece);
    const uint8_t* tag =
        page + w.tags + row * KEY_CODE_BYTES + piece * int(sizeof(TagPiece));
    const uint8_t* place = page + w.places + row * int(sizeof(int));
    bool is_wrong = false;
#pragma unroll 1
    for (int head = 0; head < p.num_kv_heads; head += kTagsInFlight) {
      TagPiece tags[kTagsInFlight], codes[kTagsInFlight];
      int places[kTagsInFlight];
#pragma unroll
      for (int u = 0; u < kTagsInFlight; ++u) {
        const int64_t own = min(head + u, p.num_kv_heads - 1);
        tags[u] = *reinterpret_cast<const TagPiece*>(tag + own * w.stride_head);
        codes[u] = *reinterpret_cast<const TagPiece*>(
            packed + own * p.stride_cache_head);
        places[u] = *reinterpret_cast<const int*>(place + own * w.stride_head);
      }
#pragma unroll
      for (int u = 0; u < kTagsInFlight; ++u)
        is_wrong |= differ(tags[u], codes[u]) || places[u] != position + 1;
    }
    if (is_wrong) atomicOr(&wrong[index / 32], 1u << index % 32);
  }
  __syncthreads();
  const int first_wrong = wrong[0]   ? __ffs(wrong[0]) - 1
                          : wrong[1] ? __ffs(wrong[1]) + 31
                                     : TAIL_MAX_ROWS;
  return min(first_wrong, num_read);
}

// A coordinate as it is quantised. NaN counts as zero.
__device__ __forceinline__ float quantisable(float x) {
  return x != x ? 0.0f : fminf(fmaxf(x, -FLT_MAX), FLT_MAX);
}

// Write a lane's coordinates of a group, which kGroupLanes lanes have.
//
// codes, scale: the addresses to write to. The group's first lane writes the
//   scale.
__device__ __forceinline__ void write_group(const float (&x)[kVector],
                                            uint8_t* codes, uint8_t* scale,
                                            bool is_written) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
  for (int mask = 1; mask < kGroupLanes; mask *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
  const __nv_bfloat16 rounded = __float2bfloat16_rn(largest / TAIL_MAX_CODE);
  const float unit = __bfloat162float(rounded);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float ratio = unit > 0.0f ? rintf(x[i] / unit) : 0.0f;
    const float code =
        fminf(fmaxf(ratio, -TAIL_MAX_CODE), float(TAIL_MAX_CODE));
    word |= (uint32_t(int(code)) & 0xFFu) << (8 * i);
  }
  if (!is_written) return;
  *reinterpret_cast<uint32_t*>(codes) = word;
  if (threadIdx.x % kGroupLanes == 0)
    *reinterpret_cast<__nv_bfloat16*>(scale) = rounded;
}

// Write a vector of a row, or two side by side.
//
// item: the index of the vector among the sequence's written ones, 2 * H per
//   token.
template <bool kIsBf16>
__device__ __forceinline__ void write_vector(const KernelParams& p,
                                             const TailSequence& s,
                                             int first_position, int item,
                                             int num_items) {
  using T = std::conditional_t<kIsBf16, __nv_bfloat16, __half>;
  const StoreTail& w = p.tail;
  const int own = min(item, num_items - 1);
  const bool is_key = own % 2 == 0;
  int kv_head;
  const int index = p.by_kv_heads.divide(own / 2, kv_head);
  Position position;
  position.index = first_position + index;
  const int token = s.token_of(position.index);
  const bool is_written =
      item < num_items && token < p.num_tokens && p.slot_mapping[token] >= 0;
  const int first = threadIdx.x % kRowLanes * kVector;
  const uint16_t* vector = (is_key ? p.key + token * p.key_strides.token +
                                         kv_head * p.key_strides.head
                                   : p.value + token * p.value_strides.token +
                                         kv_head * p.value_strides.head) +
                           first;
  const float* offset = nullptr;
  if (KEY_OFFSET != 0 && is_key)
    offset = offset_of(p, position, kv_head) + first;
  const int row = unsigned(position.index) % unsigned(w.num_rows);
  uint8_t* page = w.page(s.block, kv_head);
  uint8_t* codes = page + (is_key ? w.keys : w.values) + row * HEAD_SIZE;
  uint8_t* scales =
      page + (is_key ? w.key_scales : w.value_scales) + row * (2 * kTailGroups);
#pragma unroll
  for (int j = 0; j < kRowChunks; ++j) {
    float4 x = {}, m = {};
    if (is_written) {
      x = load_vector(reinterpret_cast<const T*>(vector) + 128 * j);
      if (offset != nullptr)
        m = __ldg(reinterpret_cast<const float4*>(offset + 128 * j));
    }
    const float own_x[kVector] = {
        quantisable(x.x - m.x), quantisable(x.y - m.y), quantisable(x.z - m.z),
        quantisable(x.w - m.w)};
    const int coordinate = 128 * j + first;
    write_group(own_x, codes + coordinate,
                scales + coordinate / SCALE_GROUP * 2, is_written);
  }
}

// Write rows of a sequence's tokens, in one of the sequence's writing blocks.
template <bool kIsBf16>
__device__ __forceinline__ void write_rows(const KernelParams& p,
                                           const TailSequence& s, int writer) {
  const int first_position = s.first_written(p.tail);
  const int num_items = (s.seq_len - first_position) * p.num_kv_heads * 2;
  const int warps = int(blockDim.x) / 32;
  const int stride = p.tail_writers * warps * kRowVectors;
#pragma unroll 1
  for (int i = (writer * warps + int(threadIdx.x) / 32) * kRowVectors;
       i < num_items; i += stride) {
    write_vector<kIsBf16>(p, s, first_position,
                          i + int(threadIdx.x) % 32 / kRowLanes, num_items);
  }
}

// Do a block's work for the tails. It reads no row of the step's own
// tokens, and nothing that the store writes.
template <bool kIsBf16>
__device__ __forceinline__ void update_tail(const KernelParams& p, int block) {
  const int seq = unsigned(block) / unsigned(1 + p.tail_writers);
  const int role = block - seq * (1 + p.tail_writers);
  const TailSequence s(p, seq);
  const bool has_page = s.block != 0 && s.seq_len > 0;
  if (role > 0) {
    if (has_page) write_rows<kIsBf16>(p, s, role - 1);
    return;
  }
  // All layers have the same lengths. The kernel that reads those of the layer
  // before had ended when this kernel's wait ended.
  const int count = has_page ? count_rows(p, s) : 0;
  if (threadIdx.x == 0) p.tail.packed_lens[seq] = s.seq_len - count;
}

// Set the blocks of tails, for a launch of so many threads per block.
inline void set_tail_blocks(KernelParams& p, int threads) {
  if (WITH_TAIL == 0 || p.num_seqs == 0) return;
  const int vectors = threads / 32 * kRowVectors;  // of a block at once
  const int64_t all = int64_t(p.num_tokens) * p.num_kv_heads * 2;
  const int64_t writers = (all + int64_t(vectors) * p.num_seqs - 1) /
                          (int64_t(vectors) * p.num_seqs);
  p.tail_writers = std::clamp<int64_t>(writers, 1, kMaxTailWriters);
  p.tail_blocks = p.num_seqs * (1 + p.tail_writers);
}

}  // namespace turbo
