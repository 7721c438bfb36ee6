// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Gather: dequantises tokens of contexts and rotates them back. A warp has a
// token, with coordinates in lanes as in Coordinates.
#pragma once

#include "common/warp.cuh"
#include "merge/inverse_rotation.cuh"

namespace turbo {

constexpr int kGatherThreads = 256;
constexpr int kGatherWarps = kGatherThreads / 32;
// Blocks of a multiprocessor that registers leave room for; 0 for no bound. The
// compiler takes more registers for three-bit codes without one.
constexpr int kLeastGatherBlocks = LATENT_BITS == 4 ? 0 : 6;
static_assert(HEAD_SIZE == LATENT_RANK && kLanes == 32);
static_assert(128 / SCALE_GROUP == SCALE_WORD_GROUPS && SCALE_DELTA_STEP == 1 &&
                  SCALE_WORD_BYTES == 4,
              "a chunk has a scale word");

struct LatentGatherParams {
  const uint8_t* kv_cache;  // [num_blocks, N, C]
  void* output;             // [T, LATENT_RANK + ROPE_SIZE]
  const int* block_table;   // [B, max_blocks]
  const int* cu_seq_lens;   // [B + 1], first rows of sequences
  const int* token_to_seq;  // [T]
  const int* seq_starts;    // [B], positions of first rows, or null: zeros
  const float* mean;        // [LATENT_RANK], added to latents, or null: none
  int64_t stride_cache_block;
  int64_t stride_output_token;
  int stride_block_table;
  int block_size;
  int num_tokens;
};

// Load the indices of levels of a lane's four coordinates of a chunk.
//
// tile: that of token n. See LatentFormat for the order of bits.
__device__ __forceinline__ void load_levels(int (&levels)[kVector],
                                            const uint8_t* tile, int n,
                                            int chunk, int lane) {
  if constexpr (LATENT_BITS == 4) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(
        tile + n * (LATENT_RANK / 2) + 64 * chunk + lane / 2 * 4);
    const int pair = lane % 2 * 2;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      levels[i] = word >> (4 * (pair + i / 2 + i % 2 * 4)) & 0xF;
  } else {
    const int group = 8 * chunk + lane / 4, first = lane % 4 * kVector;
    const uint32_t branches = *reinterpret_cast<const uint32_t*>(
        tile + n * (LATENT_RANK / 4) + 4 * group);
    // Two zeros come before the first bit.
    const uint32_t path =
        *reinterpret_cast<const uint16_t*>(tile + PATHS_OFFSET +
                                           n * (LATENT_RANK / 8) + 2 * group)
        << 2;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int e = first + i;
      const int before = path >> e & 1, last = path >> (e + 1) & 1;
      const int own = path >> (e + 2) & 1;
      levels[i] = 4 * (branches >> (2 * e) & 3) + 2 * (own ^ before) + last;
    }
  }
}

__device__ __forceinline__ float level_of(int index) {
  const float v = (index - 0.5f * (NUM_LEVELS - 1)) / 4;
  return v * fmaf(fabsf(v), LATENT_QUADRATIC, LATENT_LINEAR);
}

// The scale of group lane / 4 of a chunk.
__device__ __forceinline__ float scale_of(const uint8_t* tile, int n, int chunk,
                                          int lane) {
  const uint32_t word = *reinterpret_cast<const uint32_t*>(
      tile + LATENT_SCALES_OFFSET + n * (LATENT_RANK / 32) + 4 * chunk);
  const uint32_t delta = word >> (8 + SCALE_DELTA_BITS * (lane / 4)) &
                         ((1 << SCALE_DELTA_BITS) - 1);
  return half_as_float(((word & 0xFF) - delta) << SCALE_SHIFT);
}

template <typename T>
__device__ __forceinline__ void store_pair(T* p, float x, float y) {
  if constexpr (std::is_same_v<T, float>) {
    p[0] = x, p[1] = y;
  } else if constexpr (std::is_same_v<T, __half>) {
    *reinterpret_cast<uint32_t*>(p) = as_bits(__floats2half2_rn(x, y));
  } else {
    *reinterpret_cast<uint32_t*>(p) = as_bits(__floats2bfloat162_rn(x, y));
  }
}

// Write two rotary coordinates per lane.
template <typename T>
__device__ __forceinline__ void gather_rope(T* output, const uint8_t* tile,
                                            int n, int lane) {
  static_assert(ROPE_SIZE == 0 || ROPE_SIZE == 64);
  if constexpr (ROPE_SIZE != 0) {
    const uint32_t codes = *reinterpret_cast<const uint16_t*>(
        tile + ROPE_OFFSET + n * ROPE_SIZE + 2 * lane);
    const uint32_t code =
        tile[ROPE_SCALES_OFFSET + n * (ROPE_SIZE / SCALE_GROUP) + lane / 8];
    const float scale = half_as_float(code << SCALE_SHIFT);
    store_pair(output + LATENT_RANK + 2 * lane,
               scale * static_cast<int8_t>(codes & 0xFF),
               scale * static_cast<int8_t>(codes >> 8));
  }
}

template <typename T>
__global__ void __launch_bounds__(kGatherThreads, kLeastGatherBlocks)
    latent_gather_kernel(const __grid_constant__ LatentGatherParams p) {
  const int lane = threadIdx.x % 32;
  const int row = int(blockIdx.x) * kGatherWarps + int(threadIdx.x) / 32;
  wait_for_previous_kernel();
  if (row >= p.num_tokens) return;
  const int seq = p.token_to_seq[row];
  int position = row - p.cu_seq_lens[seq];
  if (p.seq_starts != nullptr) position += p.seq_starts[seq];
  const int block = p.block_table[int64_t(seq) * p.stride_block_table +
                                  position / p.block_size];
  const int in_block = position % p.block_size, n = in_block % TILE_TOKENS;
  const uint8_t* tile = p.kv_cache + int64_t(block) * p.stride_cache_block +
                        in_block / TILE_TOKENS * TILE_BYTES;
  T* output = static_cast<T*>(p.output) + row * p.stride_output_token;
  Coordinates x;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    int levels[kVector];
    load_levels(levels, tile, n, j, lane);
    const float scale = scale_of(tile, n, j, lane);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[j][i] = scale * level_of(levels[i]);
  }
  gather_rope(output, tile, n, lane);
  hadamard(x, lane);
  const Signs signs(lane);
  constexpr float kNormaliser = INVERSE_SQRT * LATENT_GAIN;
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      x[j][i] = signs.apply(x[j][i] * kNormaliser, j, i);
    if (p.mean != nullptr) {
      // One by one, because a vector load takes more registers.
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        x[j][i] += __ldg(p.mean + 128 * j + kVector * lane + i);
    }
    store_vector(output + 128 * j + kVector * lane, x[j]);
  }
}

}  // namespace turbo
