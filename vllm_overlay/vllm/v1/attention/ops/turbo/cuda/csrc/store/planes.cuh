// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Writes codes in the order of TurboFormat's planes, or LatentFormat's.
#pragma once

#include "store/scales.cuh"

namespace turbo {

// The place of a vector's codes: a plane of a tile, and the token's index in
// the tile. A key that has a row in the tail also has the row's tag.
struct CodePlace {
  uint8_t* plane;
  int token;
  uint8_t* tag;  // or null
};

// Lanes that share a group, if each has kElements of its coordinates.
// Coordinate e is number e / kParts of lane e % kParts. In a latent it is
// number e % kElements of lane e / kElements.
template <int kElements>
constexpr int kPartsOf = SCALE_GROUP / kElements;

// Code words that a lane has parts of, and the place of its code i in them.
// Code e is four bits of word e % 2, from bit 4 * (e / 2) on. In a latent it is
// in word e / 8, from bit 4 * (e % 8 / 2 + e % 2 * 4) on.
template <int kElements>
constexpr int kWordsOf = kElements == SCALE_GROUP ? 2 : 1;
template <int kElements>
__device__ __forceinline__ constexpr int word_of(int i) {
  if (kElements != SCALE_GROUP) return 0;
  return kIsLatent ? i / 8 : i % 2;
}
template <int kElements>
__device__ __forceinline__ constexpr int shift_of(int i) {
  if (kIsLatent) return (i % 8 / 2 + i % 2 * 4) * 4;
  return kElements == SCALE_GROUP ? i / 2 * 4 : i * 2 * kPartsOf<kElements>;
}

// Put the code of coordinate i into words that are zero. The first codes make
// them so.
template <int kElements>
__device__ __forceinline__ void put_code(uint32_t (&words)[kWordsOf<kElements>],
                                         int i, uint32_t code) {
  if (i < kWordsOf<kElements>) words[i] = 0;
  words[word_of<kElements>(i)] += code << shift_of<kElements>(i);
}

// Every other nibble of a word, rotated left by kRotation bits.
template <int kRotation>
__device__ __forceinline__ uint16_t half_of_word(uint32_t word, int parity) {
  uint32_t half = word >> 4 * parity & 0x0F0F0F0Fu;
  half = (half | half >> 4) & 0x00FF00FFu;
  half = (half | half >> 8) & 0xFFFFu;
  return static_cast<uint16_t>(half << kRotation | half >> (16 - kRotation));
}

// Write unit `group + upper * NUM_GROUPS` of a token in its tile: see
// TurboFormat for the order.
template <bool kIsKey>
__device__ __forceinline__ void store_unit(uint32_t codes,
                                           const CodePlace& target, int group,
                                           int upper) {
  const int token = target.token;
  if constexpr (kIsKey) {
    const int word = group + upper * NUM_GROUPS;
    uint8_t* row = target.plane + token * KEY_ROW_BYTES;
    reinterpret_cast<uint32_t*>(row)[word] = codes;
    if (WITH_TAIL && target.tag != nullptr)
      reinterpret_cast<uint32_t*>(target.tag)[word] = codes;
  } else {
    uint8_t* place = target.plane + token / 8 * (4 * HEAD_SIZE) + 64 * group +
                     token % 8 / 2 * 16 + 8 * upper + token % 2 * 2;
    *reinterpret_cast<uint16_t*>(place) = half_of_word<2>(codes, 0);
    *reinterpret_cast<uint16_t*>(place + 4) = half_of_word<2>(codes, 1);
  }
}

// Write the code words of a group of a latent. Each part has half a word, or
// one lane has both words.
template <int kParts, int kWords>
__device__ __forceinline__ void store_latent_words(uint32_t (&codes)[kWords],
                                                   const CodePlace& target,
                                                   int group, bool is_stored) {
  const int part = part_of_lane<kParts>();
  uint8_t* row = target.plane + target.token * KEY_ROW_BYTES;
  if constexpr (kParts == 1) {
    if (is_stored)
      reinterpret_cast<uint2*>(row)[group] = make_uint2(codes[0], codes[1]);
  } else {
    static_assert(kParts == 4);
    codes[0] <<= part % 2 * 8;
    codes[0] |= __shfl_xor_sync(~0u, codes[0], 1);
    if (is_stored && part % 2 == 0)
      reinterpret_cast<uint32_t*>(row)[2 * group + part / 2] = codes[0];
  }
}

// Write the code words of a vector.
//
// words: the lane's parts, of magnitudes.
// signs: the signs of codes, in the codes' lowest bits.
// is_stored: whether to write at all.
template <bool kIsKey, int kElements, int kGroups>
__device__ __forceinline__ void store_codes(
    const uint32_t (&words)[kGroups][kWordsOf<kElements>],
    const uint32_t (&signs)[kGroups][kWordsOf<kElements>],
    const CodePlace& target, bool is_stored) {
  constexpr int kParts = kPartsOf<kElements>;
  const int part = part_of_lane<kParts>();
  // Half of the levels are negative. Their codes run in the opposite direction.
  constexpr uint32_t kPositive = kParts != 4 ? 0x88888888u
                                 : kIsLatent ? 0x00880088u
                                             : 0x08080808u;
  constexpr uint32_t kAllBits = 15;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const int group = group_of_lane<kParts>(j);
    const bool is_group = is_stored && group < NUM_GROUPS;
    uint32_t codes[kWordsOf<kElements>];
#pragma unroll
    for (int w = 0; w < kWordsOf<kElements>; ++w) {
      codes[w] = (words[j][w] | kPositive) ^ signs[j][w] * kAllBits;
    }
    if constexpr (kIsLatent) {
      store_latent_words<kParts>(codes, target, group, is_group);
    } else if constexpr (kParts == 1) {
      if (!is_group) continue;
      store_unit<kIsKey>(codes[0], target, group, 0);
      store_unit<kIsKey>(codes[1], target, group, 1);
    } else {
      if constexpr (kParts == 4) {
        codes[0] <<= part / 2 * 4;
        codes[0] |= __shfl_xor_sync(~0u, codes[0], 2);
      }
      if (is_group && part < 2) {
        store_unit<kIsKey>(codes[0], target, group, part);
      }
    }
  }
}

// Move bits 2 * i and 2 * i + 1 of 16 bits to bits 4 * i and 4 * i + 1.
__device__ __forceinline__ uint32_t spread_pairs(uint32_t x) {
  x = (x | x << 8) & 0x00FF00FFu;
  x = (x | x << 4) & 0x0F0F0F0Fu;
  return (x | x << 2) & 0x33333333u;
}

// Write the branches and path bits of a group of K to a token's rows. If words
// hold two groups, `path` has also the bits of the next group.
__device__ __forceinline__ void store_key_rows(uint32_t branches, uint32_t path,
                                               uint8_t* branch_row,
                                               uint8_t* path_row, int group) {
  reinterpret_cast<uint32_t*>(branch_row)[group] = branches;
  if constexpr (NUM_GROUPS % 2 == 1) {
    reinterpret_cast<uint16_t*>(path_row)[group] = static_cast<uint16_t>(path);
  } else if (group % 2 == 0) {
    reinterpret_cast<uint32_t*>(path_row)[group / 2] = path;
  }
}

// Write the branches and path bits of a group of K. All lanes call it, because
// neighbouring groups share words.
__device__ __forceinline__ void store_key_path(uint32_t branches, uint32_t path,
                                               const CodePlace& target,
                                               int group, bool is_stored) {
  constexpr int kPathBytes = HEAD_SIZE / 8;
  if constexpr (NUM_GROUPS % 2 == 0) {
    path = spread_pairs(path) << (group % 2 * 2);
    path |= __shfl_xor_sync(~0u, path, 4);
  }
  if (!is_stored) return;
  store_key_rows(branches, path, target.plane + target.token * KEY_ROW_BYTES,
                 target.plane + PATHS_OFFSET + target.token * kPathBytes,
                 group);
  if (WITH_TAIL && target.tag != nullptr)
    store_key_rows(branches, path, target.tag, target.tag + KEY_ROW_BYTES,
                   group);
}

// Write the branches and path bits of a group of V.
__device__ __forceinline__ void store_value_path(uint32_t branches,
                                                 uint32_t path,
                                                 const CodePlace& target,
                                                 int group) {
  const int token = target.token;
  const int h = token / 8, t = token % 8 / 2, j = token % 2;
  uint8_t* place =
      target.plane + 2 * HEAD_SIZE * h + 32 * group + 8 * t + 2 * j;
  // In each nibble the branch of the group's second unit comes first.
  const uint32_t swapped =
      (branches & 0x33333333u) << 2 | (branches >> 2 & 0x33333333u);
  *reinterpret_cast<uint16_t*>(place) = half_of_word<4>(swapped, 0);
  *reinterpret_cast<uint16_t*>(place + 4) = half_of_word<4>(swapped, 1);
  place =
      target.plane + PATHS_OFFSET + HEAD_SIZE * h + 16 * group + 4 * t + 2 * j;
  *reinterpret_cast<uint16_t*>(place) = static_cast<uint16_t>(path);
}

// Write the branches and path bits of a group of a latent.
__device__ __forceinline__ void store_latent_path(uint32_t branches,
                                                  uint32_t path,
                                                  const CodePlace& target,
                                                  int group) {
  uint8_t* row = target.plane + target.token * KEY_ROW_BYTES;
  reinterpret_cast<uint32_t*>(row)[group] = branches;
  row = target.plane + PATHS_OFFSET + target.token * (HEAD_SIZE / 8);
  reinterpret_cast<uint16_t*>(row)[group] = static_cast<uint16_t>(path);
}

// Write a vector's branches and path bits.
//
// branches: two bits per code.
// is_stored: whether to write at all.
template <bool kIsKey, int kParts, int kGroups>
__device__ __forceinline__ void store_paths(const uint32_t (&branches)[kGroups],
                                            const uint32_t (&paths)[kGroups],
                                            const CodePlace& target,
                                            bool is_stored) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const int group = group_of_lane<kParts>(j);
    const bool is_group = is_stored && group < NUM_GROUPS;
    if constexpr (kIsLatent) {
      if (is_group) store_latent_path(branches[j], paths[j], target, group);
    } else if constexpr (kIsKey) {
      store_key_path(branches[j], paths[j], target, group, is_group);
    } else if (is_group) {
      store_value_path(branches[j], paths[j], target, group);
    }
  }
}

}  // namespace turbo
