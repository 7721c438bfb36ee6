# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention to the tokens of a tail: a part of the merge.

``formats.tail`` has the layout of rows.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.triton.offset import offset_row
from vllm.v1.attention.ops.turbo.triton.soft_cap import capped
from vllm.v1.attention.ops.turbo.triton.tail_kernel import GROUP


@triton.jit
def _load_codes(
    ptr,  # [..., 1, 1] uint8 pointers to planes of codes
    row,  # of that shape
    group,  # [..., G, 1]
    mask,  # [..., G, 1]
    HEAD_SIZE: tl.constexpr,
):
    """Codes of rows, fp32 [..., G, 16]."""
    p_code = (ptr + row * HEAD_SIZE + group * GROUP).to(tl.pointer_type(tl.int8))
    p_code += tl.arange(0, GROUP)
    return tl.load(p_code, mask=mask, other=0).to(tl.float32)


@triton.jit
def _load_row_scales(
    ptr,  # [..., 1] uint8 pointers to planes of scales
    row,  # of that shape
    group,  # [..., G]
    mask,  # [..., G]
    HEAD_SIZE: tl.constexpr,
):
    """Scales of rows, fp32 [..., G]."""
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // GROUP
    p_scale = ptr.to(tl.pointer_type(tl.bfloat16)) + row * NUM_GROUPS + group
    return tl.load(p_scale, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _missing_scores(
    query,  # [R, G, 16] fp32
    offset_ptr,  # [G, H, D] fp32
    kv_head,  # [R]
    offset_rows,  # [R], the offset's rows of the keys
    mask,  # [R, G, 1]
    coordinate,  # [1, G, 16]
    score_factor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """The part that scores of rows lack for keys with an offset, fp32 [R]."""
    head_row = offset_rows * NUM_KV_HEADS + kv_head
    p_offset = offset_ptr + (head_row * HEAD_SIZE)[:, None, None] + coordinate
    offset = tl.load(p_offset, mask=mask, other=0.0)
    return score_factor * tl.sum(tl.sum(query * offset, 2), 1)


@triton.jit
def attend_to_tail(
    query_row_ptr,  # [R] pointers to queries that are not rotated
    page_ptr,  # [R] uint8 pointers to the pages of the rows' sequences and KV heads
    planes,  # ``merge_kernel.TailPlanes``
    offset_ptr,  # [G, H, D] fp32, taken off the tail's keys, or None
    kv_head,  # [R]
    first_position,  # [R], position of the tail's first token
    num_tokens,  # [R], tokens of the tail
    scoring,  # ``merge_kernel.ScoreFactors``
    num_offsets,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    SIZES: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attend from rows to the tokens of their tails, by an online softmax.

    Returns:
        The largest score, -inf without tokens; the sum of the weights relative to it;
        the weighted sum of the values: fp32 [R], [R] and [R, D of V].

    """
    HEAD_SIZE: tl.constexpr = SIZES.head_size
    HEAD_SIZE_V: tl.constexpr = SIZES.head_size_v
    BLOCK_D: tl.constexpr = SIZES.block_d
    BLOCK_D_V: tl.constexpr = SIZES.block_d_v
    BLOCK_G: tl.constexpr = BLOCK_D // GROUP
    BLOCK_G_V: tl.constexpr = BLOCK_D_V // GROUP
    LARGER: tl.constexpr = BLOCK_D if BLOCK_D > BLOCK_D_V else BLOCK_D_V
    BLOCK_N: tl.constexpr = 512 // LARGER if LARGER < 512 else 1
    g = tl.arange(0, BLOCK_G)
    coordinate = (g * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    coordinate = coordinate[None, :, :]  # [1, G, 16]
    group_mask = g < HEAD_SIZE // GROUP
    query_mask = ((num_tokens > 0)[:, None] & group_mask[None, :])[:, :, None]
    p_query = query_row_ptr[:, None, None] + coordinate
    query = tl.load(p_query, mask=query_mask, other=0.0).to(tl.float32)
    if offset_ptr is not None:
        # A tail is not longer than a segment, so its tokens are of two rows at most.
        first_row = offset_row(first_position, num_offsets, OFFSET_SEGMENT)
        missing = _missing_scores(
            query,
            offset_ptr,
            kv_head,
            first_row,
            query_mask,
            coordinate,
            scoring.factor,
            NUM_KV_HEADS,
            HEAD_SIZE,
        )
        next_missing = _missing_scores(
            query,
            offset_ptr,
            kv_head,
            tl.minimum(first_row + 1, num_offsets - 1),
            query_mask,
            coordinate,
            scoring.factor,
            NUM_KV_HEADS,
            HEAD_SIZE,
        )
        num_first = OFFSET_SEGMENT - first_position % OFFSET_SEGMENT
        num_first = tl.where(first_position > 0, num_first, 1)
    largest = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    output = tl.zeros([BLOCK_R, BLOCK_G_V, GROUP], tl.float32)
    page_ptr = page_ptr[:, None, None]
    for start in tl.range(0, tl.max(num_tokens, 0), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n[None, :] < num_tokens[:, None]  # [R, N]
        row = ((first_position[:, None] + n[None, :]) % num_rows)[:, :, None]
        mask = inside[:, :, None] & group_mask[None, None, :]  # [R, N, G]
        group = g[None, None, :]
        code = _load_codes(
            page_ptr[:, :, :, None],
            row[:, :, :, None],
            group[:, :, :, None],
            mask[:, :, :, None],
            HEAD_SIZE,
        )
        scale = _load_row_scales(
            page_ptr + planes.key_scale, row, group, mask, HEAD_SIZE
        )
        product = tl.sum(code * query[:, None, :, :], 3) * scale
        score = scoring.factor * tl.sum(product, 2)
        if offset_ptr is not None:
            is_first = n[None, :] < num_first[:, None]
            score += tl.where(is_first, missing[:, None], next_missing[:, None])
        if scoring.soft_cap is not None:
            score = capped(score, scoring.soft_cap)
        score = tl.where(inside, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        rescale = tl.exp2(largest - base)
        weight = tl.exp2(score - base[:, None])
        total = total * rescale + tl.sum(weight, 1)
        largest = new_largest
        if HEAD_SIZE_V != HEAD_SIZE:
            g_v = tl.arange(0, BLOCK_G_V)
            mask = inside[:, :, None] & (g_v < HEAD_SIZE_V // GROUP)[None, None, :]
            group = g_v[None, None, :]
        code = _load_codes(
            (page_ptr + planes.value)[:, :, :, None],
            row[:, :, :, None],
            group[:, :, :, None],
            mask[:, :, :, None],
            HEAD_SIZE_V,
        )
        scale = _load_row_scales(
            page_ptr + planes.value_scale, row, group, mask, HEAD_SIZE_V
        )
        weighted = (scale * weight[:, :, None])[:, :, :, None] * code
        output = output * rescale[:, None, None] + tl.sum(weighted, 1)
    return largest, total, tl.reshape(output, [BLOCK_R, BLOCK_D_V])
