// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Segments of a block's ranges, in a ring. A producer finds them ahead of
// consumers. Consumers then do not wait for lengths to be loaded between two
// segments.
#pragma once

#include "extend_wgmma/layout.cuh"

namespace turbo {

using SegmentPlace = Stage<kSegments>;

__device__ __forceinline__ void init_ring(SegmentRing<true>& ring,
                                          int num_consumers) {
#pragma unroll
  for (int i = 0; i < kSegments; ++i) {
    init_barrier(shared_address(&ring.full[i]), 1);
    init_barrier(shared_address(&ring.empty[i]), num_consumers);
  }
}

// Announce a segment to consumers. All lanes of one producer warp call it.
__device__ __forceinline__ void announce(SegmentRing<true>& ring,
                                         SegmentPlace& place,
                                         const OutputSegment& segment,
                                         int lane) {
  wait_for(ring.empty[place.index], place.parity ^ 1);
  if (lane == 0) ring.segments[place.index] = segment;
  arrive_warp(ring.full[place.index], lane);
  place.advance();
}

__device__ __forceinline__ void announce(SegmentRing<true>& ring,
                                         SegmentPlace& place,
                                         const AttentionParams& p,
                                         const PassSegment& segment, int lane) {
  const int seq = segment.seq;
  announce(
      ring, place,
      {segment, p.first_token(seq), p.num_query_tokens(seq), p.known_lens[seq]},
      lane);
}

// Announce that there are no more segments.
__device__ __forceinline__ void announce_end(SegmentRing<true>& ring,
                                             SegmentPlace& place, int lane) {
  OutputSegment none = {};
  none.seq = -1;
  announce(ring, place, none, lane);
}

// Wait for the segment of a place, which stays until consumers release it.
// Returns whether there is one.
__device__ __forceinline__ bool wait_for_segment(SegmentRing<true>& ring,
                                                 const SegmentPlace& place) {
  wait_for(ring.full[place.index], place.parity);
  return ring.segments[place.index].seq >= 0;
}

}  // namespace turbo
