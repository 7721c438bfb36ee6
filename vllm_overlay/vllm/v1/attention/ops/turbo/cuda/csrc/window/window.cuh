// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The recent window: rows of the step's newest tokens are written, and those of
// the tokens before are counted that still are what is packed.
//
// It is launched after the store, and does while that runs what does not depend
// on it. Block (i, j) is of sequence i; it has the j-th rows of kWindowWarps,
// and of every gridDim.y * kWindowWarps that follow. Those of j = 0 count.
#pragma once

#include <cfloat>

#include "common/vectors.cuh"
#include "common/warp.cuh"
#include "window/params.cuh"

namespace turbo {

constexpr int kWindowWarps = 8;
constexpr int kWindowThreads = 32 * kWindowWarps;
// Heads whose tags a thread has on their way at once.
constexpr int kTagsInFlight = 4;
// Tokens of a step up to which the slots that it stores to are looked at.
constexpr int kMaxSlots = 8 * kWindowThreads;

// Lanes that have a vector, kVector coordinates of each 128.
constexpr int kRowLanes = HEAD_SIZE < 128 ? HEAD_SIZE / kVector : 32;
constexpr int kRowChunks = HEAD_SIZE < 128 ? 1 : HEAD_SIZE / 128;
constexpr int kRowVectors = 32 / kRowLanes;  // of a warp, side by side
constexpr int kGroupLanes = SCALE_GROUP / kVector;

// Whether the step stores other sequences' tokens to blocks of the tokens whose
// rows are counted, as for a prefix that is found while it is computed. All
// threads of a block call it.
__device__ __forceinline__ bool is_being_stored(const WindowParams& p,
                                                const WindowSequence& s,
                                                int num_read) {
  if (p.num_tokens > kMaxSlots) return true;
  const int first_token = s.token_of(s.first_own);
  const int first = unsigned(s.first_own - num_read) / unsigned(p.block_size);
  const int last = unsigned(s.first_own - 1) / unsigned(p.block_size);
  bool found = false;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.num_tokens; i += kWindowThreads) {
    const int slot = static_cast<int>(p.slot_mapping[i]);
    if (slot < 0 || (i >= first_token && i < s.end)) continue;
    const int block = unsigned(slot) / unsigned(p.block_size);
    for (int j = first; j <= last; ++j) found |= s.table[j] == block;
  }
  return __syncthreads_or(found);
}

// The rows, from the nearest token on, of which each is in all heads what is
// packed. All threads of a block call it.
//
// wrong: bits of the others, zero before; in shared memory.
__device__ __forceinline__ int count_rows(const WindowParams& p,
                                          const WindowSequence& s, int num_read,
                                          uint32_t (&wrong)[2]) {
  const uint8_t* page = p.page(s.block, 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < num_read * kTagPieces; i += kWindowThreads) {
    const int index = i / kTagPieces, piece = i % kTagPieces;
    const int position = s.first_own - 1 - index;
    const int row = unsigned(position) % unsigned(p.num_rows);
    const uint8_t* packed = packed_piece(p, s, position, piece);
    const uint8_t* tag =
        page + p.tags + row * KEY_CODE_BYTES + piece * int(sizeof(TagPiece));
    const uint8_t* place = page + p.places + row * int(sizeof(int));
    bool is_wrong = false;
#pragma unroll 1
    for (int head = 0; head < p.num_kv_heads; head += kTagsInFlight) {
      TagPiece tags[kTagsInFlight], codes[kTagsInFlight];
      int places[kTagsInFlight];
#pragma unroll
      for (int u = 0; u < kTagsInFlight; ++u) {
        const int64_t own = min(head + u, p.num_kv_heads - 1);
        tags[u] = *reinterpret_cast<const TagPiece*>(tag + own * p.stride_head);
        codes[u] = *reinterpret_cast<const TagPiece*>(
            packed + own * p.stride_cache_head);
        places[u] = *reinterpret_cast<const int*>(place + own * p.stride_head);
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
                                     : WINDOW_MAX_ROWS;
  return min(first_wrong, num_read);
}

// A coordinate as it is quantised: what is no number counts as zero.
__device__ __forceinline__ float quantisable(float x) {
  return x != x ? 0.0f : fminf(fmaxf(x, -FLT_MAX), FLT_MAX);
}

// Write a lane's coordinates of a group, which kGroupLanes lanes have.
//
// codes, scale: where they go; the group's first lane writes the scale.
__device__ __forceinline__ void write_group(const float (&x)[kVector],
                                            uint8_t* codes, uint8_t* scale,
                                            bool is_written) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
  for (int mask = 1; mask < kGroupLanes; mask *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
  const __nv_bfloat16 rounded = __float2bfloat16_rn(largest / WINDOW_MAX_CODE);
  const float unit = __bfloat162float(rounded);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float ratio = unit > 0.0f ? rintf(x[i] / unit) : 0.0f;
    const float code =
        fminf(fmaxf(ratio, -WINDOW_MAX_CODE), float(WINDOW_MAX_CODE));
    word |= (uint32_t(int(code)) & 0xFFu) << (8 * i);
  }
  if (!is_written) return;
  *reinterpret_cast<uint32_t*>(codes) = word;
  if (threadIdx.x % kGroupLanes == 0)
    *reinterpret_cast<__nv_bfloat16*>(scale) = rounded;
}

// Write a vector of a row, or two side by side.
//
// item: of the sequence's vectors that are written, 2 * H a token.
template <typename T>
__device__ __forceinline__ void write_vector(const WindowParams& p,
                                             const WindowSequence& s,
                                             int first_position, int item,
                                             int num_items) {
  const int lane = threadIdx.x % kRowLanes;
  const int own = min(item, num_items - 1);
  const bool is_key = own % 2 == 0;
  const int index = own / 2 / p.num_kv_heads;
  const int kv_head = own / 2 - index * p.num_kv_heads;
  const int position = first_position + index;
  const int token = s.token_of(position);
  const bool is_written =
      item < num_items && token < p.num_tokens && p.slot_mapping[token] >= 0;
  const int first = lane * kVector;
  const T* vector =
      (is_key
           ? reinterpret_cast<const T*>(p.key) + token * p.stride_key_token +
                 kv_head * p.stride_key_head
           : reinterpret_cast<const T*>(p.value) +
                 token * p.stride_value_token + kv_head * p.stride_value_head) +
      first;
  const float* offset = nullptr;
  if (is_key && p.key_offset != nullptr) {
    const int segment = min(position / OFFSET_SEGMENT, p.num_offsets - 1);
    offset = p.key_offset +
             (int64_t(segment) * p.num_kv_heads + kv_head) * HEAD_SIZE + first;
  }
  const int row = unsigned(position) % unsigned(p.num_rows);
  uint8_t* page = p.page(s.block, kv_head);
  uint8_t* codes = page + (is_key ? p.keys : p.values) + row * HEAD_SIZE;
  uint8_t* scales = page + (is_key ? p.key_scales : p.value_scales) +
                    row * (2 * kWindowGroups);
#pragma unroll
  for (int j = 0; j < kRowChunks; ++j) {
    float4 x = {}, m = {};
    if (is_written) {
      x = load_vector(vector + 128 * j);
      if (offset != nullptr)
        m = *reinterpret_cast<const float4*>(offset + 128 * j);
    }
    const float own_x[kVector] = {
        quantisable(x.x - m.x), quantisable(x.y - m.y), quantisable(x.z - m.z),
        quantisable(x.w - m.w)};
    const int coordinate = 128 * j + first;
    write_group(own_x, codes + coordinate,
                scales + coordinate / SCALE_GROUP * 2, is_written);
  }
}

// Write the tags of the step's tokens, of what the store has made of them.
__device__ __forceinline__ void write_tags(const WindowParams& p,
                                           const WindowSequence& s,
                                           int first_position) {
  const int num_items =
      (s.seq_len - first_position) * p.num_kv_heads * kTagPieces;
  const int stride = int(gridDim.y) * kWindowThreads;
#pragma unroll 1
  for (int i = int(blockIdx.y) * kWindowThreads + int(threadIdx.x);
       i < num_items; i += stride) {
    const int piece = i % kTagPieces;
    const int index = i / kTagPieces / p.num_kv_heads;
    const int kv_head = i / kTagPieces - index * p.num_kv_heads;
    const int position = first_position + index;
    const int token = s.token_of(position);
    if (token >= p.num_tokens || p.slot_mapping[token] < 0) continue;
    const int row = unsigned(position) % unsigned(p.num_rows);
    uint8_t* page = p.page(s.block, kv_head);
    uint8_t* tag =
        page + p.tags + row * KEY_CODE_BYTES + piece * int(sizeof(TagPiece));
    *reinterpret_cast<TagPiece*>(tag) = *reinterpret_cast<const TagPiece*>(
        packed_piece(p, s, position, piece) + kv_head * p.stride_cache_head);
    if (piece == 0)
      *reinterpret_cast<int*>(page + p.places + row * int(sizeof(int))) =
          position + 1;
  }
}

template <typename T>
__global__ void __launch_bounds__(kWindowThreads, 3)
    window_kernel(const __grid_constant__ WindowParams p) {
  __shared__ uint32_t wrong[2];
  start_next_kernel();
  const int seq = blockIdx.x;
  const bool counts = blockIdx.y == 0;
  const WindowSequence s(p, seq);
  if (s.block == 0 || s.seq_len <= 0) {
    // Also here: the next kernel takes it that the store has ended.
    wait_for_previous_kernel();
    if (counts && threadIdx.x == 0) p.packed_lens[seq] = s.seq_len;
    return;
  }
  if (threadIdx.x < 2) wrong[threadIdx.x] = 0;
  __syncthreads();

  // Kernels before the store have ended when that begins. So rows may be
  // written, which none reads now, and what is packed may be read, unless the
  // store writes it.
  const int num_read = counts ? s.num_read(p) : 0;
  const bool has_to_wait = num_read > 0 && is_being_stored(p, s, num_read);
  int count = 0;
  if (!has_to_wait) count = count_rows(p, s, num_read, wrong);
  const int first_position = s.first_written(p);
  const int num_items = (s.seq_len - first_position) * p.num_kv_heads * 2;
  const int stride = int(gridDim.y) * kWindowWarps * kRowVectors;
#pragma unroll 1
  for (int i = (int(blockIdx.y) * kWindowWarps + int(threadIdx.x / 32)) *
               kRowVectors;
       i < num_items; i += stride) {
    write_vector<T>(p, s, first_position, i + int(threadIdx.x) % 32 / kRowLanes,
                    num_items);
  }

  wait_for_previous_kernel();
  write_tags(p, s, first_position);
  if (has_to_wait) count = count_rows(p, s, num_read, wrong);
  // All layers have the same lengths. Who reads those of the layer before had
  // ended when the store began.
  if (counts && threadIdx.x == 0) p.packed_lens[seq] = s.seq_len - count;
}

}  // namespace turbo
