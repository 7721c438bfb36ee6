// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Raw tokens: a kernel rotates their K and V once, to operands that producers
// copy. See copy_raw_tiles.cuh.
#pragma once

#include "extend_wgmma/decode_tile.cuh"
#include "extend_wgmma/output_params.cuh"
#include "merge/inverse_rotation.cuh"

namespace turbo {

constexpr int kRawTileWarps = 8;
// Larger numbers become this one, as larger scales become the format's largest.
constexpr float kLargestHalf = 65504.0f;

// K and V as operands have them, except for panels: see decode_tile.cuh. A row
// of V has 16 tokens. A word follows each four rows, so that a warp writes its
// two tokens to different banks.
struct RawTileShared {
  static constexpr int kRowWords = TILE_TOKENS / 2;
  __half keys[TILE_TOKENS][HEAD_SIZE];
  uint32_t values[HEAD_SIZE * kRowWords + HEAD_SIZE / 4];

  // The index of a row's word.
  static __device__ __forceinline__ int value_place(int row, int word) {
    return row * kRowWords + row / 4 + word;
  }
};

// The place of a coordinate of K in a row of the operand.
__device__ __forceinline__ int key_position(int coordinate) {
  const int code = coordinate / NUM_UNITS, unit = coordinate % NUM_UNITS;
  const int j = unit % kLaneUnits, place = unit / kLaneUnits;
  // key_place of four lanes is its own inverse.
  const int t = (place & 1) * 2 + place / 2;
  return (4 * j + code / 2) * 8 + 2 * t + code % 2;
}

// The row of the operand that has a coordinate of V: see output_coordinate.
__device__ __forceinline__ int value_row(int coordinate) {
  if (HEAD_SIZE < 128) return coordinate;
  const int code = coordinate / NUM_UNITS, unit = coordinate % NUM_UNITS;
  const int r = unit / NUM_GROUPS, piece = unit % NUM_GROUPS / 8;
  const int fragment = piece * kPieceCodes + code % 2 * 4 + code / 2;
  return 16 * fragment + 8 * r + unit % 8;
}

// H (s * x) / sqrt(D) for a vector, or for two side by side.
__device__ __forceinline__ void rotate_vector(Coordinates& x,
                                              const Signs& signs, int lane) {
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[j][i] = signs.apply(x[j][i], j, i);
  }
  hadamard(x, lane);
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float y = x[j][i] * INVERSE_SQRT;
      // fmin alone would turn NaN to a number.
      x[j][i] = fabsf(y) > kLargestHalf ? copysignf(kLargestHalf, y) : y;
    }
  }
}

// A mask of the lanes that have the same vector as this lane.
__device__ __forceinline__ uint32_t lanes_beside(int lane) {
  return kSideBySide == 1 ? ~0u : 0xFFFFu << lane / kLanes * kLanes;
}

// Load a vector, or zeros if there is no token. Returns whether it is finite.
template <typename T>
__device__ __forceinline__ bool load_coordinates(Coordinates& x, const T* p,
                                                 bool is_there, int lane) {
  bool is_broken = false;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    float4 y = {};
    if (is_there) y = load_vector(p + 128 * j + lane % kLanes * kVector);
    x[j][0] = y.x, x[j][1] = y.y, x[j][2] = y.z, x[j][3] = y.w;
#pragma unroll
    for (int i = 0; i < kVector; ++i) is_broken |= !(fabsf(x[j][i]) < INFINITY);
  }
  const uint32_t broken = __ballot_sync(~0u, is_broken);
  return (broken & lanes_beside(lane)) == 0;
}

// Take an offset off a vector of K.
__device__ __forceinline__ void take_off(Coordinates& x, const float* offset,
                                         int lane) {
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    const float4 m = __ldg(reinterpret_cast<const float4*>(
        offset + 128 * j + lane % kLanes * kVector));
    x[j][0] -= m.x, x[j][1] -= m.y, x[j][2] -= m.z, x[j][3] -= m.w;
  }
}

// Make a sequence's tile. If K or V of a token is not finite, its K becomes
// NaN, and so do the results of queries that see it. Its V becomes zero,
// because a weight of zero would not make NaN or infinity zero.
template <typename T>
__device__ __forceinline__ void make_raw_tile(RawTileShared& shared,
                                              const OutputParams& p, int seq,
                                              int tile, int kv_head) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int query_len = p.num_query_tokens(seq);
  const Signs signs(lane);
  // A warp has two tokens, side by side or one after the other.
  constexpr int kTurns = 2 / kSideBySide;
  static_assert(2 * kRawTileWarps == TILE_TOKENS);
  const int first = 2 * warp + lane / kLanes;
  Coordinates key[kTurns], value[kTurns];
  bool is_finite[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int n = tile * TILE_TOKENS + first + turn;
    const int64_t token = p.first_token(seq) + n;
    const T* p_key = static_cast<const T*>(p.own_key) +
                     token * p.key_strides.token + kv_head * p.key_strides.head;
    const T* p_value = static_cast<const T*>(p.own_value) +
                       token * p.value_strides.token +
                       kv_head * p.value_strides.head;
    is_finite[turn] = load_coordinates(key[turn], p_key, n < query_len, lane);
    is_finite[turn] &=
        load_coordinates(value[turn], p_value, n < query_len, lane);
    if constexpr (KEY_OFFSET != 0) {
      const int64_t offset = offset_of_raw(p, p.num_tokens(seq));
      take_off(key[turn],
               p.key_offset + (offset * p.num_kv_heads + kv_head) * HEAD_SIZE,
               lane);
    }
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    rotate_vector(key[turn], signs, lane);
    rotate_vector(value[turn], signs, lane);
  }
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int coordinate = 128 * j + lane % kLanes * kVector + i;
      float numbers[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        shared.keys[first + turn][key_position(coordinate)] =
            __float2half_rn(is_finite[turn] ? key[turn][j][i] : NAN);
        numbers[turn] = is_finite[turn] ? value[turn][j][i] : 0.0f;
      }
      const int row = value_row(coordinate);
      uint32_t* word = shared.values + RawTileShared::value_place(row, warp);
      if constexpr (kTurns == 2) {
        *word = as_bits(__floats2half2_rn(numbers[0], numbers[1]));
      } else {
        reinterpret_cast<__half*>(word)[lane / kLanes] =
            __float2half_rn(numbers[0]);
      }
    }
  }
}

// Block (i, j, k) makes tile j of sequence i, for KV head k.
__global__ void __launch_bounds__(32 * kRawTileWarps)
    raw_tiles_kernel(const __grid_constant__ OutputParams p) {
  __shared__ __align__(16) RawTileShared shared;
  const int seq = blockIdx.x, tile = blockIdx.y, kv_head = blockIdx.z;
  // The previous kernel may still write the inputs, or use the written memory.
  wait_for_previous_kernel();
  start_next_kernel();
  if (tile >= p.num_raw_tiles(seq)) return;
  if (p.is_bf16) {
    make_raw_tile<__nv_bfloat16>(shared, p, seq, tile, kv_head);
  } else {
    make_raw_tile<__half>(shared, p, seq, tile, kv_head);
  }
  __syncthreads();
  constexpr int kVectors = TILE_TOKENS * HEAD_SIZE / 8;
  auto* target = reinterpret_cast<uint4*>(p.raw_tile(seq, kv_head, tile));
#pragma unroll
  for (int i = threadIdx.x; i < kVectors; i += 32 * kRawTileWarps) {
    target[i] = reinterpret_cast<const uint4*>(shared.keys)[i];
    const uint32_t* words =
        shared.values + RawTileShared::value_place(i / 2, i % 2 * 4);
    target[kVectors + i] = {words[0], words[1], words[2], words[3]};
  }
}

}  // namespace turbo
