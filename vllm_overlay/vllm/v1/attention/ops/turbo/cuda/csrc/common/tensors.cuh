// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Checks of the entry points' tensors, on the host, at every call. The kernels
// rely on them. Messages name the tensor.
//
// DLPack may give any stride to an axis of one element, so such strides are not
// checked.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <initializer_list>

#include "common/sinks.cuh"
#include "common/soft_cap.cuh"
#include "common/vectors.cuh"
#include "turbo_constants.h"

namespace turbo {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Bytes of a page that are loaded at once, and elements of a vector likewise.
constexpr int64_t kPageAlignment = 16;
constexpr int64_t kVectorElements = 4;

// The value as an int, after a check that it is not negative and fits.
inline int to_int(const char* name, int64_t value) {
  TVM_FFI_CHECK(0 <= value && value <= INT32_MAX, ValueError)
      << name << ": " << value << " is not between 0 and 2**31 - 1";
  return static_cast<int>(value);
}

// More tokens than a sequence has, with room for sums of two such numbers.
constexpr int kAllTokens = 1 << 30;

// The most tokens that a query token sees; a value of 0 stands for all before
// it.
inline int sliding_window_of(int64_t value) {
  const int window = to_int("sliding_window", value);
  return window == 0 || window > kAllTokens ? kAllTokens : window;
}

// The soft cap of scores in base 2.
//
// cap: in base 2; 0 for kernels without one.
// is_built: whether the kernels were compiled with a cap.
inline SoftCap soft_cap_of(double cap, bool is_built) {
  TVM_FFI_CHECK(is_built ? cap > 0.0 : cap == 0.0, ValueError)
      << "soft_cap: " << cap << ", of kernels "
      << (is_built ? "with one" : "without");
  if (!is_built) return {};
  return {static_cast<float>(cap), static_cast<float>(2.0 * LOG2_E / cap)};
}

constexpr DLDataType kBytes = {kDLUInt, 8, 1};
constexpr DLDataType kInt32 = {kDLInt, 32, 1};
constexpr DLDataType kInt64 = {kDLInt, 64, 1};
constexpr DLDataType kFloat32 = {kDLFloat, 32, 1};
constexpr DLDataType kFloat16 = {kDLFloat, 16, 1};
constexpr DLDataType kBFloat16 = {kDLBfloat, 16, 1};

inline void check_dtype(const char* name, const TensorView& x,
                        DLDataType dtype) {
  TVM_FFI_CHECK(x.dtype() == dtype, TypeError)
      << name << ": dtype " << x.dtype() << ", not " << dtype;
}

inline void check_axes(const char* name, const TensorView& x, int axes) {
  TVM_FFI_CHECK(x.ndim() == axes, ValueError)
      << name << ": " << x.ndim() << " axes, not " << axes;
}

inline void check_size(const char* name, const TensorView& x, int axis,
                       int64_t size) {
  TVM_FFI_CHECK(x.size(axis) == size, ValueError)
      << name << ": " << x.size(axis) << " along axis " << axis << ", not "
      << size;
}

constexpr int64_t kAnySize = -1;

inline void check_shape(const char* name, const TensorView& x, DLDataType dtype,
                        std::initializer_list<int64_t> sizes) {
  check_dtype(name, x, dtype);
  check_axes(name, x, static_cast<int>(sizes.size()));
  int axis = 0;
  for (const int64_t size : sizes) {
    if (size != kAnySize) check_size(name, x, axis, size);
    ++axis;
  }
}

inline void check_last_axis(const char* name, const TensorView& x) {
  const int last = x.ndim() - 1;
  TVM_FFI_CHECK(x.size(last) <= 1 || x.stride(last) == 1, ValueError)
      << name << ": the last axis is not contiguous, but of stride "
      << x.stride(last);
}

inline void check_contiguous(const char* name, const TensorView& x) {
  TVM_FFI_CHECK(x.IsContiguous(), ValueError) << name << ": not contiguous";
}

inline void check_address(const char* name, const TensorView& x,
                          int64_t alignment) {
  TVM_FFI_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % alignment == 0,
                ValueError)
      << name << ": its address is no multiple of " << alignment << " bytes";
}

inline void check_stride(const char* name, const TensorView& x, int axis,
                         int64_t divisor) {
  TVM_FFI_CHECK(x.size(axis) <= 1 || x.stride(axis) % divisor == 0, ValueError)
      << name << ": the stride of axis " << axis << ", " << x.stride(axis)
      << ", is no multiple of " << divisor;
}

// Check vectors [T, heads, D] of 16 or 32 bits per element. Four elements are
// loaded or stored at once.
inline void check_vectors(const char* name, const TensorView& x,
                          int64_t head_size) {
  check_axes(name, x, 3);
  check_size(name, x, 2, head_size);
  check_last_axis(name, x);
  check_stride(name, x, 0, kVectorElements);
  check_stride(name, x, 1, kVectorElements);
  check_address(name, x, kVectorElements * (x.dtype().bits / 8));
}

inline Strides strides_of(const TensorView& x) {
  return {x.stride(0), x.stride(1)};
}

// Check vectors [>= T, heads, D] in the model's dtype, which has 16 bits.
inline const uint16_t* vectors_of(const char* name, const TensorView& x,
                                  bool is_bf16, int64_t num_tokens,
                                  int64_t num_heads, int64_t head_size) {
  check_dtype(name, x, is_bf16 ? kBFloat16 : kFloat16);
  check_vectors(name, x, head_size);
  check_size(name, x, 1, num_heads);
  TVM_FFI_CHECK(x.size(0) >= num_tokens, ValueError)
      << name << ": of " << x.size(0) << " tokens, not " << num_tokens;
  return static_cast<const uint16_t*>(x.data_ptr());
}

// Check pages [num_blocks, H, N, C] of bytes: whole tiles, each aligned.
inline void check_pages(const char* name, const TensorView& x,
                        int64_t tile_tokens, int64_t tile_bytes) {
  check_shape(name, x, kBytes,
              {kAnySize, kAnySize, kAnySize, tile_bytes / tile_tokens});
  check_last_axis(name, x);
  TVM_FFI_CHECK(x.size(2) > 0 && x.size(2) % tile_tokens == 0, ValueError)
      << name << ": blocks of " << x.size(2) << " tokens, no multiple of "
      << tile_tokens;
  TVM_FFI_CHECK(x.stride(2) == x.size(3), ValueError)
      << name << ": tokens are " << x.stride(2) << " bytes apart, not "
      << x.size(3);
  check_stride(name, x, 0, kPageAlignment);
  check_stride(name, x, 1, kPageAlignment);
  check_address(name, x, kPageAlignment);
  to_int(name, x.size(0) * x.size(2));  // slots
}

// Check that all tensors are on one GPU.
template <typename... Tensors>
void check_device(DLDevice device, const Tensors&... tensors) {
  TVM_FFI_CHECK(device.device_type == kDLCUDA, ValueError)
      << "tensors have to be on an NVIDIA GPU";
  const bool on_it = (... && (tensors.device().device_type == kDLCUDA &&
                              tensors.device().device_id == device.device_id));
  TVM_FFI_CHECK(on_it, ValueError)
      << "tensors are not all on GPU " << device.device_id;
}

// Check int32 numbers, at least so many.
inline const int* ints_of(const char* name, const TensorView& x,
                          int64_t least) {
  check_dtype(name, x, kInt32);
  check_axes(name, x, 1);
  check_last_axis(name, x);
  TVM_FFI_CHECK(x.size(0) >= least, ValueError)
      << name << ": of " << x.size(0) << ", not " << least;
  return static_cast<const int*>(x.data_ptr());
}

// Check a table [>= B, max_blocks] of int32.
inline const int* block_table_of(const TensorView& x, int64_t num_seqs) {
  check_shape("block_table", x, kInt32, {kAnySize, kAnySize});
  check_last_axis("block_table", x);
  TVM_FFI_CHECK(x.size(0) >= num_seqs, ValueError)
      << "block_table: " << x.size(0) << " rows, not " << num_seqs;
  return static_cast<const int*>(x.data_ptr());
}

// Check slots [T] of int64.
inline const int64_t* slots_of(const TensorView& x) {
  check_shape("slot_mapping", x, kInt64, {kAnySize});
  check_last_axis("slot_mapping", x);
  return static_cast<const int64_t*>(x.data_ptr());
}

inline const int* starts_of(const Optional<TensorView>& query_start_loc,
                            int64_t num_seqs, DLDevice device) {
  if (!query_start_loc.has_value()) return nullptr;
  check_device(device, query_start_loc.value());
  return ints_of("query_start_loc", query_start_loc.value(), num_seqs + 1);
}

// Check vectors [G, H, D] by position. A module has them if it was compiled for
// them, and only then.
//
// num_rows: G, written.
inline const void* by_position(const char* name,
                               const Optional<TensorView>& table,
                               DLDataType dtype, int64_t num_kv_heads,
                               int64_t head_size, bool is_wanted,
                               DLDevice device, int& num_rows) {
  num_rows = 0;
  TVM_FFI_CHECK(table.has_value() == is_wanted, ValueError)
      << name << ": the module is " << (is_wanted ? "" : "not ")
      << "compiled for it";
  if (!is_wanted) return nullptr;
  const TensorView& x = table.value();
  check_device(device, x);
  check_shape(name, x, dtype, {kAnySize, num_kv_heads, head_size});
  check_contiguous(name, x);
  check_address(name, x, 16);
  num_rows = to_int(name, x.size(0));
  TVM_FFI_CHECK(num_rows > 0, ValueError)
      << name << ": " << num_rows << " along axis 0, not 1 or more";
  return x.data_ptr();
}

// Check offsets, which are fp32.
//
// num_offsets: G, written.
inline const float* key_offset_of(const Optional<TensorView>& key_offset,
                                  int64_t num_kv_heads, int64_t head_size,
                                  bool is_wanted, DLDevice device,
                                  int& num_offsets) {
  return static_cast<const float*>(
      by_position("key_offset", key_offset, kFloat32, num_kv_heads, head_size,
                  is_wanted, device, num_offsets));
}

inline Floats floats_of(const char* name, const TensorView& x) {
  if (x.dtype() == kBFloat16) return Floats::kBFloat16;
  if (x.dtype() == kFloat16) return Floats::kHalf;
  check_dtype(name, x, kFloat32);
  return Floats::kFloat;
}

inline Sinks sinks_of(const Optional<TensorView>& sinks, int64_t num_heads,
                      DLDevice device) {
  if (!sinks.has_value()) return {};
  const TensorView& x = sinks.value();
  const Floats type = floats_of("sinks", x);
  check_axes("sinks", x, 1);
  check_size("sinks", x, 0, num_heads);
  check_last_axis("sinks", x);
  check_device(device, x);
  return {x.data_ptr(), type};
}

// The splits per query that the partial results have room for.
inline int check_partials(const TensorView& partial,
                          const TensorView& partial_lse, int64_t num_heads,
                          int64_t head_size, int64_t num_seqs,
                          int64_t query_len) {
  check_dtype("partial", partial, kFloat32);
  check_dtype("partial_lse", partial_lse, kFloat32);
  check_axes("partial", partial, 3);
  check_axes("partial_lse", partial_lse, 2);
  check_contiguous("partial", partial);
  check_contiguous("partial_lse", partial_lse);
  check_address("partial", partial, 16);
  check_size("partial", partial, 1, num_heads);
  check_size("partial", partial, 2, head_size);
  check_size("partial_lse", partial_lse, 1, num_heads);
  const int64_t num_splits = partial.size(0) / (num_seqs * query_len);
  TVM_FFI_CHECK(num_splits >= 1, ValueError)
      << "partial: " << partial.size(0) << " rows are not one a query of "
      << num_seqs << " sequences";
  check_size("partial_lse", partial_lse, 0, partial.size(0));
  to_int("partial", num_splits * query_len * num_heads * head_size);
  return static_cast<int>(num_splits);
}

}  // namespace turbo
