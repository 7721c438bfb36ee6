// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The encoder of a rotated vector: see reference.codec.quantize.
#pragma once

#include <type_traits>

#include "store/encode.cuh"
#include "store/trellis_parts.cuh"

namespace turbo {

template <bool kIsKey>
constexpr bool kIsTrellis = (kIsKey ? KEY_BITS : VALUE_BITS) == 3;
template <bool kIsKey>
using SideTables =
    std::conditional_t<kIsTrellis<kIsKey>, WindowTables, FoldTables>;
// Quantise a rotated vector and write it.
//
// x: integers.
// exponent: that of the vector, see load_integers.
// direction: that of a key, or NoDirection.
// place: a tile, the token's index in it, and the tag of a key's row in the
//   tail. Without a tile nothing is written.
template <bool kIsKey, int kParts, int kGroups, int kElements, typename Place,
          typename OwnDirection = NoDirection>
__device__ __forceinline__ void encode_vector(float (&x)[kGroups][kElements],
                                              int exponent,
                                              const SideTables<kIsKey>& tables,
                                              const Place& place,
                                              OwnDirection direction = {}) {
  constexpr int kCodesOffset = kIsKey ? 0 : VALUE_CODES_OFFSET;
  constexpr int kScalesOffset =
      kIsKey ? KEY_SCALES_OFFSET : VALUE_SCALES_OFFSET;
  constexpr int kShares = kPartsOf<kElements>;
  const float unit =
      __fmul_rn(power_of_two(exponent - ROTATION_EXPONENT), INVERSE_SQRT);
  uint32_t signs[kGroups][kWordsOf<kElements>];
  float largest[kGroups];
  float largest_of_all = 0.0f;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    largest[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      put_code<kElements>(signs[j], i, __float_as_uint(x[j][i]) >> 31);
      largest[j] = fmaxf(largest[j], fabsf(x[j][i]));
    }
    largest_of_all = fmaxf(largest_of_all, largest[j]);
    largest[j] = reduce_parts<Largest, kShares>(largest[j]);
  }
  largest_of_all = reduce_vector<Largest, kShares>(largest_of_all, 0);
  largest_of_all = fminf(__fmul_rn(largest_of_all, unit), SCALE_MAX);
  const float normaliser =
      power_of_two(-max(exponent_of(largest_of_all), -ERROR_MAX_EXPONENT));
  const float normalised_unit = __fmul_rn(unit, normaliser);
  int floors[kGroups];
  bool is_tiny = false;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float magnitude = __fmul_rn(fabsf(x[j][i]), normalised_unit);
      x[j][i] = kIsTrellis<kIsKey> ? copysignf(magnitude, x[j][i]) : magnitude;
    }
    largest[j] = fminf(__fmul_rn(largest[j], unit), SCALE_MAX);
    floors[j] = scale_floor(largest[j]);
    // Zeros do not matter if nothing is stored.
    const bool is_counted =
        largest[j] > 0.0f ||
        (place.tile != nullptr && group_of_lane<kParts>(j) < NUM_GROUPS);
    is_tiny |= is_counted && largest[j] < 16 * SMALLEST_SCALE;
  }
  if (__any_sync(~0u, largest_of_all >= SCALE_MAX)) {
    // Magnitudes are limited, and trellis codes keep their signs.
    const float limit = __fmul_rn(SCALE_MAX, normaliser);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        x[j][i] = fminf(fmaxf(x[j][i], -limit), limit);
    }
  }
  uint8_t* scales = place.tile + kScalesOffset + place.token * SCALE_BYTES;
  scales = place.tile == nullptr ? nullptr : scales;
  const CodePlace codes{place.tile + kCodesOffset, place.token, place.tag};
  if constexpr (kIsTrellis<kIsKey> && kElements == kPartCodes) {
    encode_3_bits_by_parts<kIsKey>(x, floors, normaliser, direction, tables,
                                   codes, scales);
  } else if constexpr (kIsTrellis<kIsKey>) {
    encode_3_bits<kIsKey, kParts>(x, floors, normaliser, direction, tables,
                                  codes, scales);
  } else {
    if constexpr (kHasDirection<OwnDirection>) direction.multiply_signs(signs);
    if (__any_sync(~0u, is_tiny)) {
      encode_4_bits<kIsKey, true>(x, signs, floors, normaliser, direction,
                                  tables, codes, scales);
    } else {
      encode_4_bits<kIsKey, false>(x, signs, floors, normaliser, direction,
                                   tables, codes, scales);
    }
  }
}

}  // namespace turbo
