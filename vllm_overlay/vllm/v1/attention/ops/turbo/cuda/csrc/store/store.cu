// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The store's entry point. A module has one layout, from turbo_constants.h,
// which constants.py makes from format.py.
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <algorithm>

#include "common/launch.cuh"
#include "common/tensors.cuh"
#include "common/tail_entry.cuh"
#include "store/store.cuh"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

const uint4* table_of(const char* name, const TensorView& x) {
  turbo::check_contiguous(name, x);
  turbo::check_address(name, x, sizeof(uint4));
  return static_cast<const uint4*>(x.data_ptr());
}

void add_query(turbo::StoreParams& p, const TensorView& query,
               const TensorView& rotated_query, const TensorView& query_scale,
               bool is_bf16) {
  p.query =
      turbo::vectors_of("query", query, is_bf16, 0, query.size(1), HEAD_SIZE);
  turbo::check_shape("rotated_query", rotated_query, turbo::kFloat16,
                     {query.size(0), query.size(1), HEAD_SIZE});
  turbo::check_shape("query_scale", query_scale, turbo::kFloat32,
                     {query.size(0), query.size(1)});
  turbo::check_contiguous("rotated_query", rotated_query);
  turbo::check_contiguous("query_scale", query_scale);
  turbo::check_address("rotated_query", rotated_query, sizeof(__half2));
  p.rotated_query = static_cast<__half2*>(rotated_query.data_ptr());
  p.query_scale = static_cast<float*>(query_scale.data_ptr());
  p.query_strides = turbo::strides_of(query);
  p.num_queries = turbo::to_int("query", query.size(0));
  p.num_heads = turbo::to_int("query", query.size(1));
  turbo::to_int("query", query.size(0) * query.size(1));
}

// Add the sequences of tokens, and the tokens' places in them.
void add_places(turbo::StoreParams& p, const TensorView& seq_lens,
                const TensorView& query_start_loc, DLDevice device) {
  turbo::check_device(device, seq_lens, query_start_loc);
  p.seq_lens = turbo::ints_of("seq_lens", seq_lens, 1);
  p.num_seqs = turbo::to_int("seq_lens", seq_lens.size(0));
  p.query_start_loc =
      turbo::ints_of("query_start_loc", query_start_loc, seq_lens.size(0) + 1);
}

// Add the sequences' tails, after add_places.
void add_tail(turbo::StoreParams& p, const TensorView& pages,
              const TensorView& blocks, const TensorView& packed_lens,
              int64_t num_rows, int64_t keys, int64_t values,
              int64_t key_scales, int64_t value_scales, int64_t tags,
              int64_t places, int64_t num_tokens, const TensorView& block_table,
              DLDevice device) {
  turbo::StoreTail& w = p.tail;
  static_cast<turbo::TailPages&>(w) =
      turbo::tail_pages_of(pages, blocks, p.num_seqs, p.num_kv_heads, num_rows,
                           keys, values, key_scales, value_scales, device);
  w.tags = turbo::plane_of("tail tags", pages, tags, num_rows, KEY_CODE_BYTES);
  w.places =
      turbo::plane_of("tail places", pages, places, num_rows, sizeof(int));
  w.num_tokens = turbo::to_int("tail_tokens", num_tokens);
  turbo::check_device(device, packed_lens, block_table);
  w.packed_lens =
      const_cast<int*>(turbo::ints_of("packed_lens", packed_lens, p.num_seqs));
  w.block_table = turbo::block_table_of(block_table, p.num_seqs);
  w.stride_block_table = block_table.stride(0);
}

// The fewest lanes that share a scale group. With long vectors, one lane has no
// registers for all of its groups.
constexpr int kFewestParts = HEAD_SIZE <= 256 ? 1 : 2;

// kParts: lanes that share a scale group; 1 for many tokens.
template <int kParts>
void launch_store(turbo::KernelParams p, bool is_bf16, int64_t threads,
                  DLDevice device, bool enable_pdl) {
  // A vector's warps are in one block.
  if (turbo::kIsSingle<kParts>)
    threads = std::max<int64_t>(threads, 32 * turbo::kSingleWarps);
  turbo::set_tail_blocks(p, static_cast<int>(threads));
  const int64_t all_threads = 32 * turbo::num_store_warps<kParts>(p);
  const int blocks = turbo::to_int(
      "blocks", p.tail_blocks + (all_threads + threads - 1) / threads);
  if (blocks == 0) return;
  const auto kernel = is_bf16 ? turbo::store_kernel<true, kParts>
                              : turbo::store_kernel<false, kParts>;
  turbo::launch(kernel, blocks, threads, 0, device, p, enable_pdl);
}

// See turbo::StoreParams and store.py for shapes and dtypes.
void store(TensorView kv_cache, TensorView slot_mapping, TensorView key,
           TensorView value, TensorView kv_matrix, TensorView single_matrix,
           TensorView query_matrix, TensorView tables,
           Optional<TensorView> query, Optional<TensorView> rotated_query,
           Optional<TensorView> query_scale, double query_factor,
           Optional<TensorView> key_offset,
           Optional<TensorView> query_direction, Optional<TensorView> seq_lens,
           Optional<TensorView> query_start_loc,
           Optional<TensorView> tail_pages, Optional<TensorView> tail_blocks,
           Optional<TensorView> packed_lens, int64_t num_rows, int64_t keys,
           int64_t values, int64_t key_scales, int64_t value_scales,
           int64_t tags, int64_t places, int64_t tail_tokens,
           Optional<TensorView> block_table, int64_t parts, int64_t threads,
           bool enable_pdl) {
  turbo::check_pages("kv_cache", kv_cache, TILE_TOKENS, TILE_BYTES);
  const int64_t* slots = turbo::slots_of(slot_mapping);
  const int64_t num_tokens = slot_mapping.size(0);
  const int64_t num_kv_heads = kv_cache.size(1);
  const bool is_bf16 = key.dtype().code == kDLBfloat;
  turbo::StoreParams p = {};
  p.key = turbo::vectors_of("key", key, is_bf16, num_tokens, num_kv_heads,
                            HEAD_SIZE);
  p.value = turbo::vectors_of("value", value, is_bf16, num_tokens, num_kv_heads,
                              HEAD_SIZE);
  p.kv_cache = static_cast<uint8_t*>(kv_cache.data_ptr());
  p.slot_mapping = slots;
  p.kv_matrix = table_of("kv_matrix", kv_matrix);
  p.single_matrix = table_of("single_matrix", single_matrix);
  p.query_matrix = table_of("query_matrix", query_matrix);
  p.tables = table_of("tables", tables);
  p.key_strides = turbo::strides_of(key);
  p.value_strides = turbo::strides_of(value);
  p.stride_cache_block = kv_cache.stride(0);
  p.stride_cache_head = kv_cache.stride(1);
  p.num_tokens = turbo::to_int("slot_mapping", num_tokens);
  p.num_kv_heads = turbo::to_int("kv_cache", num_kv_heads);
  turbo::to_int("key", num_tokens * num_kv_heads);
  p.block_size = turbo::to_int("kv_cache", kv_cache.size(2));
  p.query_factor = static_cast<float>(query_factor);
  const DLDevice device = kv_cache.device();
  turbo::check_device(device, slot_mapping, key, value, kv_matrix,
                      single_matrix, query_matrix, tables);
  p.key_offset = turbo::key_offset_of(key_offset, num_kv_heads, HEAD_SIZE,
                                      KEY_OFFSET, device, p.num_offsets);
  TVM_FFI_CHECK(tail_pages.has_value() == (WITH_TAIL != 0), ValueError)
      << "tail_pages: the module is " << (WITH_TAIL ? "" : "not ")
      << "compiled for it";
  if (turbo::kHasPositions)
    add_places(p, seq_lens.value(), query_start_loc.value(), device);
  if (WITH_TAIL != 0) {
    add_tail(p, tail_pages.value(), tail_blocks.value(), packed_lens.value(),
             num_rows, keys, values, key_scales, value_scales, tags, places,
             tail_tokens, block_table.value(), device);
  }
  if (query.has_value()) {
    add_query(p, query.value(), rotated_query.value(), query_scale.value(),
              is_bf16);
    turbo::check_device(device, query.value(), rotated_query.value(),
                        query_scale.value());
  }
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const auto launch = parts == 1   ? launch_store<kFewestParts>
                      : parts == 2 ? launch_store<2>
                                   : launch_store<4>;
  turbo::KernelParams params(p);
  params.directions = static_cast<const __half*>(turbo::by_position(
      "query_direction", query_direction, turbo::kFloat16, num_kv_heads,
      HEAD_SIZE, QUERY_DIRECTION, device, params.num_directions));
  launch(params, is_bf16, threads, device, enable_pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(store, store);
