# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""References of attention, comparisons with them, and calls of kernels that attend."""

import math
from collections.abc import Callable
from typing import Any

import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    AttentionCall,
    DecodeBatch,
    OffsetScores,
    Partials,
    RawTokens,
    RotatedQuery,
    Scoring,
    Tail,
)
from vllm.v1.attention.ops.turbo.reference.levels import power_of_two


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    rotated: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attention in PyTorch in ``dtype``, on request in rotated space."""
    if not rotated:
        q, k, v = (x.to(dtype) for x in (query, key, value))
        return reference.attention(q, k, v, scale, **options)[0]
    of_keys, of_values = (
        rotation_matrix(size, query.device, torch.float32) * size**-0.5
        for size in (query.shape[2], value.shape[2])
    )
    q, k = ((x.float() @ of_keys).to(dtype) for x in (query, key))
    v = (value.float() @ of_values).to(dtype)
    output, _ = reference.attention(q, k, v, scale, **options)
    return (output.float() @ of_values.T).to(dtype)


def attention_of_rounded(
    rounded: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_raw: int,
    scale: float,
    offset: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Causal attention from a rounded q to all tokens but the raw ones.

    Args:
        rounded: (Q, Hq, D) fp32, rounded queries of the last Q positions.
        query: (Q, Hq, D), the queries without rounding.
        key: (T, H, D) fp32.
        value: (T, H, D) fp32.
        num_raw: Number of tokens, at the end of T, whose scores come from
            ``query``.
        scale: Softmax scale.
        offset: (T, H, D) fp32, the part of the keys whose scores come from ``query``.
        options: Arguments of ``reference.attention``.

    """
    if offset is None:
        offset = torch.zeros_like(key)
    without = key - offset
    both, keys = split_keys(rounded, query, without, num_raw, offset)
    return reference.attention(both, keys, value, scale, **options)[0]


def split_keys(
    rounded: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    num_raw: int,
    offset: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys whose scores come from a rounded q and from q itself.

    Both are concatenated along D, so that each query meets its part of the keys alone.
    The arguments are those of ``attention_of_rounded``, but ``key`` is without the
    offset, which is zero for raw tokens.
    """
    keys = torch.cat([key, offset], -1)
    raw = slice(len(keys) - num_raw, len(keys))
    keys[raw] = keys[raw].roll(key.shape[-1], -1)
    return torch.cat([rounded, query.float()], -1), keys


def assert_within(
    found: torch.Tensor,
    expected: torch.Tensor,
    allowed: float | torch.Tensor,
    name: str = "",
) -> None:
    """Check that numbers differ by no more than is allowed.

    The message of a failure names the worst place.

    Args:
        found: Numbers, of any shape and dtype.
        expected: Numbers of the same shape. A NaN in either one fails.
        allowed: The largest error: one number, or a tensor that broadcasts to the
            shape.
        name: Name of the numbers in the message.

    """
    error = (found.double() - expected.double()).abs()
    # Negated, so that a NaN counts as wrong.
    wrong = ~(error <= allowed)
    if not wrong.any():
        return
    excess = (error / torch.as_tensor(allowed).to(error)).nan_to_num(nan=math.inf)
    worst = excess.where(wrong, -1.0).argmax()
    place = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
    limit = torch.as_tensor(allowed).expand(error.shape)[place].item()
    raise AssertionError(
        f"{name or 'numbers'}: {wrong.sum()} of {wrong.numel()} differ by more than "
        f"is allowed, {found.isnan().sum()} are NaN; at {place} is "
        f"{found[place].item():.6g}, expected {expected[place].item():.6g}, error "
        f"{error[place].item():.3g}, allowed {limit:.3g}"
    )


def assert_by_2x_rule(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    rotated: bool = False,
    target: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Compare one sequence's output to attention in PyTorch.

    The error against attention in fp32 may be twice the error of attention in the
    model's dtype, which is computed in rotated space if ``rotated``. Another 2**-11
    of the largest output is allowed, because values are decoded in fp16 for any
    dtype.

    Args:
        output: (Q, Hq, D), outputs of the last Q positions.
        query: (Q, Hq, D).
        key: (T, H, D) fp32, the dequantised keys.
        value: (T, H, D) fp32, the dequantised values.
        scale: Softmax scale.
        dtype: The model's dtype.
        rotated: Whether q, K, V and output are rounded to the dtype in rotated space.
        target: (Q, Hq, D) fp32, the numbers to compare to; None: fp32 attention from
            ``query``. The allowed error does not depend on it.
        options: Arguments of ``reference.attention``.

    """
    expected, _ = reference.attention(query.float(), key, value, scale, **options)
    plain = plain_attention(query, key, value, scale, dtype, rotated, **options)
    largest = expected.abs().max().item()
    allowed = 2 * (plain.float() - expected).abs().max().item()
    if target is not None:
        expected = target
    allowed += 2**-11 * largest
    assert_within(output, expected, allowed, "(query, head, coordinate)")


def assert_by_rounded_weights(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compare one sequence's output to attention in fp64.

    The error may be twice the error of attention with weights, values and outputs in
    ``dtype``. This suits scores of any size. The arguments are those of
    ``assert_by_2x_rule``, with queries and keys of any head size.
    """
    group = query.shape[1] // key.shape[1]
    keys = key.double().repeat_interleave(group, 1)
    values = value.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,thd->hqt", query.double(), keys) * scale
    indices = torch.arange(len(key), device=key.device)
    last = indices[-len(query) :, None]
    hidden = indices > last
    if sliding_window is not None:
        hidden |= indices <= last - sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        # Sinks count as one more token, whose value is zero.
        extra = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, extra], -1)
        values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, 1))
    weights = scores.softmax(-1)
    target = torch.einsum("hqt,thd->qhd", weights, values)
    plain = torch.einsum("hqt,thd->qhd", weights.to(dtype), values.to(dtype))
    allowed = 2 * (plain.double() - target).abs().max().item()
    allowed += 2**-11 * target.abs().max().item()
    assert_within(output, target, allowed, "(query, head, coordinate)")


def check_request(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    num_raw: int | None = None,
    is_rounded: bool = False,
    offset: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Compare one request's output to attention by the 2x rule, in rotated space.

    Args:
        output: See ``assert_by_2x_rule``.
        query: Queries, without rotation and rounding.
        key: The dequantised keys.
        value: The dequantised values.
        scale: Softmax scale.
        dtype: The model's dtype.
        num_raw: The raw tokens of a decode, whose scores come from q as it is;
            other scores come from the rotated q. None: the request is prefilled.
        is_rounded: Whether the rotated q is rounded to int8.
        offset: See ``attention_of_rounded``.
        options: Arguments of ``reference.attention``.

    """
    target = None
    if num_raw is not None:
        rotated = reference.rotate(query)
        if is_rounded:
            rotated = reference.round_query(rotated)
        rounded = reference.inverse_rotate(rotated)
        target = attention_of_rounded(
            rounded, query, key, value, num_raw, scale, offset, **options
        )
    assert_by_2x_rule(output, query, key, value, scale, dtype, True, target, **options)


def rotate_query(query: torch.Tensor, layout: TurboFormat) -> RotatedQuery:
    """Queries (B, Hq, D) as a store kernel makes them for a scale of 1 / sqrt(D).

    PyTorch computes them, because Triton takes longer to compile or interpret a store
    than the kernel under test. Tests of the stores and of the backend cover queries
    that kernels rotate.

    The power of two of a row varies with the row's first number, so that neighbours
    differ. The powers that stores take, of the largest number, are nearly all the same.
    """
    rotated = reference.rotate(query.float())
    turns = (16 * rotated[..., 0].nan_to_num()).floor().remainder(4)
    exponents = torch.frexp(rotated.abs().amax(-1).nan_to_num()).exponent
    unit = power_of_two(exponents + turns.to(exponents))
    factor = query.shape[-1] ** -0.5 * math.log2(math.e) * layout.key_codebook.gain
    return RotatedQuery((rotated / unit[..., None]).half(), unit * factor)


def call_of(
    kv_cache: torch.Tensor,
    layout: TurboFormat,
    batch: DecodeBatch,
    output: torch.Tensor,
    raw: RawTokens | None = None,
    offset: OffsetScores | None = None,
    tail: Tail | None = None,
    lse: torch.Tensor | None = None,
    **scoring: Any,
) -> AttentionCall:
    """A call that takes its query and scale from the offset or the raw tokens.

    Args:
        kv_cache: See ``AttentionCall``.
        layout: The cache's format.
        batch: The sequences.
        output: (T, Hq, D), written.
        raw: The query tokens that are attended to as computed.
        offset: The scores that cached keys lack.
        tail: The newest cached tokens.
        lse: (B * Q, Hq), written.
        scoring: Fields of ``Scoring``; ``logits_soft_cap`` is another name of
            ``soft_cap``.

    """
    scoring.setdefault("soft_cap", scoring.pop("logits_soft_cap", None))
    given = offset or raw
    scale = 1.0 if given is None else given.scale
    if offset is not None:
        scoring["key_offset"] = offset.table
    query = None if given is None else given.query
    return AttentionCall(
        kv_cache,
        layout,
        batch,
        Scoring(scale, **scoring),
        output,
        query,
        raw,
        tail,
        lse,
    )


def merge_call(
    batch: DecodeBatch,
    output: torch.Tensor,
    num_kv_heads: int,
    raw: RawTokens | None = None,
    **call: Any,
) -> AttentionCall:
    """A call for the merge alone, which reads no pages: see ``call_of``."""
    no_pages = torch.empty(0, num_kv_heads, TILE_TOKENS, 1, dtype=torch.uint8)
    layout = TurboFormat.from_cache_dtype("turbo4", 128)
    return call_of(no_pages, layout, batch, output, raw, **call)


def attend_by(
    attend: Callable[..., None],
    query: RotatedQuery,
    kv_cache: torch.Tensor,
    layout: TurboFormat,
    batch: DecodeBatch,
    partials: Partials,
    *call: Any,
    **options: Any,
) -> None:
    """Call an ``AttentionFn``.

    Args:
        attend: The function.
        query: The rotated queries of the call's T tokens.
        kv_cache: See ``call_of``.
        layout: The cache's format.
        batch: The sequences.
        partials: Scratch; its size bounds the splits of a sequence.
        call: The further arguments of ``call_of``.
        options: Further options of the function and of ``call_of``.

    """
    own = {x: options.pop(x) for x in ("enable_pdl", "tuning") if x in options}
    attend(query, call_of(kv_cache, layout, batch, *call, **options), partials, **own)
