// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The entry point of decode attention to latents and of the merge of its
// partial results. A module has one instance of decode attention.
// latent_decode.py defines LATENT_COLUMNS, LATENT_ROWS, LATENT_STAGES and
// LATENT_TEAMS. With teams it defines LATENT_TILES, LATENT_HELD and
// LATENT_BULK. It includes turbo_constants.h of the layout.
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "common/launch.cuh"
#include "latent/decode.cuh"
#include "latent/merge.cuh"
#include "latent/pages.cuh"
#if LATENT_TEAMS
  #include "latent/slices_segment.cuh"
#elif LATENT_ROWS
  #include "latent/rows_kernel.cuh"
#else
  #include "latent/columns_kernel.cuh"
#endif

namespace {

using turbo::LatentMergeParams;
using turbo::LatentParams;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

#if LATENT_TEAMS
using Kernel = turbo::SliceKernel<LATENT_COLUMNS, LATENT_TEAMS, LATENT_TILES,
                                  LATENT_STAGES, LATENT_HELD, LATENT_BULK>;
#elif LATENT_ROWS
static_assert(LATENT_COLUMNS == turbo::RowsKernel::kColumns);
using Kernel = turbo::RowsKernel;
#else
using Kernel = turbo::ColumnsKernel<LATENT_COLUMNS>;
#endif
struct Decode {
  static constexpr size_t kSharedBytes = sizeof(Kernel::Shared);
  static constexpr auto kKernel = turbo::latent_decode_kernel<Kernel>;
  static int num_blocks() { return 1; }
};

// Check queries [T, Hq, D] in the query's dtype. Two elements are loaded at
// once.
const void* queries_of(const char* name, const TensorView& x, DLDataType dtype,
                       int64_t size, const TensorView& query) {
  turbo::check_shape(name, x, dtype, {query.size(0), query.size(1), size});
  turbo::check_last_axis(name, x);
  turbo::check_stride(name, x, 0, 2);
  turbo::check_stride(name, x, 1, 2);
  turbo::check_address(name, x, sizeof(__half2));
  return x.data_ptr();
}

LatentParams params_of(const TensorView& query,
                       const Optional<TensorView>& query_rope,
                       const TensorView& kv_cache,
                       const TensorView& block_table,
                       const TensorView& seq_lens, const TensorView& partial,
                       const TensorView& partial_lse,
                       const Optional<TensorView>& query_start_loc,
                       int64_t num_seqs, int64_t query_len, double scale) {
  const DLDevice device = kv_cache.device();
  turbo::check_latent_pages(kv_cache);
  turbo::check_device(device, query, block_table, seq_lens, partial,
                      partial_lse);
  LatentParams p = {};
  p.is_bf16 = query.dtype() == turbo::kBFloat16;
  const DLDataType dtype = p.is_bf16 ? turbo::kBFloat16 : turbo::kFloat16;
  p.query = queries_of("query", query, dtype, LATENT_RANK, query);
  p.query_strides = turbo::strides_of(query);
  TVM_FFI_CHECK(query_rope.has_value() == (ROPE_SIZE != 0), ValueError)
      << "query_rope: the layout has " << ROPE_SIZE << " rotary coordinates";
  if (query_rope.has_value()) {
    const TensorView& x = query_rope.value();
    turbo::check_device(device, x);
    p.query_rope = queries_of("query_rope", x, dtype, ROPE_SIZE, query);
    p.rope_strides = turbo::strides_of(x);
  }
  p.kv_cache = static_cast<const uint8_t*>(kv_cache.data_ptr());
  p.stride_cache_block = kv_cache.stride(0);
  p.tiles_per_block = turbo::to_int("kv_cache", kv_cache.size(1) / TILE_TOKENS);
  p.block_table = turbo::block_table_of(block_table, num_seqs);
  p.stride_block_table = turbo::to_int("block_table", block_table.stride(0));
  p.seq_lens = turbo::ints_of("seq_lens", seq_lens, num_seqs);
  p.query_start_loc = turbo::starts_of(query_start_loc, num_seqs, device);
  p.num_seqs = turbo::to_int("num_seqs", num_seqs);
  p.num_heads = turbo::to_int("query", query.size(1));
  p.query_len = turbo::to_int("query_len", query_len);
  p.partial = static_cast<float*>(partial.data_ptr());
  p.partial_lse = static_cast<float*>(partial_lse.data_ptr());
  p.num_splits = turbo::check_partials(partial, partial_lse, query.size(1),
                                       LATENT_RANK, num_seqs, query_len);
  TVM_FFI_CHECK(p.num_splits <= LATENT_MAX_SPLITS, ValueError)
      << "partial: " << p.num_splits << " splits, more than "
      << LATENT_MAX_SPLITS;
  p.score_factor = static_cast<float>(scale * LOG2_E);
  return p;
}

LatentMergeParams merge_params_of(const LatentParams& p,
                                  const TensorView& query,
                                  const TensorView& output,
                                  const TensorView& lse,
                                  const Optional<TensorView>& mean) {
  turbo::check_vectors("output", output, LATENT_RANK);
  turbo::check_size("output", output, 0, query.size(0));
  turbo::check_size("output", output, 1, query.size(1));
  turbo::check_shape("lse", lse, turbo::kFloat32,
                     {query.size(0), query.size(1)});
  turbo::check_device(query.device(), output, lse);
  LatentMergeParams m = {};
  m.partial = p.partial;
  m.partial_lse = p.partial_lse;
  m.query_start_loc = p.query_start_loc;
  m.output = output.data_ptr();
  m.lse = static_cast<float*>(lse.data_ptr());
  m.mean = turbo::latent_mean_of("rotated_mean", mean, query.device());
  m.output_strides = turbo::strides_of(output);
  m.lse_strides = turbo::strides_of(lse);
  m.num_heads = p.num_heads;
  m.query_len = p.query_len;
  m.num_splits = p.num_splits;
  return m;
}

using MergeKernel = void (*)(LatentMergeParams);

MergeKernel merge_of(DLDataType dtype) {
  if (dtype == turbo::kBFloat16)
    return turbo::latent_merge_kernel<__nv_bfloat16>;
  if (dtype == turbo::kFloat16) return turbo::latent_merge_kernel<__half>;
  TVM_FFI_CHECK(dtype == turbo::kFloat32, TypeError)
      << "output: of " << dtype << ", not of bf16, fp16 or fp32";
  return turbo::latent_merge_kernel<float>;
}

// See LatentParams, LatentMergeParams and latent_decode.py for shapes and
// dtypes.
void latent_decode(TensorView query, Optional<TensorView> query_rope,
                   TensorView kv_cache, TensorView block_table,
                   TensorView seq_lens, TensorView partial,
                   TensorView partial_lse, Optional<TensorView> query_start_loc,
                   TensorView output, TensorView lse,
                   Optional<TensorView> rotated_mean, int64_t num_seqs,
                   int64_t query_len, double scale, bool enable_pdl) {
  const LatentParams p =
      params_of(query, query_rope, kv_cache, block_table, seq_lens, partial,
                partial_lse, query_start_loc, num_seqs, query_len, scale);
  const LatentMergeParams m =
      merge_params_of(p, query, output, lse, rotated_mean);
  const MergeKernel merge = merge_of(output.dtype());
  const DLDevice device = kv_cache.device();
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  turbo::launch(Decode::kKernel, turbo::blocks_of<Decode>(device.device_id),
                Kernel::kThreads, Decode::kSharedBytes, device, p, enable_pdl);
  const dim3 grid(p.query_len * p.num_heads, p.num_seqs);
  turbo::launch(merge, grid, turbo::kMergeThreads, 0, device, m, enable_pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(latent_decode, latent_decode);
