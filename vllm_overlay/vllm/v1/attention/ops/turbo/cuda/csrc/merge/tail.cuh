// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Attention of a block's rows to their sequence's tokens in the tail,
// which the splits leave out. Rows of one query token and KV head share these
// tokens. Their warps divide the tokens, not the rows.
#pragma once

#include "merge/tail_scores.cuh"

namespace turbo {

// A tail with the first token has none of the second segment.
static_assert(TAIL_MAX_ROWS <= OFFSET_SEGMENT,
              "a tail's tokens may have more than two offsets");

// Load a scale, bypassing L1.
__device__ __forceinline__ float load_scale(const uint8_t* scales, int group) {
  const auto* bits = reinterpret_cast<const uint16_t*>(scales) + group;
  return __uint_as_float(uint32_t(__ldcg(bits)) << 16);
}

__device__ __forceinline__ float dot(const float4& a, const float4& b) {
  return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
}

// The part that a row's scores lack where an offset was taken off K.
// Neighbouring tokens have one offset, or a second one from a position on.
struct TailOffset {
  float first, last;
  int last_start;

  template <typename T>
  __device__ __forceinline__ void load(const MergeParams& p, const Row& row,
                                       int position, int count, int lane) {
    const int own = lane % kLanes * kVector;
    const T* query = static_cast<const T*>(p.query) +
                     row.token * p.query_strides.token +
                     row.head * p.query_strides.head + own;
    const int kv_head = unsigned(row.head) / unsigned(p.heads_per_kv);
    const auto row_of = [&](int position) {
      return position == 0
                 ? 0
                 : min(position / OFFSET_SEGMENT + 1, p.num_offsets - 1);
    };
    const int first_row = row_of(position);
    const int last_row = row_of(position + count - 1);
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const float4 q = load_vector(query + 128 * j);
      const float* m = p.key_offset + kv_head * HEAD_SIZE + own + 128 * j;
      const int64_t stride = p.num_kv_heads * HEAD_SIZE;
      sums[0] += dot(
          q, __ldg(reinterpret_cast<const float4*>(m + first_row * stride)));
      sums[1] +=
          dot(q, __ldg(reinterpret_cast<const float4*>(m + last_row * stride)));
    }
    sums[0] = warp_sum<kLanes>(sums[0]);
    sums[1] = warp_sum<kLanes>(sums[1]);
    const int start = max((last_row - 1) * OFFSET_SEGMENT, 1);
    if (lane == 0) *this = {sums[0], sums[1], start};
  }
  __device__ __forceinline__ float at(int position) const {
    return position >= last_start ? last : first;
  }
};

// A warp's sums over the tail's tokens.
struct TailSums {
  union {
    TailTile tile;
    float4 value[kTailHeads][HEAD_SIZE / kVector];
  };
  float largest[kTailHeads], total[kTailHeads];  // as in RawSum
};

struct TailShared {
  TailSums sums[kMergeWarps];
  TailOffset offsets[kMergeWarps];  // by row
};

// Neighbouring rows of a block that attend together, and their warps.
struct TailRows {
  int first;        // in the block
  int first_head;   // its query head
  int count;        // up to kTailHeads
  int warp, warps;  // this warp and their number; it has no row if past them

  // index, head: those of the warp's own row.
  __device__ __forceinline__ TailRows(const MergeParams& p, int first_row,
                                      int index, int head, int own_warp) {
    const int group = unsigned(index) / unsigned(p.heads_per_kv);
    const int start = max(group * p.heads_per_kv, first_row);
    const int end = min((group + 1) * p.heads_per_kv,
                        first_row + (kMergeWarps >> p.row_shift));
    const int own = (index - start) % kTailHeads;
    first = index - own - first_row;
    first_head = head - own;
    count = min(end - (index - own), kTailHeads);
    warp = own_warp - (first << p.row_shift);
    warps = count << p.row_shift;
  }
};

// The tokens of a sequence that the tail has.
struct TailRange {
  int position, count;  // of the first token; of tokens
  int row;              // of the first token, in the page

  __device__ __forceinline__ TailRange(const MergeParams& p, int seq,
                                       int query_len) {
    const int packed_len = __ldcg(p.packed_lens + seq);
    count = p.seq_lens[seq] - packed_len;
    position = packed_len - query_len;
    row = unsigned(max(position, 0)) % unsigned(p.tail.num_rows);
  }
};

// A lane's sums over tokens: kVector coordinates of each chunk, for each head.
// With 64 coordinates each half of a warp has every other token.
struct TailValues {
  static constexpr int kSteps = kTailTokens / kSideBySide;
  static constexpr int kOwnGroups = kTailGroups / 4;
  float scales[kOwnGroups];  // of token lane / 4, in parts of four lanes
  float4 sum[kTailHeads][kChunks] = {};

  // row: that of token lane / 4.
  __device__ __forceinline__ void load_scales(const TailPages& tail,
                                              const uint8_t* page, int row,
                                              int lane) {
    const uint8_t* own = page + tail.value_scales + row * (2 * kTailGroups);
#pragma unroll
    for (int i = 0; i < kOwnGroups; ++i)
      scales[i] = load_scale(own, lane % 4 * kOwnGroups + i);
  }

  __device__ __forceinline__ void multiply(const HeadWeights& by) {
#pragma unroll
    for (int h = 0; h < kTailHeads; ++h) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        float4& x = sum[h][j];
        x.x *= by.of[h], x.y *= by.of[h], x.z *= by.of[h], x.w *= by.of[h];
      }
    }
  }

  // Add a tile's tokens, with the weights of token lane / 4.
  __device__ __forceinline__ void add(TailTile& tile, const HeadWeights& weight,
                                      int lane) {
    __syncwarp();  // until keys have been read
#pragma unroll
    for (int i = 0; i < kOwnGroups; ++i) {
      HeadWeights scaled;
#pragma unroll
      for (int h = 0; h < kTailHeads; ++h)
        scaled.of[h] = weight.of[h] * scales[i];
      tile.weights[lane / 4][lane % 4 * kOwnGroups + i] = scaled;
    }
    __syncwarp();
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int token = kSideBySide * u + lane / kLanes;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const int group = (128 * j + lane % kLanes * kVector) / SCALE_GROUP;
        const HeadWeights w = tile.weights[token][group];
        const auto* words = reinterpret_cast<const uint32_t*>(
            tile.values[token] + lane % kLanes * kVector);
        const float4 code = codes_of(words[32 * j]);
#pragma unroll
        for (int h = 0; h < kTailHeads; ++h) {
          float4& x = sum[h][j];
          x.x = fmaf(w.of[h], code.x, x.x);
          x.y = fmaf(w.of[h], code.y, x.y);
          x.z = fmaf(w.of[h], code.z, x.z);
          x.w = fmaf(w.of[h], code.w, x.w);
        }
      }
    }
  }

  __device__ __forceinline__ void put(TailSums& shared, int lane) {
    __syncwarp();  // until the tile has been read
#pragma unroll
    for (int h = 0; h < kTailHeads; ++h) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        float4 x = sum[h][j];
        if constexpr (kSideBySide == 2) {
          x.x += __shfl_xor_sync(~0u, x.x, kLanes);
          x.y += __shfl_xor_sync(~0u, x.y, kLanes);
          x.z += __shfl_xor_sync(~0u, x.z, kLanes);
          x.w += __shfl_xor_sync(~0u, x.w, kLanes);
        }
        shared.value[h][32 * j + lane % kLanes] = x;
      }
    }
  }
};

// The maximum, or the sum, over all tokens, for lanes of one column. Lanes of
// neighbouring tokens are four apart.
__device__ __forceinline__ float largest_of_tokens(float x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2)
    x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

__device__ __forceinline__ float sum_of_tokens(float x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// The numbers of all heads. Lane `first` and the next lane have two heads each.
__device__ __forceinline__ HeadWeights of_all_heads(const float (&own)[2],
                                                    int first) {
  HeadWeights all;
#pragma unroll
  for (int h = 0; h < kTailHeads; ++h)
    all.of[h] = __shfl_sync(~0u, own[h % 2], first + h / 2);
  return all;
}

// Attend to a warp's share of the tokens. Loads bypass L1, which may have data
// from before the store.
template <typename T>
__device__ __forceinline__ void attend_to_range(TailShared& shared,
                                                const MergeParams& p,
                                                const uint8_t* page,
                                                const TailRange& range,
                                                const TailRows& rows,
                                                int64_t query_token, int lane) {
  const int place = lane / 4, quarter = lane % 4;
  const int column = place % 4, head = 2 * (quarter % 2);
  const bool has_query = column < rows.count && place / 4 == quarter / 2;
  const T* query = static_cast<const T*>(p.query) +
                   query_token * p.query_strides.token +
                   (rows.first_head + column) * p.query_strides.head +
                   quarter * (kKeyColumns / 4);
  TailSums& sums = shared.sums[(rows.first << p.row_shift) + rows.warp];
  TailValues values;
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
#pragma unroll 1
  for (int base = kTailTokens * rows.warp; base < range.count;
       base += kTailTokens * rows.warps) {
    // After the last token, that token is loaded again.
    const auto row_of = [&](int i) {
      const int row = range.row + min(base + i, range.count - 1);
      return row < p.tail.num_rows ? row : row - p.tail.num_rows;
    };
    __syncwarp();  // until values have been read
    sums.tile.copy(p.tail, page, lane, row_of);
    const int row = row_of(place);
    TailKeyScales key_scales;
    key_scales.load(p.tail, page, row);
    values.load_scales(p.tail, page, row, lane);
    TailQuery<T> own_query;
    // Queries are loaded while copies are under way, if registers have room.
    if constexpr (kChunks == 1) own_query.load(query, has_query);
    wait_copies<0>();
    __syncwarp();
    if constexpr (kChunks > 1) own_query.load(query, has_query);
    float score[2], rescale[2], weight[2];
    score_tail<T>(score, sums.tile, key_scales, own_query, lane);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const bool is_one = base + place < range.count && head + c < rows.count;
      if (p.key_offset != nullptr && is_one) {
        const TailOffset& offset = shared.offsets[rows.first + head + c];
        score[c] += offset.at(range.position + base + place);
      }
      score[c] = is_one ? p.score_of(score[c]) : -INFINITY;
      const float larger = fmaxf(largest[c], largest_of_tokens(score[c]));
      rescale[c] = exp2_approx(largest[c] - or_zero(larger));
      weight[c] = exp2_approx(score[c] - or_zero(larger));
      total[c] = fmaf(total[c], rescale[c], weight[c]);
      largest[c] = larger;
    }
    values.multiply(of_all_heads(rescale, 0));
    values.add(sums.tile, of_all_heads(weight, lane - quarter), lane);
  }
  values.put(sums, lane);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float sum = sum_of_tokens(total[c]);
    if (lane < kTailHeads / 2) {
      sums.largest[head + c] = largest[c];
      sums.total[head + c] = sum;
    }
  }
}

// Add the tail's tokens to a row's raw tokens, from all warps that have
// some.
//
// sums: those of the rows' first warp and the next ones.
// head: the row among the rows.
__device__ __forceinline__ void join_tail(RawSum& raw, const TailSums* sums,
                                          int warps, int head, int lane) {
  static_assert(kMergeWarps <= 32);
  const bool is_one = lane < warps;
  const float own = is_one ? sums[lane].largest[head] : -INFINITY;
  const float larger = fmaxf(raw.largest, warp_max(own));
  raw.raise(larger);
  const float weight = exp2_approx(own - or_zero(larger));
  raw.total += warp_sum<32>(is_one ? weight * sums[lane].total[head] : 0.0f);
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) {
    if (w >= warps) break;
    const float its_weight = __shfl_sync(~0u, weight, w);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const float4 x = sums[w].value[head][32 * j + lane % kLanes];
      raw.value[j].x = fmaf(its_weight, x.x, raw.value[j].x);
      raw.value[j].y = fmaf(its_weight, x.y, raw.value[j].y);
      raw.value[j].z = fmaf(its_weight, x.z, raw.value[j].z);
      raw.value[j].w = fmaf(its_weight, x.w, raw.value[j].w);
    }
  }
}

// Attention of a block's rows to the tail's tokens.
//
// kIsThere: whether there is a tail.
template <bool kIsThere>
struct Tail {
  __device__ __forceinline__ Tail(const MergeParams&, int, const Row&, int, int,
                                  int) {}
  template <typename T>
  __device__ __forceinline__ void attend(const MergeParams&, int, const Row&,
                                         int, int) {}
  __device__ __forceinline__ void join(const MergeParams&, RawSum&, int,
                                       int) const {}
};

// All threads of the block call each function.
template <>
struct Tail<true> {
  TailShared& shared;
  TailRange range;
  TailRows rows;
  bool has_row, is_first;  // whether the warp has one, and is its first warp

  // index: the warp's row in the sequence.
  // warp: the warp in the block.
  __device__ __forceinline__ Tail(const MergeParams& p, int seq, const Row& row,
                                  int first_row, int index, int warp)
      : shared(shared_memory()),
        range(p, seq, row.query_len),
        rows(p, first_row, index, row.head, warp) {
    has_row = row.place < row.query_len && rows.warp < rows.warps;
    is_first = (warp & ((1 << p.row_shift) - 1)) == 0;
  }
  __device__ __forceinline__ static TailShared& shared_memory() {
    __shared__ TailShared tail;
    return tail;
  }
  // own: the warp's row in the block.
  template <typename T>
  __device__ __forceinline__ void attend(const MergeParams& p, int seq,
                                         const Row& row, int own, int lane) {
    if (p.key_offset != nullptr) {
      if (has_row && is_first && range.count > 0) {
        shared.offsets[own].load<T>(p, row, range.position, range.count, lane);
      }
      __syncthreads();
    }
    if (!has_row || kTailTokens * rows.warp >= range.count) return;
    const int kv_head = unsigned(row.head) / unsigned(p.heads_per_kv);
    const uint8_t* page = p.tail.page(p.tail.blocks[seq], kv_head);
    attend_to_range<T>(shared, p, page, range, rows, row.token, lane);
  }
  // Add the sums of the rows' warps to a row's raw tokens, in its first
  // warp.
  __device__ __forceinline__ void join(const MergeParams& p, RawSum& raw,
                                       int own, int lane) const {
    __syncthreads();
    if (!has_row || !is_first) return;
    const int filled = (range.count + kTailTokens - 1) / kTailTokens;
    join_tail(raw, shared.sums + (rows.first << p.row_shift),
              min(rows.warps, filled), own - rows.first, lane);
  }
};

}  // namespace turbo
