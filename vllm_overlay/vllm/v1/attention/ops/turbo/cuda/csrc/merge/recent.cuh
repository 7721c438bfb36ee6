// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention of a row to the tokens that the recent window has of its sequence,
// which the splits leave out.
#pragma once

#include "merge/newest.cuh"

namespace turbo {

// Tokens that a warp has on their way at once.
constexpr int kRecentTokens = kChunks == 1 && kSideBySide == 1 ? 8 : 4;
static_assert(WINDOW_MAX_ROWS <= OFFSET_SEGMENT,
              "they have two offsets at most");

// A code of four in a word, exactly: with its sign bit flipped it is that of a
// float's mantissa.
__device__ __forceinline__ float code_of(uint32_t flipped, int i) {
  constexpr uint32_t kBits = 0x4B000000u;  // of 2**23
  return __uint_as_float(__byte_perm(flipped, kBits, 0x7440 | i)) - 8388736.0f;
}

// Of the 8-bit vectors' kVector coordinates that a lane has.
__device__ __forceinline__ float4 codes_of(uint32_t word) {
  const uint32_t flipped = word ^ 0x80808080u;
  return {code_of(flipped, 0), code_of(flipped, 1), code_of(flipped, 2),
          code_of(flipped, 3)};
}

// Load the codes of kVector coordinates.
__device__ __forceinline__ uint32_t load_codes(const uint8_t* codes) {
  return __ldcg(reinterpret_cast<const uint32_t*>(codes));
}

// Load a lane's scale, of its coordinates of a chunk.
__device__ __forceinline__ float load_scale(const uint8_t* row, int first) {
  const auto* scales = reinterpret_cast<const uint16_t*>(row);
  return __uint_as_float(uint32_t(__ldcg(scales + first / SCALE_GROUP)) << 16);
}

__device__ __forceinline__ float dot(const float4& a, const float4& b) {
  return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
}

// What the scores lack where an offset was taken off K: of the first of
// neighbouring tokens and, if it is another, of those from a position on.
struct RecentOffset {
  float first = 0.0f, last = 0.0f;
  int last_start = 0;

  __device__ __forceinline__ RecentOffset(const MergeParams& p,
                                          const float4 (&q)[kChunks],
                                          int kv_head, int position, int count,
                                          int lane) {
    if (p.key_offset == nullptr) return;
    const int end = p.num_offsets - 1;
    const int segment = min(position / OFFSET_SEGMENT, end);
    const int last_segment = min((position + count - 1) / OFFSET_SEGMENT, end);
    last_start = last_segment * OFFSET_SEGMENT;
    first = last = score(p, q, kv_head, segment, lane);
    if (last_segment != segment)
      last = score(p, q, kv_head, last_segment, lane);
  }
  __device__ __forceinline__ static float score(const MergeParams& p,
                                                const float4 (&q)[kChunks],
                                                int kv_head, int segment,
                                                int lane) {
    const float* m = p.key_offset +
                     (int64_t(segment) * p.num_kv_heads + kv_head) * HEAD_SIZE +
                     lane % kLanes * kVector;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kChunks; ++j)
      sum += dot(q[j], __ldg(reinterpret_cast<const float4*>(m + 128 * j)));
    return warp_sum<kLanes>(sum);
  }
  __device__ __forceinline__ float at(int position) const {
    return position >= last_start ? last : first;
  }
};

// Add to a row's newest tokens those of the window, which lie before them: a
// warp's, of several that share a row. Nothing is taken from L1, which may have
// what was there before the store.
template <typename T>
__device__ __forceinline__ void attend_recent(Newest& newest,
                                              const MergeParams& p, int seq,
                                              const Row& row, int warp,
                                              int warps, int lane) {
  const int packed_len = __ldcg(p.packed_lens + seq);
  const int count = p.seq_lens[seq] - packed_len;
  if (kRecentTokens * warp >= count) return;
  const int kv_head = unsigned(row.head) / unsigned(p.heads_per_kv);
  const int first = lane % kLanes * kVector;
  const T* query = static_cast<const T*>(p.query) +
                   row.token * p.stride_query_token +
                   row.head * p.stride_query_head + first;
  float4 q[kChunks];
#pragma unroll
  for (int j = 0; j < kChunks; ++j) q[j] = load_vector(query + 128 * j);
  const int position = packed_len - row.query_len;
  const RecentOffset offset(p, q, kv_head, position, count, lane);
  const WindowPages& window = p.window;
  const uint8_t* page = window.page(window.blocks[seq], kv_head);
  const int first_row = unsigned(position) % unsigned(window.num_rows);
#pragma unroll 1
  for (int base = kRecentTokens * warp; base < count;
       base += kRecentTokens * warps) {
    uint32_t keys[kRecentTokens][kChunks], values[kRecentTokens][kChunks];
    float key_scales[kRecentTokens][kChunks];
    float value_scales[kRecentTokens][kChunks];
#pragma unroll
    for (int u = 0; u < kRecentTokens; ++u) {
      // Past the last token it is loaded again.
      int own = first_row + min(base + u, count - 1);
      if (own >= window.num_rows) own -= window.num_rows;
      const uint8_t* vectors = page + own * HEAD_SIZE;
      const uint8_t* scales = page + own * (2 * kWindowGroups);
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const int coordinate = 128 * j + first;
        keys[u][j] = load_codes(vectors + window.keys + coordinate);
        values[u][j] = load_codes(vectors + window.values + coordinate);
        key_scales[u][j] = load_scale(scales + window.key_scales, coordinate);
        value_scales[u][j] =
            load_scale(scales + window.value_scales, coordinate);
      }
    }
    float score[kRecentTokens];
#pragma unroll
    for (int u = 0; u < kRecentTokens; ++u) {
      score[u] = 0.0f;
#pragma unroll
      for (int j = 0; j < kChunks; ++j)
        score[u] += key_scales[u][j] * dot(q[j], codes_of(keys[u][j]));
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
#pragma unroll
      for (int u = 0; u < kRecentTokens; ++u)
        score[u] += __shfl_xor_sync(~0u, score[u], mask);
    }
    float larger = newest.largest;
#pragma unroll
    for (int u = 0; u < kRecentTokens; ++u) {
      score[u] =
          base + u < count
              ? p.score_factor * (score[u] + offset.at(position + base + u))
              : -INFINITY;
      larger = fmaxf(larger, score[u]);
    }
    newest.raise(larger);
#pragma unroll
    for (int u = 0; u < kRecentTokens; ++u) {
      const float weight = exp2_approx(score[u] - or_zero(larger));
      newest.total += weight;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const float4 code = codes_of(values[u][j]);
        const float scaled = weight * value_scales[u][j];
        newest.value[j].x = fmaf(scaled, code.x, newest.value[j].x);
        newest.value[j].y = fmaf(scaled, code.y, newest.value[j].y);
        newest.value[j].z = fmaf(scaled, code.z, newest.value[j].z);
        newest.value[j].w = fmaf(scaled, code.w, newest.value[j].w);
      }
    }
  }
}

// What the warps of a row have of the window's tokens, to be joined by the
// first. Without a window the first alone has tokens.
template <bool kWithWindow>
struct RecentShared {
  __device__ __forceinline__ void put(const Newest&, int, int) {}
  __device__ __forceinline__ void join(Newest&, int, int, int) const {}
};

template <>
struct RecentShared<true> {
  float largest[kMergeWarps], total[kMergeWarps];
  float4 value[kMergeWarps][HEAD_SIZE / kVector];

  __device__ __forceinline__ void put(const Newest& newest, int warp,
                                      int lane) {
    if (lane == 0) {
      largest[warp] = newest.largest;
      total[warp] = newest.total;
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j)
      value[warp][32 * j + lane % kLanes] = newest.value[j];
  }
  // Those of a row's other warps, after all have put theirs.
  __device__ __forceinline__ void join(Newest& newest, int warp, int warps,
                                       int lane) const {
#pragma unroll 1
    for (int w = warp + 1; w < warp + warps; ++w) {
      float4 other[kChunks];
#pragma unroll
      for (int j = 0; j < kChunks; ++j)
        other[j] = value[w][32 * j + lane % kLanes];
      newest.add(largest[w], other, total[w]);
    }
  }
};

}  // namespace turbo
