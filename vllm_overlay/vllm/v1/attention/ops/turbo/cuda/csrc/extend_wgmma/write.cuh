// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Writes a warpgroup's results, to partial results or to outputs.
#pragma once

#include <type_traits>

#include "extend_wgmma/output_params.cuh"
#include "extend_wgmma/queries.cuh"
#include "merge/inverse_rotation.cuh"

namespace turbo {

// Write partial results.
template <typename Plan, typename Params>
__device__ __forceinline__ void write_rows(const RowsShared<Plan>& shared,
                                           RowsAccumulator& acc,
                                           const Params& p,
                                           const PassSegment& segment,
                                           int first_row, int lane) {
  constexpr bool kOfQueries = std::is_same_v<Params, AttentionParams>;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = row_sum(acc.sum[r]);
    const int query = query_of(shared, p, segment, first_row + 8 * r);
    if (query < 0) continue;
    int64_t row;
    if constexpr (kOfQueries) {
      row = first_partial(p, segment) + query;
    } else {
      row = int64_t(2 * segment.range + segment.begins) * Plan::kRows +
            first_row + 8 * r;
    }
    float* lse = write_partial(acc, p, row, r, total, lane);
    if (kOfQueries && lane % 4 == 0) end_splits(lse, p, segment);
  }
}

// Sums and differences over two lanes. The first lane gets those of both lanes'
// x[i], and the second lane those of both lanes' x[i + kStride]. The sum goes
// to x[i], and the difference to x[i + kStride]. A bit of the place and a bit
// of the lane thereby change roles.
template <int kLanes, int kStride>
__device__ __forceinline__ void add_lanes(float (&x)[HEAD_SIZE / 2], int lane) {
  const bool is_second = lane & kLanes;
  const uint32_t sign = is_second ? 0x80000000u : 0u;
#pragma unroll
  for (int i = 0; i < HEAD_SIZE / 2; ++i) {
    if (i & kStride) continue;
    float &first = x[i], &second = x[i | kStride];
    const float own = is_second ? second : first;
    const float other =
        __shfl_xor_sync(~0u, is_second ? first : second, kLanes);
    first = own + other;
    second = __uint_as_float(__float_as_uint(own - other) ^ sign);
  }
}

// Distances in registers of numbers whose coordinates are 8, 16 and 32 apart.
// The first two hold before rows are rotated.
constexpr int kEights = 4;
constexpr int kSixteens = HEAD_SIZE < 128 ? 8 : 32;
constexpr int kThirtySeconds = HEAD_SIZE < 128 ? 16 : 8;

// H x of two rows, unnormalised. The bits of places in registers and lanes are
// those of coordinates, in another order. Afterwards a lane has runs of eight
// coordinates. Number 2 * b + a of a run is at
// kEights * (b % 2) + kSixteens * (b / 2) + a.
__device__ __forceinline__ void rotate_rows(float (&x)[HEAD_SIZE / 2],
                                            int lane) {
#pragma unroll
  for (int width = 1; width < HEAD_SIZE / 2; width *= 2) {
    if (width == 2) continue;  // the bit of the two rows
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 2; ++i) {
      if (i & width) continue;
      const float difference = x[i] - x[i | width];
      x[i] += x[i | width];
      x[i | width] = difference;
    }
  }
  add_lanes<1, kEights>(x, lane);
  add_lanes<2, kSixteens>(x, lane);
}

// Write outputs of rows that have attended to all tokens that they see.
template <typename Plan>
__device__ __forceinline__ void write_outputs(const RowsShared<Plan>& shared,
                                              RowsAccumulator& acc,
                                              const OutputParams& p,
                                              const OutputSegment& segment,
                                              int first_row, int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = row_sum(acc.sum[r]);
    const int query = max(query_of(shared, p, segment, first_row + 8 * r), 0);
    if (p.sinks.logits != nullptr) {
      const int head = query % (p.num_kv_heads * p.heads_per_kv);
      total +=
          exp2_approx(p.sinks.load(head) - (acc.reference[r] + acc.missing[r]));
    }
    const float factor = total != 0.0f ? INVERSE_SQRT / total : 0.0f;
#pragma unroll
    for (int n = 0; n < HEAD_SIZE / 8; ++n) {
      acc.output[4 * n + 2 * r] *= factor;
      acc.output[4 * n + 2 * r + 1] *= factor;
    }
  }
  rotate_rows(acc.output, lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = query_of(shared, p, segment, first_row + 8 * r);
    if (query < 0) continue;
    auto* output = static_cast<uint16_t*>(p.output) +
                   p.output_place(segment.first_token, query) + 8 * t;
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 32; ++i) {
      const uint32_t signs = kRotationSigns[i] >> (8 * t);
      uint32_t words[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float* pair = acc.output + kThirtySeconds * i + 2 * r +
                            kEights * (b % 2) + kSixteens * (b / 2);
        const float x = __uint_as_float(__float_as_uint(pair[0]) ^
                                        signs << (31 - 2 * b) & 0x80000000u);
        const float y = __uint_as_float(__float_as_uint(pair[1]) ^
                                        signs << (30 - 2 * b) & 0x80000000u);
        words[b] = p.is_bf16 ? as_bits(__floats2bfloat162_rn(x, y))
                             : as_bits(__floats2half2_rn(x, y));
      }
      *reinterpret_cast<uint4*>(output + 32 * i) = {words[0], words[1],
                                                    words[2], words[3]};
    }
  }
}

// Write a warpgroup's results of a segment.
template <typename Plan>
__device__ __forceinline__ void write(const RowsShared<Plan>& shared,
                                      RowsAccumulator& acc,
                                      const AttentionParams& p,
                                      const PassSegment& segment, int first_row,
                                      int lane) {
  write_rows(shared, acc, p, segment, first_row, lane);
}
template <typename Plan>
__device__ __forceinline__ void write(const RowsShared<Plan>& shared,
                                      RowsAccumulator& acc,
                                      const OutputParams& p,
                                      const OutputSegment& segment,
                                      int first_row, int lane) {
  if (segment.begins && segment.ends) {
    write_outputs(shared, acc, p, segment, first_row, lane);
  } else {
    write_rows(shared, acc, p, segment, first_row, lane);
  }
}

// Write the outputs of sequences without tokens, which are zero.
template <int kThreads>
__device__ __forceinline__ void write_empty(const OutputParams& p, int thread) {
  constexpr int kRowWords = HEAD_SIZE / 2;
#pragma unroll 1
  for (int seq = int(blockIdx.x); seq < p.num_seqs; seq += int(gridDim.x)) {
    const SeenTokens seen(p, seq);
    if (seen.first < seen.last || p.num_raw_tiles(seq) > 0) continue;
    const int num_words =
        p.num_query_tokens(seq) * p.num_kv_heads * p.heads_per_kv * kRowWords;
#pragma unroll 1
    for (int i = thread; i < num_words; i += kThreads) {
      auto* output = static_cast<uint16_t*>(p.output) +
                     p.output_place(p.first_token(seq), i / kRowWords);
      reinterpret_cast<uint32_t*>(output)[i % kRowWords] = 0;
    }
  }
}

}  // namespace turbo
