# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first run of a layer's kernels, in vLLM's profile run.

A driver loads a kernel at its first launch. It then allocates local memory for all
threads that the GPU can hold: 130 MiB on an H200 for 500 bytes a thread. The profile
run measures this memory only if it is allocated before the cache. With a first run
there, no request waits for Triton's compiler either.
"""

from functools import partial

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.formats.tail import TailFormat
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail
from vllm.v1.attention.ops.turbo.interface import (
    KeyOffset,
    QueryDirection,
    RotatedQuery,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.layer.forward import forward
from vllm.v1.attention.ops.turbo.layer.kernels import KernelSet
from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.planning.prefill import PrefillPlanner
from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan
from vllm.v1.attention.ops.turbo.planning.spans import find_spans
from vllm.v1.attention.ops.turbo.planning.step import StepPlan

# Cached tokens of decodes and extends.
_CONTEXT = 16
# Cached tokens of a prefill's piece: so many that FlashAttention splits them.
_PREFILL_CONTEXT = 1024
# Query tokens of a short prefill request.
_QUERY_LEN = 2
# Query tokens of the first prefill request. FlashAttention 3 has kernels for up to 64
# queries a KV head and for more, with a split and without one. It splits a prompt's own
# tokens from four tiles on.
_PREFILL_LENS = (_QUERY_LEN, 65, 641)
# The most queries of a thread block of FlashAttention. With one such block for each
# multiprocessor it splits nothing.
_FLASH_ATTN_QUERIES = 192


def small_step(
    runner: TurboRunner,
    block_size: int,
    device: torch.device,
    query_len: int,
    is_uniform: bool = True,
    extend_len: int = 0,
    prefill_len: int = _QUERY_LEN,
    to_outputs: bool = False,
) -> StepPlan:
    """A step with a decode, an extend and three prefills.

    The first prefill has cached tokens that are dequantised in several pieces, the
    second has a few, and the third has none.

    Args:
        runner: The runner of the layer.
        block_size: Tokens of a block.
        device: The kernels' device.
        query_len: Query tokens of the decode.
        is_uniform: Whether no request could have fewer.
        extend_len: Query tokens of the extend; 0 for no extend.
        prefill_len: Query tokens of the first prefill.
        to_outputs: Whether ``extend_outputs`` serves the extend, as if it were many.

    """
    extends: list[RequestSpan] = []
    query_lens, contexts = [query_len], [_CONTEXT]
    if extend_len:
        bounds = [query_len, query_len + extend_len]
        extends = RequestSpan.of_extends([(1, bounds)], device)
        query_lens.append(extend_len)
        contexts.append(_CONTEXT)
    first_prefill = len(query_lens)
    query_lens += [prefill_len, _QUERY_LEN, _QUERY_LEN]
    contexts += [2 * _PREFILL_CONTEXT, _CONTEXT, 0]
    seq_lens = [q + context for q, context in zip(query_lens, contexts)]
    width = cdiv(max(seq_lens), block_size)
    table = torch.arange(len(seq_lens) * width, dtype=torch.int32, device=device)
    # A request's blocks are consecutive, and so are its slots.
    slots = [
        row * width * block_size + position
        for row, (context, seq_len) in enumerate(zip(contexts, seq_lens))
        for position in range(context, seq_len)
    ]
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    starts = torch.tensor([0, *query_lens[first_prefill:]]).cumsum(0).int()
    decode_starts = torch.tensor([0, query_len], dtype=torch.int32)
    table = table.view(-1, width)
    limits = runner.prefill_limits
    window_tokens = {}
    window = runner.scoring.sliding_window
    if window is not None:
        window_tokens[window] = limits.piece_tokens
    limits = limits._replace(piece_tokens=min(limits.piece_tokens, _PREFILL_CONTEXT))
    ranges = {}
    if runner.has_spans:
        ranges[0] = [(contexts[first_prefill], seq_lens[first_prefill] - 1)]
    prefill = PrefillPlanner(
        runner.stored, None if window_tokens else limits, device, window_tokens
    ).plan(
        starts,
        lengths[first_prefill:],
        table[first_prefill:],
        find_spans(ranges, starts, lengths[first_prefill:]),
    )
    step = StepPlan(
        num_actual_tokens=len(slots),
        slot_mapping=torch.tensor(slots, device=device),
        seq_lens=lengths.to(device),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        block_table=table,
        num_decodes=1,
        num_decode_tokens=query_len,
        decode_query_len=query_len,
        decode_start_loc=None if is_uniform else decode_starts.to(device),
        extends=extends,
        prefill=prefill,
        mm_prefix_range=ranges or None,
    )
    planner = runner.planner
    if planner is not None:
        planner = planner._replace(extends_to_outputs=to_outputs)
        if to_outputs:
            # With a single multiprocessor one request is enough.
            planner = planner._replace(num_sms=1)
        step.plan_decodes([planner])
    return step


def steps(runner: TurboRunner, block_size: int, device: torch.device) -> list[StepPlan]:
    """Steps that together launch every kernel of attention that serving launches."""
    make = partial(small_step, runner, block_size, device)
    most = runner.max_query_len
    unsplit_len = cdiv(_FLASH_ATTN_QUERIES * runner.num_sms, runner.shape.num_heads)
    # The longest prefill of a step that also has a decode and two more prefills.
    longest = max(_QUERY_LEN, runner.max_num_tokens - 1 - 2 * _QUERY_LEN)
    prefill_lens = {min(length, longest) for length in (*_PREFILL_LENS, unsplit_len)}
    found = [make(1, prefill_len=length) for length in sorted(prefill_lens)]
    if most > 1:
        # Triton's kernels are compiled for one query token of each sequence, for
        # equally many, and for unequally many.
        found += [make(most), make(most, is_uniform=False)]
    if runner.max_extend_len > 0:
        # CUDA's kernels have an instance for few queries, and one for many.
        found += [make(1, extend_len=n) for n in sorted({1, runner.max_extend_len})]
    if runner.extends_to_outputs:
        group = runner.context_shape.num_queries_per_kv
        sizes = runner.layout, group, runner.max_extend_len
        lens = runner.entry_points.output_lens(*sizes)
        found += [make(1, extend_len=n, to_outputs=True) for n in lens]
    return found


def small_tails(
    runner: TurboRunner, step: StepPlan, block_size: int, device: torch.device
) -> list[Tail | None]:
    """The tails to run a step with: none, and tails if they are wanted.

    A drafter's layers have no tails.
    """
    if runner.tail_wanted == 0:
        return [None]
    window = runner.scoring.sliding_window
    tail_format = TailFormat(runner.layout, block_size, window)
    num_seqs = step.query_start_loc.shape[0] - 1
    slot = (runner.shape.num_kv_heads, block_size, runner.layout.slot_size)
    tail = Tail(
        torch.zeros(num_seqs + 1, *slot, dtype=torch.uint8, device=device),
        torch.arange(1, num_seqs + 1, dtype=torch.int32, device=device),
        torch.zeros(num_seqs, dtype=torch.int32, device=device),
        tail_format,
        max(1, min(runner.tail_wanted, tail_format.num_rows - 1)),
    )
    return [None, tail]


def _run_store(
    runner: TurboRunner, kernels: KernelSet, kv_cache: torch.Tensor, num_tokens: int
) -> None:
    """Launch a store of ``num_tokens`` tokens without slots."""
    device, shape = kv_cache.device, runner.shape
    keys, values = (
        torch.zeros(1, shape.num_kv_heads, size, dtype=shape.dtype, device=device)
        for size in (shape.head_size, shape.head_size_v)
    )
    num_heads = runner.context_shape.num_heads
    query = torch.zeros(0, num_heads, shape.head_size, dtype=shape.dtype, device=device)
    offset = direction = None
    scoring = runner.scoring
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    # Triton compiles a kernel again for a slice, which serving does not pass.
    lens = bounds[1:].clone()
    if scoring.key_offset is not None:
        offset = KeyOffset(scoring.key_offset, lens, bounds)
    if runner.query_direction is not None:
        direction = QueryDirection(runner.query_direction, lens, bounds)
    rotated = RotatedQuery(
        query.view(torch.float16), torch.empty(0, num_heads, device=device)
    )
    slots = torch.full((num_tokens,), -1, device=device)
    kernels.store(
        StoreCall(
            kv_cache,
            slots,
            keys.expand(num_tokens, -1, -1),
            values.expand(num_tokens, -1, -1),
            runner.layout,
            query,
            rotated,
            scoring.scale,
            offset,
            query_direction=direction,
        )
    )


def run_kernels(runner: TurboRunner, device: torch.device) -> None:
    """Launch each kernel of a layer, with zeros."""
    kernels, shape = runner.entry_points, runner.shape
    block_size = runner.cache_config.block_size or 1
    block_size = cdiv(block_size, fmt.TILE_TOKENS) * fmt.TILE_TOKENS
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    largest = shape.largest_head_size
    for size in kernels.block_sizes(block_size, largest):
        for step in steps(runner, size, device):
            blocks = (step.block_table.numel(), kv_heads, size)
            slot_size = runner.layout.slot_size
            cache = torch.zeros(*blocks, slot_size, dtype=torch.uint8, device=device)
            vectors = (step.num_actual_tokens, heads + 2 * kv_heads, largest)
            qkv = torch.zeros(vectors, dtype=shape.dtype, device=device)
            query, key, value = qkv.split([heads, kv_heads, kv_heads], 1)
            query, key = query[..., : shape.head_size], key[..., : shape.head_size]
            value = value[..., : shape.head_size_v]
            output = query.new_empty(*query.shape[:2], shape.head_size_v)
            if runner.shares_cache:
                key = value = None
            for tail in small_tails(runner, step, size, device):
                with runner.alone():
                    forward(runner, query, key, value, cache, step, output, tail)
    if runner.shares_cache:
        return
    for num_tokens in kernels.store_sizes(runner.layout, kv_heads):
        if num_tokens <= runner.max_num_tokens:
            _run_store(runner, kernels, cache, num_tokens)
