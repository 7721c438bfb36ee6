# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plans a prefill on the host: cuts it into slices."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.planning.cuts import (
    batch_requests,
    plan_runs,
    plan_slices,
)
from vllm.v1.attention.ops.turbo.planning.prefill_plan import (
    CachedPiece,
    CachedRequests,
    PrefillPlan,
    PrefillSlice,
    RawTokens,
)
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape
from vllm.v1.attention.ops.turbo.planning.sliding_window import (
    LEAST_TOKENS,
    plan_window_slices,
)

# Bytes of the dequantised K and V of one piece, together.
PIECE_BYTES = 64 * 2**20
# Bytes of a slice's rotated queries; the output of a piece takes as many again.
ROW_BYTES = 64 * 2**20
# The largest head size that every version of FlashAttention takes.
FLASH_ATTN_MAX_HEAD_SIZE = 256
# Query tokens of a slice with larger heads. Their attention kernel takes memory for the
# LSE that grows with the square of the tokens: at most 8 MiB a KV head, with outputs.
_RAW_TOKENS = 2048


LocalLensFn: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class PrefillLimits(NamedTuple):
    """The bounds of a prefill's scratch.

    Attributes:
        slice_tokens: The most query tokens of a slice.
        piece_tokens: The most tokens that are dequantised at a time; under a sliding
            window, the most tokens that are attended to at a time.
        raw_tokens: The most query tokens of a slice that reads nothing from the cache;
            None for no limit.
        has_key_offset: Whether an offset was taken off the keys of some layer. Then a
            request's tokens in a piece are of one segment, so that their scores lack
            the same offset.

    """

    slice_tokens: int
    piece_tokens: int
    raw_tokens: int | None = None
    has_key_offset: bool = False


def prefill_limits(
    shape: LayerShape,
    stored: bool,
    has_key_offset: bool = False,
    sliding_window: int | None = None,
) -> PrefillLimits:
    """The tokens that fit in ROW_BYTES and PIECE_BYTES, at least one.

    Under a sliding window there are no rotated queries. A piece then has room for the
    tokens that one query token sees, and for ``LEAST_TOKENS`` more.

    Args:
        shape: The shape of the layer; if several shapes share a plan, the one with most
            query heads.
        stored: Whether a slice's own tokens are read from the cache: as one piece.
        has_key_offset: Whether an offset was taken off the keys of some layer.
        sliding_window: The most tokens that a query token sees; None for no limit.

    """
    head_bytes = shape.head_size * shape.dtype.itemsize
    slice_tokens = max(1, ROW_BYTES // (shape.num_heads * head_bytes))
    piece_tokens = max(1, PIECE_BYTES // (2 * shape.num_kv_heads * head_bytes))
    if sliding_window is not None:
        least = sliding_window - 1 + LEAST_TOKENS
        return PrefillLimits(0, max(piece_tokens, least), None, has_key_offset)
    if stored:
        slice_tokens = min(slice_tokens, piece_tokens)
    raw_tokens = None
    if shape.head_size > FLASH_ATTN_MAX_HEAD_SIZE:
        slice_tokens, raw_tokens = min(slice_tokens, _RAW_TOKENS), _RAW_TOKENS
    return PrefillLimits(slice_tokens, piece_tokens, raw_tokens, has_key_offset)


def _plan_piece(
    starts: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The piece of ``plan_context`` between these positions, (R,) each."""
    cu_lens = torch.zeros(len(starts) + 1, dtype=torch.int32)
    torch.cumsum(ends - starts, 0, out=cu_lens[1:])
    return starts.to(torch.int32), cu_lens


def plan_context(
    context_lens: torch.Tensor, tokens_per_piece: int, has_key_offset: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the requests' contexts, laid end to end, into pieces.

    With an offset of K a piece has the same segment of each request instead. The
    contexts of several requests must then fit in one piece.

    Args:
        context_lens: (R,) int32 on the host.
        tokens_per_piece: Tokens of a piece, over all requests.
        has_key_offset: Whether an offset was taken off the keys of some layer.

    Returns:
        For each piece, on the host: the first position of each request's tokens in it,
        (R,) int32, and cumulative lengths, (R + 1,) int32.

    """
    if has_key_offset:
        size, longest = interface.OFFSET_SEGMENT, int(context_lens.max())
        cuts = []
        for segment in range(0, longest, size):
            cuts += range(segment, min(segment + size, longest), tokens_per_piece)
        cuts.append(longest)
        return [
            _plan_piece(context_lens.clamp(max=first), context_lens.clamp(max=last))
            for first, last in zip(cuts, cuts[1:])
        ]
    begins = context_lens.cumsum(0) - context_lens
    total = int(context_lens.sum())
    pieces = []
    for first in range(0, total, tokens_per_piece):
        starts = torch.minimum((first - begins).clamp(min=0), context_lens)
        ends = (first + tokens_per_piece - begins).clamp(min=0)
        pieces.append(_plan_piece(starts, torch.minimum(ends, context_lens)))
    return pieces


def cut_at_segments(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut requests where their query tokens enter the next segment.

    Each part is a request whose context is the tokens before it, as if the prompt came
    in chunks. Where all tokens are read from the cache, results do not change.

    Args:
        query_start_loc: (R + 1,) int32 on the host, from zero.
        seq_lens: (R,) int32 on the host.

    Returns:
        On the host, for the C parts: ``query_start_loc``, (C + 1,) int32, ``seq_lens``,
        (C,) int32, and the index of each part's request, (C,) int64.

    """
    size = interface.OFFSET_SEGMENT
    starts, lens, rows = [0], [], []
    bounds = query_start_loc.tolist()
    for row, (end, seq_len) in enumerate(zip(bounds[1:], seq_lens.tolist())):
        first = seq_len - (end - bounds[row])
        cuts = [*range((first // size + 1) * size, seq_len, size), seq_len]
        starts += [end - (seq_len - cut) for cut in cuts]
        lens += cuts
        rows += [row] * len(cuts)
    return (
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(rows),
    )


def _plan_requests(
    starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    stored: bool,
    limits: PrefillLimits,
    query_start_loc: torch.Tensor | None,
    device: torch.device,
) -> CachedRequests:
    """Plan requests of a slice that are dequantised together.

    Args:
        starts: (R + 1,) int32 on the host, where the requests' tokens begin in the
            slice.
        context_lens: (R,) int32 on the host.
        block_table: (R, max_blocks) int32 on the device.
        stored: Whether query tokens are also read from the cache.
        limits: The bounds of the layers' scratch.
        query_start_loc: ``starts`` on the device if it begins at zero; else None.
        device: The kernels' device.

    """
    tokens = slice(int(starts[0]), int(starts[-1]))
    if query_start_loc is None:
        query_start_loc = async_tensor_h2d(starts - tokens.start, device)
    max_query_len = int(starts.diff().max())
    own = None
    if stored:
        first_positions = async_tensor_h2d(context_lens, device)
        num_tokens = tokens.stop - tokens.start
        own = CachedPiece(first_positions, query_start_loc, max_query_len, num_tokens)
    context = [
        CachedPiece(
            async_tensor_h2d(firsts, device),
            async_tensor_h2d(cu_lens, device),
            int(cu_lens.diff().max()),
            int(cu_lens[-1]),
        )
        for firsts, cu_lens in plan_context(
            context_lens, limits.piece_tokens, limits.has_key_offset
        )
    ]
    return CachedRequests(
        tokens, query_start_loc, max_query_len, block_table, own, context
    )


def _plan_slice(
    tokens: slice,
    bounds: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    stored: bool,
    limits: PrefillLimits,
    device: torch.device,
    local_lens: LocalLensFn | None,
) -> PrefillSlice:
    """Plan one of the slices of ``plan_prefill``.

    Args:
        tokens: The range of the slice's query tokens among the prefills'.
        bounds: (R + 1,) int32 on the host, where its requests begin.
        context_lens: (R,) int32 on the host, without query tokens.
        block_table: (R, max_blocks) int32 on the device.
        stored: Whether query tokens are also read from the cache.
        limits: The bounds of the layers' scratch.
        device: The kernels' device.
        local_lens: As in ``plan_prefill``.

    """
    starts = bounds.clamp(tokens.start, tokens.stop)
    query_start_loc = async_tensor_h2d(starts - tokens.start, device)
    raw = None
    if stored:
        context_lens = context_lens + (starts - bounds)[:-1]
    else:
        ends = bounds.clamp(max=tokens.stop) - bounds[0]
        is_whole = int(bounds[0]) == tokens.start
        raw = RawTokens(
            query_start_loc if is_whole else async_tensor_h2d(ends, device),
            int(ends.diff().max()),
            int(ends[-1]),
        )
    # From whole lengths: all ranks must agree on it, because they wait for each other.
    is_shared = local_lens is not None and bool(context_lens.any())
    if local_lens is not None:
        context_lens = local_lens(context_lens)
    ranges = []
    if stored or context_lens.any():
        ranges = batch_requests(context_lens.tolist(), limits.piece_tokens)
    return PrefillSlice(
        tokens,
        query_start_loc,
        int(starts.diff().max()),
        raw,
        [
            _plan_requests(
                starts[first : last + 1] - tokens.start,
                context_lens[first:last],
                block_table[first:last],
                stored,
                limits,
                query_start_loc if len(ranges) == 1 else None,
                device,
            )
            for first, last in ranges
        ],
        is_shared,
    )


def plan_prefill(
    query_start_loc_cpu: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    block_table: torch.Tensor,
    stored: bool,
    limits: PrefillLimits | None,
    device: torch.device,
    window_tokens: Mapping[int, int] | None = None,
    local_lens: LocalLensFn | None = None,
) -> PrefillPlan:
    """Plan the prefill of a batch on the host, without waiting for the device.

    Args:
        query_start_loc_cpu: (R + 1,) int32 on the host, from zero.
        seq_lens_cpu: (R,) int32 on the host, exact.
        block_table: (R, max_blocks) int32 on the device.
        stored: Whether query tokens are also read from the cache.
        limits: The bounds of the scratch of layers without a sliding window; None if
            all have one.
        device: The kernels' device.
        window_tokens: ``PrefillLimits.piece_tokens`` by sliding window; None for no
            sliding windows.
        local_lens: Where ranks share the context, a function from numbers of first
            tokens, (R,) int32 on the host, to this rank's share of them, likewise; None
            where they do not.

    """
    window_slices = {
        window: plan_window_slices(
            query_start_loc_cpu,
            seq_lens_cpu,
            block_table,
            stored,
            window,
            max_tokens,
            device,
        )
        for window, max_tokens in (window_tokens or {}).items()
    }
    batch = (block_table, query_start_loc_cpu, seq_lens_cpu, window_slices)
    if limits is None:
        return PrefillPlan([], *batch)
    if stored and limits.has_key_offset:
        query_start_loc_cpu, seq_lens_cpu, rows = cut_at_segments(
            query_start_loc_cpu, seq_lens_cpu
        )
        block_table = block_table.index_select(0, async_tensor_h2d(rows, device))
    query_lens = query_start_loc_cpu.diff()
    context_lens = seq_lens_cpu - query_lens
    runs = [(0, len(query_lens))]
    if not stored:
        runs = plan_runs(query_lens.tolist(), limits.piece_tokens)
    slices = []
    for first, last in runs:
        starts = query_start_loc_cpu[first : last + 1]
        max_tokens = limits.slice_tokens
        if not stored and not context_lens[first:last].any():
            # Without context no scratch holds rotated queries.
            max_tokens = limits.raw_tokens or int(starts[-1])
        slices += [
            _plan_slice(
                tokens,
                starts[requests.start : requests.stop + 1],
                context_lens[first:last][requests],
                block_table[first:last][requests],
                stored,
                limits,
                device,
                local_lens,
            )
            for tokens, requests in plan_slices(starts, max_tokens)
        ]
    return PrefillPlan(slices, *batch)
