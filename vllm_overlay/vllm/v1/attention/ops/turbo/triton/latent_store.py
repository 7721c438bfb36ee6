# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""Store for MLA: one launch rotates and quantises latents, and rounds rotary keys to
8 bits.
"""

from functools import cache

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.latent import format as latent_fmt
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall
from vllm.v1.attention.ops.turbo.triton.codec import scale_value
from vllm.v1.attention.ops.turbo.triton.encode import encode_vectors
from vllm.v1.attention.ops.turbo.triton.pages import tile_pointers
from vllm.v1.attention.ops.turbo.triton.scales import round_to_integer, scale_floor
from vllm.v1.attention.ops.turbo.triton.store import SMALL_BATCH, StoreTuning
from vllm.v1.attention.ops.turbo.triton.trellis import reciprocal_of

_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_GROUP = tl.constexpr(fmt.SCALE_GROUP)
_SCALE_CODE_MAX = tl.constexpr(fmt.SCALE_CODE_MAX)
_ROPE_CODE_MAX = tl.constexpr(float(latent_fmt.ROPE_CODE_MAX))
_INVERSE_CODE_MAX = tl.constexpr(1 / latent_fmt.ROPE_CODE_MAX)


@triton.jit
def _smallest_scale(
    largest,  # fp32, of any shape
):
    """Codes of the smallest scales that hold these magnitudes, int32.

    They equal those of ``reference.latent.quantize_rope``.
    """
    # The quotient is rounded, so the floor's code may be off by one: the smallest scale
    # has a code from one below it to two above it.
    code = scale_floor(largest * _INVERSE_CODE_MAX) - 1
    code = tl.minimum(tl.maximum(code, 0), _SCALE_CODE_MAX)
    for _ in tl.static_range(3):
        holds = scale_value(code).to(tl.float32) * _ROPE_CODE_MAX >= largest
        code = tl.where(holds, code, tl.minimum(code + 1, _SCALE_CODE_MAX))
    return code


@triton.jit
def _encode_rope(
    x_ptr,  # [T] pointers to vectors
    tile_ptr,  # [T] uint8 pointers to tiles
    token,  # [T] index in the tile
    token_mask,  # [T]
    ROPE: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
):
    """Round rotary keys to int8, with a scale for each group."""
    group = tl.arange(0, ROPE // _GROUP)
    r = group[None, :, None] * _GROUP + tl.arange(0, _GROUP)[None, None, :]
    mask = token_mask[:, None, None]
    x = tl.load(x_ptr[:, None, None] + r, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -_FP32_MAX), _FP32_MAX)
    scale_code = _smallest_scale(tl.max(tl.abs(x), 2))  # [T, groups]
    reciprocal = reciprocal_of(scale_value(scale_code).to(tl.float32))
    code = x * reciprocal[:, :, None]
    code = tl.minimum(tl.maximum(code, -_ROPE_CODE_MAX), _ROPE_CODE_MAX)
    code = round_to_integer(code).to(tl.int32)
    row_ptr = tile_ptr + (ROPE_OFFSET + token * ROPE)
    tl.store(row_ptr[:, None, None] + r, code.to(tl.uint8), mask=mask)
    row_ptr = tile_ptr + (SCALES_OFFSET + token * (ROPE // _GROUP))
    p_scale = row_ptr[:, None] + group[None, :]
    tl.store(p_scale, scale_code.to(tl.uint8), mask=token_mask[:, None])


@triton.jit(do_not_specialize=["num_tokens", "block_size"])
def _store_latent_kernel(
    kv_c_ptr,  # [T, L]
    k_pe_ptr,  # [T, R], or None
    kv_cache_ptr,  # [num_blocks, N, C] uint8
    slot_mapping_ptr,  # [T]
    matrix_ptr,  # [L, L] fp16, from ``encoder_matrix``
    scratch_ptr,  # [T, L] fp32, or None
    mean_ptr,  # [L] fp32, taken off latents, or None
    num_tokens,
    inverse_sqrt_l,
    block_size,
    stride_kv_c_token,
    stride_k_pe_token,
    stride_cache_block,
    BITS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    ROPE_SCALES_OFFSET: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Program (i, j): latents (j = 0) or rotary keys of tokens [i * BLOCK_T, ...)."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping_ptr + t, mask=t < num_tokens, other=-1).to(tl.int64)
    mask = slot >= 0
    slot = tl.where(mask, slot, 0)
    page_ptr = kv_cache_ptr + slot // block_size * stride_cache_block
    tile_ptr, token = tile_pointers(page_ptr, slot % block_size, TILE_BYTES)
    if tl.program_id(1) == 0:
        row_ptr = None if scratch_ptr is None else scratch_ptr + t * RANK
        offset_ptr = None if mean_ptr is None else mean_ptr + t * 0
        # Three-bit codes need either a step for each code, or the scratch.
        OWN_FOLD: tl.constexpr = FOLD if BITS == 4 or scratch_ptr is not None else 1
        encode_vectors(
            kv_c_ptr + t * stride_kv_c_token,
            tile_ptr,
            token,
            mask,
            matrix_ptr,
            row_ptr,
            inverse_sqrt_l,
            True,
            BITS,
            0,
            SCALES_OFFSET,
            SCALE_WORDS,
            RANK,
            RANK,
            RANK // 8,
            OWN_FOLD,
            offset_ptr,
            IS_LATENT=True,
        )
    elif k_pe_ptr is not None:
        _encode_rope(
            k_pe_ptr + t * stride_k_pe_token,
            tile_ptr,
            token,
            mask,
            ROPE,
            ROPE_OFFSET,
            ROPE_SCALES_OFFSET,
        )


@cache
def encoder_matrix(rank: int, device: torch.device) -> torch.Tensor:
    """The rotation with its columns in the encoder's order.

    A step of the encoder then loads contiguous columns.

    Args:
        rank: L, coordinates of a latent.
        device: The device that keeps it.

    Returns:
        (L, L) contiguous fp16, entries +-1: column e * L / 16 + g is coordinate
        16 * g + e of a rotated latent.

    """
    matrix = rotation_matrix(rank, torch.device("cpu"))
    by_group = matrix.view(rank, rank // fmt.SCALE_GROUP, fmt.SCALE_GROUP)
    return by_group.transpose(1, 2).reshape(rank, rank).to(device)


def default_tuning(rank: int) -> StoreTuning:
    """The launch parameters for a rank.

    They spill few registers: with half as many warps, a latent of 512 spills eight
    times as many.
    """
    return StoreTuning(block_t=16, fold=2 if rank <= 256 else 1, num_warps=8)


def store_sizes(layout: LatentFormat) -> list[int]:
    """Numbers of tokens that each have different launch parameters."""
    return [1, SMALL_BATCH + 1]


def store(call: LatentStoreCall) -> None:
    """A ``LatentStoreFn``."""
    kv_cache, slot_mapping, kv_c, k_pe, layout = call[:5]
    num_tokens, rank = slot_mapping.shape[0], layout.rank
    check_pages(kv_cache, layout)
    assert kv_c.shape[0] >= num_tokens and kv_c.shape[1] == rank, kv_c.shape
    assert kv_c.stride(1) == 1
    if layout.rope:
        assert k_pe is not None and k_pe.dtype == kv_c.dtype
        assert k_pe.shape[0] >= num_tokens and k_pe.shape[1] == layout.rope, k_pe.shape
        assert k_pe.stride(1) == 1
    else:
        k_pe = None
    if num_tokens == 0:
        return
    tuning = default_tuning(rank)
    scratch = None
    if num_tokens <= SMALL_BATCH and layout.bits == 3:
        shape = (num_tokens, rank)
        scratch = torch.empty(shape, dtype=torch.float32, device=kv_cache.device)
    grid = (triton.cdiv(num_tokens, tuning.block_t), 1 if k_pe is None else 2)
    _store_latent_kernel[grid](
        kv_c,
        k_pe,
        kv_cache,
        slot_mapping,
        encoder_matrix(rank, kv_cache.device),
        scratch,
        call.mean,
        num_tokens,
        inverse_sqrt(rank),
        kv_cache.shape[1],
        kv_c.stride(0),
        0 if k_pe is None else k_pe.stride(0),
        kv_cache.stride(0),
        BITS=layout.bits,
        SCALE_WORDS=tuple(layout.scale_words),
        ROPE_OFFSET=layout.rope_offset,
        SCALES_OFFSET=layout.scales_offset,
        ROPE_SCALES_OFFSET=layout.rope_scales_offset,
        TILE_BYTES=layout.tile_bytes,
        RANK=rank,
        ROPE=layout.rope,
        BLOCK_T=tuning.block_t,
        FOLD=tuning.fold,
        num_warps=tuning.num_warps,
        # A fused multiply-add would change the stored bytes.
        enable_fp_fusion=False,
    )
