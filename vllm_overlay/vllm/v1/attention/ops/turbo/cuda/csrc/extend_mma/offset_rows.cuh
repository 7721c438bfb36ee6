// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// q.m of a block's rows: see common/offset.cuh. Producers compute it where the
// offset of K changes, because they have registers for it, and consumers read
// it.
#pragma once

#include "common/offset.cuh"
#include "extend_mma/rows.cuh"
#include "extend_mma/stages.cuh"

namespace turbo {

template <int kRows, bool kExists = KEY_OFFSET != 0>
struct OffsetNotes {
  float scores[kRows];  // q.m
  float gains[kRows];   // what a sequence's first token lacks beside that
  alignas(8) uint64_t full, empty;

  // producers, consumers: the block's warps.
  __device__ __forceinline__ void init(int producers, int consumers) {
    init_barrier(shared_address(&full), producers);
    init_barrier(shared_address(&empty), consumers);
  }
};
template <int kRows>
struct OffsetNotes<kRows, false> {
  __device__ __forceinline__ void init(int, int) {}
};

// The steps of a segment that begin with another offset than the step before.
// Producers and consumers count them alike.
struct OffsetSteps {
  int next_tile;  // the first of the next one
  int parity;     // of the next one, in the notes

  __device__ __forceinline__ void begin(const Segment& segment) {
    next_tile = segment.first_tile;
  }
  // Whether a step is one of them. It is called once a step.
  __device__ __forceinline__ bool is_next(const AttentionParams& p, int tile) {
    if (KEY_OFFSET == 0 || tile != next_tile) return false;
    next_tile = next_offset_tile(p, tile);
    return true;
  }
};

// Add kCount rows' numbers over 2 * kMask lanes. A lane ends with one row's
// sum, in sums[0]. Lanes of the same row are neighbours, and rows are in order.
template <int kMask, int kCount, int kSize>
__device__ __forceinline__ void add_over_lanes(float (&sums)[kSize], int lane) {
  if constexpr (kMask > 0) {
    if constexpr (kCount == 1) {
      sums[0] += __shfl_xor_sync(~0u, sums[0], kMask);
    } else {
      // A lane keeps half of the rows.
      const bool is_upper = (lane & kMask) != 0;
#pragma unroll
      for (int k = 0; k < kCount / 2; ++k) {
        const float low = sums[k], high = sums[k + kCount / 2];
        const float other = __shfl_xor_sync(~0u, is_upper ? low : high, kMask);
        sums[k] = (is_upper ? high : low) + other;
      }
    }
    add_over_lanes<kMask / 2, (kCount > 1 ? kCount / 2 : 1)>(sums, lane);
  }
}

// Products of eight rows' queries with m. Lanes 4 * i to 4 * i + 3 have row i.
//
// A lane multiplies neighbouring coordinates of all rows. So it needs few
// registers, and the rows' loads do not wait for each other. Inlined it would
// take registers from the loop over steps. Parameters come in registers,
// because the kernel's would be loaded one after another.
//
// place: of the row's query behind `queries`, in vectors of kVector numbers.
template <typename T>
__device__ __noinline__ float multiply_rows(const T* queries, int place,
                                            const float* m, int lane) {
  constexpr int kParts = HEAD_SIZE / kVector;
  constexpr int kRowLanes = kParts < 32 ? kParts : 32;
  constexpr int kSide = 32 / kRowLanes;  // rows side by side in a warp
  constexpr int kTurns = 8 / kSide;
  float sums[kTurns] = {};
#pragma unroll
  for (int part = 0; part < kParts; part += kRowLanes) {
    const int own = part + lane % kRowLanes;
    uint2 bits[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = turn * kSide + lane / kRowLanes;
      const int vector = __shfl_sync(~0u, place, 4 * row) + own;
      bits[turn] = reinterpret_cast<const uint2*>(queries)[vector];
    }
    const float4 y = __ldg(reinterpret_cast<const float4*>(m) + own);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const float4 x = load_vector(reinterpret_cast<const T*>(&bits[turn]));
      sums[turn] += x.x * y.x + x.y * y.y + (x.z * y.z + x.w * y.w);
    }
  }
  add_over_lanes<kRowLanes / 2, kTurns>(sums, lane);
  const int turn = lane / 4 / kSide, side = lane / 4 % kSide;
  return __shfl_sync(~0u, sums[0],
                     side * kRowLanes + turn * (kRowLanes / kTurns));
}

// The part of eight rows' scores that cached keys lack where a row of offsets
// was taken off. Lanes 4 * i to 4 * i + 3 have row i.
//
// query: the row's, in the sequence; -1 for a row without.
__device__ __forceinline__ float offset_score(const AttentionParams& p,
                                              const Segment& segment,
                                              int offset, int query, int lane) {
  const int num_heads = p.num_kv_heads * p.heads_per_kv;
  const int any_query = max(query, 0), token = any_query / num_heads;
  const Strides& strides = p.original_strides;
  const int64_t place =
      token * strides.token + (any_query - token * num_heads) * strides.head;
  const int64_t first = p.first_token(segment.seq) * strides.token;
  const float* m =
      p.key_offset +
      (int64_t(offset) * p.num_kv_heads + segment.kv_head) * HEAD_SIZE;
  const auto multiply = [&](const auto* queries) {
    return multiply_rows(queries + first, int(place / kVector), m, lane);
  };
  const float score =
      p.is_bf16 ? multiply(static_cast<const __nv_bfloat16*>(p.original_query))
                : multiply(static_cast<const __half*>(p.original_query));
  return query < 0 ? 0.0f : p.offset_factor * score;
}

// Write what the scores of a block's rows lack from a step on. All of kWarps
// producer warps call this function.
//
// offset: the row of the step's offset.
// has_first: whether the step begins with the sequence's first token.
template <int kWarps, int kRows>
__device__ __forceinline__ void write_offset_scores(
    OffsetNotes<kRows>& notes, OffsetSteps& steps, const AttentionParams& p,
    const Segment& segment, int offset, bool has_first, int warp, int lane) {
  constexpr int kOnce = 8;  // rows of a warp at once
  const int query_len = p.num_query_tokens(segment.seq);
  const int known_len = p.known_lens[segment.seq];
  const int num_rows = query_len * p.heads_per_kv - segment.first_column;
  wait_for(notes.empty, steps.parity ^ 1);
#pragma unroll 1
  for (int first = kOnce * warp; first < kRows; first += kOnce * kWarps) {
    const int own = first + lane / 4;
    float score = 0.0f, gain = 0.0f;
    if (first < num_rows) {
      const RowNote note(p, segment, segment.first_column + own, query_len,
                         known_len);
      const int query = note.exists(query_len, known_len) ? note.query : -1;
      score = offset_score(p, segment, offset, query, lane);
      if (has_first) gain = offset_score(p, segment, 0, query, lane) - score;
    }
    if (lane % 4 == 0) notes.scores[own] = score, notes.gains[own] = gain;
  }
  arrive_warp(notes.full, lane);
  steps.parity ^= 1;
}

// The parts that the scores of a lane's two rows lack.
struct LaneOffsets {
  float scores[2], gains[2];
};

// row: the first of the lane's two rows.
template <int kRows>
__device__ __forceinline__ LaneOffsets
read_offset_scores(const OffsetNotes<kRows>& notes, int row) {
  return {{notes.scores[row], notes.scores[row + 8]},
          {notes.gains[row], notes.gains[row + 8]}};
}

// The same without notes, for a block whose shared memory has no room for them.
__device__ __forceinline__ LaneOffsets
find_offset_scores(const AttentionParams& p, const Segment& segment, int offset,
                   int row, int lane) {
  const int query_len = p.num_query_tokens(segment.seq);
  const int known_len = p.known_lens[segment.seq];
  LaneOffsets found;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowNote note(p, segment, segment.first_column + row + 8 * r,
                       query_len, known_len);
    const int query = note.exists(query_len, known_len) ? note.query : -1;
    const OffsetScores scores =
        offset_scores(p, segment.seq, segment.kv_head, offset, query, lane);
    found.scores[r] = scores.score, found.gains[r] = scores.first_gain;
  }
  return found;
}

// Adapt references to tokens with another offset of K.
//
// gains: what the score of a sequence's first token lacks in addition, because
//   its offset is row 0. It is written, for the lanes that have the score.
// has_first: whether the step begins with that token.
__device__ __forceinline__ void change_offset(float (&gains)[2],
                                              RowsAccumulator& acc,
                                              const LaneOffsets& found,
                                              bool has_first, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // A row that has seen no token keeps kNoRowReference, even if its query is
    // NaN.
    if (acc.reference[r] != kNoRowReference)
      acc.reference[r] += acc.missing[r] - found.scores[r];
    acc.missing[r] = found.scores[r];
    if (has_first && lane % 4 == 0) gains[r] = found.gains[r];
  }
}

// Let producers write again. All consumer warps call this function.
template <int kRows>
__device__ __forceinline__ void release_offset_scores(OffsetNotes<kRows>& notes,
                                                      OffsetSteps& steps,
                                                      int lane) {
  arrive_warp(notes.empty, lane);
  steps.parity ^= 1;
}

}  // namespace turbo
