// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Operations that lanes of a warp, or threads of a block, do together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "emulator/machine.h"

namespace emulator {

template <typename T>
struct Shuffled {
  T value, result;
  int source;

  static void complete(void* const (&operands)[kWarpSize]) {
    for (void* operand : operands) {
      if (operand == nullptr) continue;
      auto& lane = *static_cast<Shuffled*>(operand);
      auto* source = static_cast<Shuffled*>(operands[lane.source]);
      if (source == nullptr) fail("shuffled from a lane that is not there");
      lane.result = source->value;
    }
  }
};

inline int own_lane() { return threadIdx.x % kWarpSize; }

template <typename T>
T shuffle(const Site& site, uint32_t mask, T value, int source) {
  Shuffled<T> own = {value, value, source};
  together("shuffle", site, mask, &own, Shuffled<T>::complete);
  return own.result;
}

// A reduction over the lanes of the mask, by Operation::of.
template <typename T, typename Operation>
struct Reduced {
  T value;

  static void complete(void* const (&operands)[kWarpSize]) {
    const Reduced* first = nullptr;
    T result = {};
    for (void* operand : operands) {
      if (operand == nullptr) continue;
      const auto* lane = static_cast<const Reduced*>(operand);
      result =
          first == nullptr ? lane->value : Operation::of(result, lane->value);
      first = lane;
    }
    for (void* operand : operands) {
      if (operand != nullptr) static_cast<Reduced*>(operand)->value = result;
    }
  }
};

template <typename Operation, typename T>
T reduce(const char* name, const Site& site, uint32_t mask, T value) {
  Reduced<T, Operation> own = {value};
  together(name, site, mask, &own, Reduced<T, Operation>::complete);
  return own.value;
}

struct Add {
  // Sums wrap around, and so do signed ones.
  template <typename T>
  static T of(T a, T b) {
    return static_cast<T>(uint32_t(a) + uint32_t(b));
  }
};
struct Max {
  template <typename T>
  static T of(T a, T b) {
    return std::max(a, b);
  }
};
struct Min {
  template <typename T>
  static T of(T a, T b) {
    return std::min(a, b);
  }
};
struct Or {
  static uint32_t of(uint32_t a, uint32_t b) { return a | b; }
};

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T x, int lane, int width = 32,
              const emulator::Site& site = emulator::Site::current()) {
  const int own = emulator::own_lane();
  return emulator::shuffle(site, mask, x,
                           (own & ~(width - 1)) | (lane & (width - 1)));
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32,
                  const emulator::Site& site = emulator::Site::current()) {
  const int own = emulator::own_lane(), source = own ^ lanes;
  const bool inside = (source & ~(width - 1)) <= (own & ~(width - 1));
  return emulator::shuffle(site, mask, x, inside ? source : own);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T x, unsigned distance, int width = 32,
                 const emulator::Site& site = emulator::Site::current()) {
  const int own = emulator::own_lane(), place = own & (width - 1);
  return emulator::shuffle(site, mask, x,
                           place >= int(distance) ? own - int(distance) : own);
}

inline unsigned __ballot_sync(
    unsigned mask, bool predicate,
    const emulator::Site& site = emulator::Site::current()) {
  const uint32_t own = predicate ? 1u << emulator::own_lane() : 0u;
  return emulator::reduce<emulator::Or>("ballot", site, mask, own);
}

inline int __any_sync(unsigned mask, bool predicate,
                      const emulator::Site& site = emulator::Site::current()) {
  return emulator::reduce<emulator::Or>("any", site, mask,
                                        uint32_t(predicate)) != 0;
}

template <typename T>
T __reduce_add_sync(unsigned mask, T x,
                    const emulator::Site& site = emulator::Site::current()) {
  return emulator::reduce<emulator::Add>("reduce_add", site, mask, x);
}

template <typename T>
T __reduce_max_sync(unsigned mask, T x,
                    const emulator::Site& site = emulator::Site::current()) {
  return emulator::reduce<emulator::Max>("reduce_max", site, mask, x);
}

template <typename T>
T __reduce_min_sync(unsigned mask, T x,
                    const emulator::Site& site = emulator::Site::current()) {
  return emulator::reduce<emulator::Min>("reduce_min", site, mask, x);
}

inline void __syncwarp(unsigned mask = emulator::kAllLanes,
                       const emulator::Site& site = emulator::Site::current()) {
  emulator::sync_warp(site, mask);
}

inline void __syncthreads(
    const emulator::Site& site = emulator::Site::current()) {
  emulator::sync_block(site, 0, 0);
}

// No kernel may depend on it.
inline void __nanosleep(unsigned) {}

inline int __syncthreads_or(
    bool predicate, const emulator::Site& site = emulator::Site::current()) {
  return emulator::sync_block(site, 0, 0, predicate);
}
