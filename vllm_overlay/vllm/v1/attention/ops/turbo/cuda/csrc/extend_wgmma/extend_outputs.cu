// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The entry point of the kernel for many queries that attend to cached tokens
// and to raw tokens, and that writes outputs. A module has one instance: see
// instance.cuh.
#include <tvm/ffi/function.h>

#include "extend_wgmma/instance.cuh"
#include "extend_wgmma/join.cuh"
#include "extend_wgmma/raw_tiles.cuh"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using Instance = RowsInstance<turbo::OutputParams>;
using Plan = Instance::Plan;

// Check vectors [T, heads, D] in the queries' dtype.
void check_tokens(const char* name, const TensorView& x,
                  const TensorView& output, int64_t num_heads) {
  turbo::check_device(output.device(), x);
  turbo::check_dtype(name, x, output.dtype());
  turbo::check_vectors(name, x, HEAD_SIZE);
  turbo::check_size(name, x, 0, output.size(0));
  turbo::check_size(name, x, 1, num_heads);
}

// Check vectors of 16-bit numbers that are copied or written 16 bytes at a
// time.
void check_runs(const char* name, const TensorView& x) {
  turbo::check_stride(name, x, 0, 8);
  turbo::check_stride(name, x, 1, 8);
  turbo::check_address(name, x, 16);
}

void add_raw_tokens(turbo::OutputParams& p, const TensorView& output,
                    const Optional<TensorView>& key,
                    const Optional<TensorView>& value,
                    const TensorView& tiles) {
  TVM_FFI_CHECK(key.has_value() && value.has_value(), ValueError)
      << "raw_tiles: given without the query tokens' keys and values";
  const TensorView &k = key.value(), &v = value.value();
  check_tokens("key", k, output, p.num_kv_heads);
  check_tokens("value", v, output, p.num_kv_heads);
  p.own_key = k.data_ptr();
  p.key_strides = turbo::strides_of(k);
  p.own_value = v.data_ptr();
  p.value_strides = turbo::strides_of(v);
  turbo::check_device(output.device(), tiles);
  turbo::check_shape("raw_tiles", tiles, turbo::kFloat16,
                     {turbo::kAnySize, p.num_kv_heads, turbo::kRawTileNumbers});
  turbo::check_contiguous("raw_tiles", tiles);
  turbo::check_address("raw_tiles", tiles, 16);
  const int64_t most = output.size(0) / TILE_TOKENS + p.num_seqs;
  TVM_FFI_CHECK(tiles.size(0) >= most, ValueError)
      << "raw_tiles: " << tiles.size(0) << " tiles, not " << most;
  p.raw_tiles = static_cast<__half*>(tiles.data_ptr());
}

// partial: [P, D].
// partial_lse: [P]. If P is too small for two passes per range, each block has
//   whole passes. A result then does not depend on the rest of the batch.
//
// See turbo::OutputParams and extend_wgmma.py for the others.
void extend_outputs(TensorView query, double query_factor, TensorView kv_cache,
                    TensorView block_table, TensorView seq_lens,
                    Optional<TensorView> query_start_loc, int64_t num_seqs,
                    int64_t query_len, TensorView output, TensorView partial,
                    TensorView partial_lse, Optional<TensorView> key,
                    Optional<TensorView> value, Optional<TensorView> raw_tiles,
                    int64_t sliding_window, Optional<TensorView> sinks,
                    double soft_cap, Optional<TensorView> key_offset,
                    double offset_factor, bool enable_pdl) {
  turbo::check_axes("query", query, 3);
  const int64_t num_tokens = query.size(0), num_heads = query.size(1);
  turbo::OutputParams p = {};
  static_cast<turbo::AttentionParams&>(p) = turbo::params_of(
      num_heads, kv_cache, block_table, seq_lens, query_start_loc, num_seqs,
      query_len, raw_tiles.has_value(), {}, sliding_window);
  p.soft_cap = turbo::soft_cap_of(soft_cap, SOFT_CAP);
  const DLDevice device = kv_cache.device();
  turbo::add_original_queries(p, "query", query, num_tokens, num_heads, device);
  check_runs("query", query);
  p.query_factor = static_cast<float>(query_factor);
  p.key_offset = turbo::key_offset_of(key_offset, p.num_kv_heads, HEAD_SIZE,
                                      KEY_OFFSET, device, p.num_offsets);
  p.offset_factor = static_cast<float>(offset_factor);
  turbo::check_dtype("output", output, query.dtype());
  check_tokens("output", output, output, num_heads);
  turbo::check_size("output", output, 0, num_tokens);
  check_runs("output", output);
  p.output = output.data_ptr();
  p.output_strides = turbo::strides_of(output);
  if (raw_tiles.has_value())
    add_raw_tokens(p, output, key, value, raw_tiles.value());
  turbo::check_device(device, partial, partial_lse);
  turbo::check_shape("partial", partial, turbo::kFloat32,
                     {turbo::kAnySize, HEAD_SIZE});
  turbo::check_contiguous("partial", partial);
  turbo::check_address("partial", partial, 16);
  turbo::check_shape("partial_lse", partial_lse, turbo::kFloat32,
                     {partial.size(0)});
  turbo::check_contiguous("partial_lse", partial_lse);
  p.partial = static_cast<float*>(partial.data_ptr());
  p.partial_lse = static_cast<float*>(partial_lse.data_ptr());
  p.sinks = turbo::sinks_of(sinks, num_heads, device);

  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const int num_blocks = turbo::blocks_of<Instance>(device.device_id);
  const int64_t room = partial.size(0) / (2 * Plan::kRows);
  p.num_ranges = room < num_blocks ? static_cast<int>(room) : num_blocks;
  p.num_splits = p.num_ranges == 0;
  const dim3 tiles(p.num_seqs, (p.query_len + TILE_TOKENS - 1) / TILE_TOKENS,
                   p.num_kv_heads);
  if (p.raw_tiles != nullptr) {
    turbo::launch(turbo::raw_tiles_kernel, tiles, 32 * turbo::kRawTileWarps, 0,
                  device, p, enable_pdl);
  }
  turbo::launch(Instance::kKernel, num_blocks, Instance::kThreads,
                Instance::kSharedBytes, device, p, enable_pdl);
  if (p.num_ranges > 1) {
    // If there are few passes, each has many parts, and more blocks are free to
    // join them.
    const int64_t queries = query_len * p.heads_per_kv;
    const int64_t passes =
        (queries + Plan::kRows - 1) / Plan::kRows * p.num_seqs * p.num_kv_heads;
    const int turns = passes < num_blocks ? 1 : turbo::kJoinTurns;
    const int blocks = (Plan::kRows - 1) / (turns * turbo::kJoinBlockRows) + 1;
    turbo::launch(turbo::join_kernel<Plan>, dim3(p.num_ranges - 1, blocks),
                  32 * turbo::kJoinWarps, 0, device, p, enable_pdl);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend_outputs, extend_outputs);
