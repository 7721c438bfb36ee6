# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""Gather for MLA: dequantises cached context for a prefill, and rotates it back."""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.latent.interface import GatherCall
from vllm.v1.attention.ops.turbo.triton.latent_codec import (
    ROPE_UNIT,
    latent_layout,
    load_latents,
    load_ropes,
)
from vllm.v1.attention.ops.turbo.triton.pages import (
    TILE,
    block_divisor,
    divide_by_block,
)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "tiles_per_block",
        "block_shift",
        "block_multiplier",
        "stride_block_table",
    ],
    # These are slices of one tensor.
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "cu_seq_lens_ptr",
        "token_to_seq_ptr",
        "seq_starts_ptr",
    ],
)
def _gather_latent_kernel(
    kv_cache_ptr,  # [num_blocks, N, C] uint8
    output_ptr,  # [T, L + R]
    matrix_ptr,  # [L, L] fp16, entries +-1, the inverse rotation
    block_table_ptr,  # [B, max_blocks]
    cu_seq_lens_ptr,  # [B + 1]
    token_to_seq_ptr,  # [T]
    seq_starts_ptr,  # [B], or None
    mean_ptr,  # [L] fp32, added to latents, or None
    num_tokens,
    inverse_sqrt_l,
    stride_cache_block: tl.int64,
    stride_output_token,
    stride_block_table,
    tiles_per_block,
    block_shift,
    block_multiplier,
    LAYOUT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Program i: tokens [i * BLOCK_T, ...)."""
    RANK: tl.constexpr = LAYOUT.rank
    CHUNK: tl.constexpr = LAYOUT.chunk
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < num_tokens
    t = tl.minimum(t, num_tokens - 1)
    seq = tl.load(token_to_seq_ptr + t).to(tl.int64)
    position = t - tl.load(cu_seq_lens_ptr + seq)
    if seq_starts_ptr is not None:
        position += tl.load(seq_starts_ptr + seq)
    place, tile = divide_by_block(
        position // TILE, tiles_per_block, block_shift, block_multiplier
    )
    p_block = block_table_ptr + seq * stride_block_table + place
    block = tl.load(p_block).to(tl.int64)
    tile_ptr = kv_cache_ptr + block * stride_cache_block + tile * LAYOUT.tile_bytes
    token = position % TILE
    output_row = output_ptr + t.to(tl.int64) * stride_output_token
    dtype = output_ptr.dtype.element_ty

    latents = ()
    for i in tl.static_range(RANK // CHUNK):
        latents = latents + (load_latents(tile_ptr, token, i, LAYOUT),)
    k = tl.arange(0, CHUNK)
    # A pipeline would hold more than one stage of the matrix in shared memory.
    for start in tl.range(0, RANK, BLOCK_C, num_stages=1):
        c = start + tl.arange(0, BLOCK_C)
        rotated = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for i in tl.static_range(RANK // CHUNK):
            p_matrix = matrix_ptr + (k + i * CHUNK)[:, None] * RANK + c[None, :]
            rotated = tl.dot(latents[i], tl.load(p_matrix), rotated)
        p_output = output_row[:, None] + c[None, :]
        rotated *= inverse_sqrt_l
        if mean_ptr is not None:
            rotated += tl.load(mean_ptr + c)[None, :]
        tl.store(p_output, rotated.to(dtype), mask=inside[:, None])
    if LAYOUT.rope > 0:
        rope = load_ropes(tile_ptr, token, LAYOUT)
        rope = (rope.to(tl.float32) * ROPE_UNIT).to(dtype)
        r = tl.arange(0, LAYOUT.rope)[None, :]
        tl.store(output_row[:, None] + (r + RANK), rope, mask=inside[:, None])


def gather(call: GatherCall) -> None:
    """A ``GatherFn``."""
    kv_cache, output, block_table, layout = call[:4]
    num_tokens = call.num_tokens
    check_pages(kv_cache, layout)
    assert output.shape[0] >= num_tokens and output.shape[1] == layout.head_size
    assert output.stride(1) == block_table.stride(1) == 1
    if num_tokens == 0:
        return
    # As many tokens as fit in shared memory: each program reads the whole matrix.
    block_t = 64
    _gather_latent_kernel[(triton.cdiv(num_tokens, block_t),)](
        kv_cache,
        output,
        rotation_matrix(layout.rank, kv_cache.device, inverse=True),
        block_table,
        call.cu_seq_lens,
        call.token_to_seq,
        call.seq_starts,
        call.mean,
        num_tokens,
        inverse_sqrt(layout.rank),
        kv_cache.stride(0),
        output.stride(0),
        block_table.stride(0),
        **block_divisor(kv_cache.shape[1]),
        LAYOUT=latent_layout(layout),
        BLOCK_T=block_t,
        BLOCK_C=64,
        num_warps=8,
    )
