// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Queries as the model has them, which consumers rotate themselves. The queries
// of a segment are copied to shared memory while results of the segment before
// are written. A warp copies and rotates its own rows.
//
// The rotation is H (s * q) / sqrt(D). Coordinates are in the order of K's. The
// bits of a place in this order are the bits of a coordinate in another order,
// so H is Sylvester's for places as well. The tensor core rotates each 16
// neighbours. Sums and differences of a lane's registers do the rest.
#pragma once

#include "common/mma.cuh"
#include "extend_wgmma/decode_tile.cuh"
#include "extend_wgmma/output_params.cuh"
#include "merge/inverse_rotation.cuh"

namespace turbo {

// The rows of a product that a warp has.
constexpr int kWarpTileRows = 16;

// The first row of a product that the warp has.
__device__ __forceinline__ int first_warp_row() {
  return threadIdx.x / 32 % 4 * kWarpTileRows;
}

// The offset of a 16-byte chunk of a row until queries are rotated. Lanes read
// eight or four bytes of eight rows at a time, four lanes per row.
__device__ __forceinline__ uint32_t original_place(int row, int chunk) {
  const int mask = HEAD_SIZE < 128 ? row % 8 : row % 4 * 2 + row / 4 % 2;
  return row * kRowBytes + (chunk ^ mask) * 16;
}

// Begin to copy the queries of a warp's rows, or zeros for rows without a
// query.
template <typename Plan>
__device__ __forceinline__ void copy_queries(RowsShared<Plan>& shared,
                                             const OutputParams& p,
                                             const OutputSegment& segment,
                                             int group, int lane) {
  constexpr int kRowChunks = HEAD_SIZE / 8, kRowsAtOnce = 32 / kRowChunks;
  static_assert(Plan::kRowTiles <= 2,
                "a lane holds the number of one row alone");
  const int first_row = first_warp_row();
  const int column = segment.first_column + Plan::kGroupRows * group +
                     lane / kWarpTileRows * kTileRows + first_row +
                     lane % kWarpTileRows;
  const int token = column / p.heads_per_kv;
  const int head =
      segment.kv_head * p.heads_per_kv + column - token * p.heads_per_kv;
  const int64_t place =
      (segment.first_token + token) * p.original_strides.token +
      head * p.original_strides.head;
  const auto* own = static_cast<const uint16_t*>(p.original_query) + place;
  const auto bits = token < segment.query_len
                        ? reinterpret_cast<unsigned long long>(own)
                        : 0ull;
  const int chunk = lane % kRowChunks;
#pragma unroll
  for (int i = 0; i < kWarpTileRows * Plan::kRowTiles; i += kRowsAtOnce) {
    const int row = i + lane / kRowChunks;
    const auto source =
        reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, bits, row));
    uint8_t* target =
        shared.queries[group][row / kWarpTileRows][chunk / 8][0] +
        original_place(first_row + row % kWarpTileRows, chunk % 8);
    if (source != nullptr) {
      copy_async(shared_address(target), source + 16 * chunk);
    } else {
      *reinterpret_cast<uint4*>(target) = {};
    }
  }
  commit_copies();
}

// Load the queries of a lane's two rows as A fragments, with the rotation's
// signs.
//
// queries: the queries of a product.
__device__ __forceinline__ void load_original_queries(
    uint32_t (&fragments)[HEAD_SIZE / 4], const uint8_t* queries, int lane) {
  const int first_row = first_warp_row() + lane / 4;
  const int unit = kLaneUnits * key_place(lane % 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Codes 2 * i and 2 * i + 1 of the lane's units.
    const int first = 2 * i * NUM_UNITS;
    const uint32_t signs = kRotationSigns[first / 32] >> (first % 32 + unit);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t words[2][kLaneUnits / 2];
#pragma unroll
      for (int code = 0; code < 2; ++code) {
        const int own = first + code * NUM_UNITS + unit;
        const int chunk = own / 8;
        load_words(words[code],
                   queries + chunk / 8 * kQueryPanelBytes +
                       original_place(first_row + 8 * r, chunk % 8) +
                       own % 8 * 2);
      }
#pragma unroll
      for (int j = 0; j < kLaneUnits; ++j) {
        const uint32_t pair = __byte_perm(words[0][j / 2], words[1][j / 2],
                                          j % 2 == 0 ? 0x5410 : 0x7632);
        const uint32_t flips =
            (signs >> j & 1) << 15 | (signs >> (j + NUM_UNITS) & 1) << 31;
        const int chunk = 4 * j + i;
        fragments[chunk / 2 * 4 + chunk % 2 * 2 + r] = pair ^ flips;
      }
    }
  }
}

// H x of each 16 neighbours. x has A fragments of a product, and y fragments of
// its result.
template <bool kIsBf16>
__device__ __forceinline__ void rotate_neighbours(
    float (&y)[HEAD_SIZE / 16][2][4], const uint32_t (&x)[HEAD_SIZE / 4],
    int lane) {
  constexpr uint32_t kOnes = kIsBf16 ? 0x3F803F80 : 0x3C003C00;
  const int g = lane / 4, t = lane % 4;
  const uint32_t first_sign = __popc(2 * t & g) & 1;
  const uint32_t second_sign = __popc((2 * t + 1) & g) & 1;
  const uint32_t factor = kOnes ^ first_sign << 15 ^ second_sign << 31;
#pragma unroll
  for (int k = 0; k < HEAD_SIZE / 16; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float (&own)[4] = y[k][half];
#pragma unroll
      for (int i = 0; i < 4; ++i) own[i] = 0.0f;
      const uint32_t other = half == 0 ? factor : factor ^ 0x80008000u;
      if constexpr (kIsBf16) {
        mma_bf16(own, x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3],
                 factor, other);
      } else {
        mma_f16(own, x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3], factor,
                other);
      }
    }
  }
}

// Rotate the queries of a lane's two rows, which its warp has copied. Each
// query is rounded to fp16 relative to a power of two above its largest number.
//
// factor: the factor of scores, written. It is NaN for a query that is not
//   finite, or that is near the largest numbers of fp32. All results of such a
//   query are then NaN.
__device__ __forceinline__ void rotate_queries(
    uint32_t (&fragments)[HEAD_SIZE / 4], float (&factor)[2],
    const uint8_t* queries, const OutputParams& p, int lane) {
  constexpr int kBlocks = HEAD_SIZE / 16;
  load_original_queries(fragments, queries, lane);
  float y[kBlocks][2][4];
  if (p.is_bf16) {
    rotate_neighbours<true>(y, fragments, lane);
  } else {
    rotate_neighbours<false>(y, fragments, lane);
  }
#pragma unroll
  for (int width = 1; width < kBlocks; width *= 2) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      if (k & width) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& a = y[k][i / 4][i % 4];
        float& b = y[k | width][i / 4][i % 4];
        const float difference = a - b;
        a += b;
        b = difference;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // The bits of NaN are above those of infinity.
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = y[k][i / 2][2 * r + i % 2];
        largest = max(largest, __float_as_uint(fabsf(x)));
      }
    }
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const uint32_t exponent = largest >> 23;
    const bool is_broken = exponent > 252;
    const float unit = __uint_as_float((exponent + 1) << 23);
    factor[r] = is_broken ? NAN : unit * p.query_factor;
    const float inverse =
        is_broken ? 0.0f : __uint_as_float((253 - exponent) << 23);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = y[k][half] + 2 * r;
        fragments[4 * k + 2 * half + r] =
            as_bits(__floats2half2_rn(pair[0] * inverse, pair[1] * inverse));
      }
    }
  }
}

// Store a lane's fragments as an operand, over the rows that the warp has read.
__device__ __forceinline__ void store_queries(
    uint8_t* queries, const uint32_t (&fragments)[HEAD_SIZE / 4], int lane) {
  const int first_row = first_warp_row() + lane / 4;
  __syncwarp();
#pragma unroll
  for (int chunk = 0; chunk < HEAD_SIZE / 8; ++chunk) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint8_t* target = queries + chunk / 8 * kQueryPanelBytes +
                        swizzled(first_row + 8 * r, chunk % 8);
      *reinterpret_cast<uint32_t*>(target + lane % 4 * 4) =
          fragments[chunk / 2 * 4 + chunk % 2 * 2 + r];
    }
  }
}

}  // namespace turbo
