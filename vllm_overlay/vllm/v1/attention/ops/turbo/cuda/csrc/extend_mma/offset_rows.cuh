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

// The place of a row's query, for offset_score.
__device__ __forceinline__ int original_place(const AttentionParams& p,
                                              const Segment& segment,
                                              const RowNote& note,
                                              int query_len, int known_len) {
  if (!note.exists(query_len, known_len)) return -1;
  const int num_heads = p.num_kv_heads * p.heads_per_kv;
  return place_of_query(p, p.first_token(segment.seq) + note.token,
                        note.query - note.token * num_heads);
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
      const int place = original_place(p, segment, note, query_len, known_len);
      score = offset_score(p, segment.kv_head, offset, place, lane);
      if (has_first)
        gain = offset_score(p, segment.kv_head, 0, place, lane) - score;
    }
    if (lane % 4 == 0) notes.scores[own] = score, notes.gains[own] = gain;
  }
  prefetch_offset(p, segment.kv_head, offset + 1, lane);
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
//
// has_first: whether the step begins with the sequence's first token.
__device__ __forceinline__ LaneOffsets
find_offset_scores(const AttentionParams& p, const Segment& segment, int offset,
                   bool has_first, int row, int lane) {
  const int query_len = p.num_query_tokens(segment.seq);
  const int known_len = p.known_lens[segment.seq];
  LaneOffsets found = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowNote note(p, segment, segment.first_column + row + 8 * r,
                       query_len, known_len);
    const int place = original_place(p, segment, note, query_len, known_len);
    const float score = offset_score(p, segment.kv_head, offset, place, lane);
    if (has_first) {
      found.gains[r] = offset_score(p, segment.kv_head, 0, place, lane) - score;
    }
    found.scores[r] = score;
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
