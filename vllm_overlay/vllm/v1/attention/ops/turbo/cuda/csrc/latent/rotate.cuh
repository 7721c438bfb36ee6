// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The rotation of latents in block fixed point (see reference.rotate): a fast
// Walsh-Hadamard transform of integers in registers and lanes. Sums of these
// integers are exact in fp32.
#pragma once

#include "merge/inverse_rotation.cuh"
#include "store/scales.cuh"

namespace turbo {

static_assert(HEAD_SIZE == 256 || HEAD_SIZE == 512);

template <bool kIsBf16, bool kIsSpecial, int kBlocks>
__device__ __forceinline__ void round_to_units(const uint32_t (&x)[kBlocks][2],
                                               int exponent,
                                               float (&y)[kBlocks][kVector]) {
  const float unit = power_of_two(ROTATION_EXPONENT - exponent);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      y[i][2 * j] = to_integer<kIsSpecial>(Input<kIsBf16>::low(x[i][j]), unit);
      y[i][2 * j + 1] =
          to_integer<kIsSpecial>(Input<kIsBf16>::high(x[i][j]), unit);
    }
  }
}

// Turn pairs of 16-bit numbers to integers: see load_integers.
//
// largest_of_vector: maps the largest number of a lane to that of the vector.
template <bool kIsBf16, int kBlocks, typename Reduce>
__device__ __forceinline__ void make_integers(uint32_t (&x)[kBlocks][2],
                                              float (&y)[kBlocks][kVector],
                                              int& exponent,
                                              Reduce largest_of_vector) {
  uint32_t largest = largest_of_vector(largest_of_lane(x));
  const bool is_special = largest >= Input<kIsBf16>::kInfinityBits;
  if (__any_sync(~0u, is_special)) {
    [[maybe_unused]] bool has_nan = false;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      x[i][0] = without_nan<kIsBf16>(x[i][0], has_nan);
      x[i][1] = without_nan<kIsBf16>(x[i][1], has_nan);
    }
    largest = largest_of_vector(largest_of_lane(x));
    exponent = input_exponent<kIsBf16>(largest);
    round_to_units<kIsBf16, true>(x, exponent, y);
  } else {
    exponent = input_exponent<kIsBf16>(largest);
    round_to_units<kIsBf16, false>(x, exponent, y);
  }
}

// H x over the coordinates of a lane, and then over kLanes lanes side by side.
template <int kLanes, int kElements>
__device__ __forceinline__ void transform(float (&x)[kElements]) {
#pragma unroll
  for (int width = 1; width < kElements; width *= 2) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i & width) continue;
      const float difference = __fsub_rn(x[i], x[i | width]);
      x[i] = __fadd_rn(x[i], x[i | width]);
      x[i | width] = difference;
    }
  }
#pragma unroll
  for (int width = 1; width < kLanes; width *= 2) {
    const float sign = threadIdx.x & width ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(~0u, x[i], width));
    }
  }
  // Zeros with flipped signs may give a negative zero, which has another code.
#pragma unroll
  for (int i = 0; i < kElements; ++i) x[i] = __fadd_rn(x[i], 0.0f);
}

// A lane's coordinates of the mean that is taken off latents.
template <typename Input>
struct LaneMean {
  float4 x[Input::kBlocks];

  // mean: [LATENT_RANK]
  __device__ __forceinline__ void load(const float* mean) {
#pragma unroll
    for (int i = 0; i < Input::kBlocks; ++i)
      x[i] = __ldg(
          reinterpret_cast<const float4*>(mean + Input::coordinate_of(i)));
  }

  template <bool kIsBf16>
  __device__ __forceinline__ void take_off(Input& input) const {
#pragma unroll
    for (int i = 0; i < Input::kBlocks; ++i) {
      const uint2 pairs = without_offset<kIsBf16>(
          make_uint2(input.x[i][0], input.x[i][1]), x[i]);
      input.x[i][0] = pairs.x;
      input.x[i][1] = pairs.y;
    }
  }
};

// A latent that kSingleWarps warps share. Each loads all of it and goes on with
// 128 coordinates. A lane then has the four from 4 * lane on.
struct PartsInput {
  static constexpr int kBlocks = kChunks;
  uint32_t x[kBlocks][2];
  Signs signs;

  // The first coordinate of a lane's block of four.
  static __device__ __forceinline__ int coordinate_of(int block) {
    return 128 * block + kVector * int(threadIdx.x % 32);
  }

  __device__ __forceinline__ PartsInput() : signs(threadIdx.x % 32) {}

  __device__ __forceinline__ void load(const uint16_t* row) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const uint2 pairs =
          __ldcg(reinterpret_cast<const uint2*>(row + coordinate_of(i)));
      x[i][0] = pairs.x;
      x[i][1] = pairs.y;
    }
  }

  template <bool kIsBf16>
  __device__ __forceinline__ void rotate(float (&result)[1][kVector],
                                         int& exponent) {
    Coordinates y;
    make_integers<kIsBf16>(x, y, exponent, [](uint32_t largest) {
      return __reduce_max_sync(~0u, largest);
    });
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[j][i] = signs.apply(y[j][i], j, i);
    }
#pragma unroll
    for (int width = 1; width < kChunks; width *= 2) {
      const float sign = warp_of_vector() & width ? -1.0f : 1.0f;
#pragma unroll
      for (int j = 0; j < kChunks; j += 2 * width) {
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          y[j][i] = __fmaf_rn(y[j + width][i], sign, y[j][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) result[0][i] = y[0][i];
    transform<32>(result[0]);
  }
};

// Latents side by side in a warp. A lane has the coordinates of a group.
struct GroupInput {
  static constexpr int kBlocks = SCALE_GROUP / kVector;
  uint32_t x[kBlocks][2];
  uint32_t signs;

  // The first coordinate of a lane's block of four.
  static __device__ __forceinline__ int coordinate_of(int block) {
    return SCALE_GROUP * group_of_lane<1>(0) + kVector * block;
  }

  __device__ __forceinline__ GroupInput() {
    const int group = group_of_lane<1>(0);
    signs = kRotationSigns[group / 2] >> (group % 2 * SCALE_GROUP);
  }

  __device__ __forceinline__ void load(const uint16_t* row) {
    const auto* words = reinterpret_cast<const uint4*>(row + coordinate_of(0));
#pragma unroll
    for (int i = 0; i < kBlocks / 2; ++i) {
      const uint4 w = __ldcg(words + i);
      x[2 * i][0] = w.x, x[2 * i][1] = w.y;
      x[2 * i + 1][0] = w.z, x[2 * i + 1][1] = w.w;
    }
  }

  template <bool kIsBf16>
  __device__ __forceinline__ void rotate(float (&result)[1][SCALE_GROUP],
                                         int& exponent) {
    float y[kBlocks][kVector];
    make_integers<kIsBf16>(x, y, exponent, [](uint32_t largest) {
      return uint32_t(reduce_vector<Largest, 1>(int(largest), 0));
    });
#pragma unroll
    for (int i = 0; i < SCALE_GROUP; ++i) {
      const uint32_t sign = signs << (31 - i) & 0x80000000u;
      result[0][i] =
          __uint_as_float(__float_as_uint(y[i / kVector][i % kVector]) ^ sign);
    }
    transform<NUM_GROUPS>(result[0]);
  }
};

}  // namespace turbo
