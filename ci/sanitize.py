# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the CUDA kernels on small inputs, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python ci/sanitize.py

The steps are the backend's: store of a prompt and of new tokens, decode of one token
and of drafts, uniform and ragged, extend with few and with many queries, merge. Each
tensor is an allocation of its own size, and scratch is not initialised. Some layouts
run once more with an offset of K, and again with an offset and a tail, which
has the tokens of a step before. With --defect, the tool that begins the defect's name
has to find a fault.
"""

import argparse
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import torch
from cuda_defects import SANITIZER_DEFECTS, of_this_gpu, plant

from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import decode_wgmma, extend_mma
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.cuda.extend_mma import EXTEND_MMA
from vllm.v1.attention.ops.turbo.cuda.family import Demand, modules_for
from vllm.v1.attention.ops.turbo.cuda.modules import FAMILIES
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import TailFormat
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail, TailUpdate
from vllm.v1.attention.ops.turbo.interface import (
    OFFSET_SEGMENT,
    AttentionCall,
    DecodeBatch,
    KeyOffset,
    Partials,
    RawTokens,
    RotatedQuery,
    Scoring,
    StoreCall,
    Variant,
)

# One layout of each preset and head size, and of both numbers of query heads.
SOME = [("turbo4", 128, 4), ("k4v3", 256, 8), ("turbo3", 64, 4), ("turbo4", 512, 8)]
NUM_KV_HEADS = 2
BLOCK_SIZE = 32
# The most query tokens of a decode.
MOST_QUERY_TOKENS = 8
DEVICE = torch.device("cuda", 0)
NUM_SMS = num_compute_units(0)
# The compute capability of a GPU that extends by warps.
ELSEWHERE = 80


class Case(NamedTuple):
    """A layout with its features.

    Attributes:
        layout: The cache's format.
        group: Query heads per KV head.
        has_offset: Whether an offset is taken off K.
        has_tail: Whether sequences have tails.

    """

    layout: TurboFormat
    group: int
    has_offset: bool = False
    has_tail: bool = False

    def __str__(self) -> str:
        text = (
            f"{self.layout.name} {self.layout.head_size}, {self.group} queries a head"
        )
        offset = ", with an offset of K" if self.has_offset else ""
        return text + offset + (" and a tail" if self.has_tail else "")


class Batch(NamedTuple):
    """Sequences, and the attention to them.

    Attributes:
        attend: The entry point.
        lens: (query tokens, tokens) of each sequence; the last one ends the cache.
        splits: Numbers of splits that each query has room for, in turn.

    """

    attend: Callable[..., None]
    lens: list[tuple[int, int]]
    splits: tuple[int, ...]

    @property
    def query_len(self) -> int:
        return max(query_len for query_len, _ in self.lens)

    @property
    def is_uniform(self) -> bool:
        return all(query_len == self.query_len for query_len, _ in self.lens)

    def whole(self) -> "Batch":
        """Returns the batch of the sequences whose query tokens are all there."""
        return self._replace(lens=[(q, n) for q, n in self.lens if q <= n])


def served_splits(num_seqs: int) -> int:
    return cuda_decode.num_kv_splits(num_seqs, NUM_KV_HEADS, NUM_SMS)


def short_sequences(query_len: int) -> list[tuple[int, int]]:
    """Returns so many sequences that each block or team of warps has several."""
    return [(query_len, query_len + i % 40) for i in range(3 * NUM_SMS)]


def extend_by_warps(*args: Any, **options: Any) -> None:
    """Runs ``extend_attention`` of GPUs other than Hopper's, on any GPU."""
    with mock.patch.object(extend_mma, "capability_of", lambda device: None):
        extend_mma.extend_attention(*args, **options)


EXTENDS = (extend_mma.extend_attention, extend_by_warps)


def planted_defects(without_extends: bool) -> list[str]:
    """Returns the names of planted defects, with those of extends or without them."""
    names = of_this_gpu(SANITIZER_DEFECTS)
    if not without_extends:
        return names
    sources = {x: each.source for x, each in SANITIZER_DEFECTS.items() if each}
    return [x for x in names if not sources.get(x, "").startswith("extend_")]


def batches(case: Case) -> dict[str, Batch]:
    """Returns the batches of a layout, by name; offsets span several segments."""
    decode, extend = cuda_decode.decode_attention, extend_mma.extend_attention
    ragged = [(1, 1), (3, 17), (0, 0), (2, 33), (1, 0), (4, 300), (4, 700)]
    # With four query heads per KV head: up to 32 queries, and more than 64.
    few = [(1, 1), (8, 17), (0, 0), (3, 131), (2, 1), (8, 700)]
    many = [(20, 20), (1, 17), (0, 0), (33, 161), (16, 700)]
    # More queries than CUDA's decode kernel of all GPUs attends from at once.
    more = [(MOST_QUERY_TOKENS, n) for n in (MOST_QUERY_TOKENS, 17, 2, 33, 700)]
    one = [(1, length) for length in (1, 17, 0, 33, 700, 2048)]
    if case.has_offset:
        for lens, query_len in ((one, 1), (ragged, 3), (few, 8), (many, 20)):
            lens.append((query_len, 2 * OFFSET_SEGMENT + 3))
    found = {
        "one token": Batch(decode, one, (1, 3, served_splits(6))),
        "drafts": Batch(decode, [(3, n) for n in (3, 17, 2, 33, 700)], (1, 3)),
        "ragged drafts": Batch(decode, ragged, (1, served_splits(7))),
        "more drafts": Batch(decode, more, (1, 3)),
        "more ragged drafts": Batch(decode, few, (1, served_splits(6))),
        "many sequences": Batch(decode, short_sequences(1), (1, 3)),
        "few queries": Batch(extend, few, (1, 3)),
        "many queries": Batch(extend, many, (1, 5)),
        "many extends": Batch(extend, short_sequences(8), (1,)),
        "few queries by warps": Batch(extend_by_warps, few, (1, 3)),
        "many queries by warps": Batch(extend_by_warps, many, (1, 5)),
        "many extends by warps": Batch(extend_by_warps, short_sequences(8), (1,)),
    }
    if EXTEND_MMA.refusal(case.layout):
        return {name: x for name, x in found.items() if x.attend is decode}
    return found


# Batches that show a defect in a short time.
WATCHED = {
    "memcheck-page": ["one token", "few queries"],
    "initcheck-pages": ["one token", "few queries"],
    "racecheck-merge": ["one token"],
    "racecheck-team": ["many sequences"],
    "racecheck-stages": ["many extends by warps"],
    "racecheck-values": ["few queries by warps"],
}


def random(*shape: int) -> torch.Tensor:
    """Makes a tensor on the CPU, so that the tools watch only our kernels."""
    return torch.randn(shape).to(torch.bfloat16).to(DEVICE)


def build(cases: list[Case]) -> None:
    """Build all modules side by side, because compilers are other processes."""
    jobs: list[Future] = []
    with ThreadPoolExecutor() as pool:
        for layout, group, *features in cases:
            variant = Variant(*features)
            demand = Demand(group, MOST_QUERY_TOKENS, 33, variant=variant)
            loaders = modules_for(FAMILIES, layout, demand, DEVICE)
            # Kernels that extend by warps run on any GPU here.
            demand = demand._replace(capability=ELSEWHERE)
            loaders += modules_for([EXTEND_MMA], layout, demand, DEVICE)
            jobs += [pool.submit(loader.load) for loader in loaders]
    for job in jobs:
        job.result()


def slots_and_table(seq_lens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns slots of each sequence's tokens, and the block table, pages in order."""
    counts = [math.ceil(length / BLOCK_SIZE) for length in seq_lens]
    table = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32)
    slots = []
    first = 0
    for row, (length, count) in enumerate(zip(seq_lens, counts)):
        table[row, :count] = torch.arange(first, first + count)
        slots.append(first * BLOCK_SIZE + torch.arange(length))
        first += count
    return slots, table


def step_slots(batch: Batch, slots: list[torch.Tensor]) -> torch.Tensor:
    """Returns slots of the query tokens; -1 for those that a sequence lacks."""
    parts = []
    for (query_len, length), own in zip(batch.lens, slots):
        missing = max(query_len - length, 0)
        parts += [torch.full((missing,), -1), own[max(length - query_len, 0) :]]
    return torch.cat(parts).to(DEVICE)


def filled_cache(
    layout: TurboFormat, slots: list[torch.Tensor], num_more: int, defect: str | None
) -> torch.Tensor:
    """Returns a cache with prompts stored, and `num_more` blocks behind them.

    Whole tiles are copied, also the bytes past a sequence's end. These are defined,
    because vLLM allocates caches of zeros. test_recycled_bytes_do_not_leak shows that
    they change nothing.
    """
    num_blocks = sum(math.ceil(len(own) / BLOCK_SIZE) for own in slots) + num_more
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, layout.slot_size)
    make = torch.empty if defect == "initcheck-pages" else torch.zeros
    cache = make(shape, dtype=torch.uint8, device=DEVICE)
    every = torch.cat(slots)
    # Prompts and few tokens have different launches of the store.
    some = every.where(torch.arange(len(every)) % 100 > 0, -1)
    for stored in (some, every[5::300]):
        key, value = (
            random(len(stored), NUM_KV_HEADS, layout.head_size) for _ in range(2)
        )
        cuda_store.store(StoreCall(cache, stored.to(DEVICE), key, value, layout))
    return cache


def start_tails(
    case: Case,
    cache: torch.Tensor,
    batch: Batch,
    slots: list[torch.Tensor],
    table: torch.Tensor,
    key_offset: torch.Tensor | None,
) -> Tail:
    """Returns the sequences' tails, in the cache's last blocks. A step has stored as
    many tokens before the query tokens as there are rows.
    """
    layout = case.layout
    tail_format = TailFormat(layout, BLOCK_SIZE)
    num_seqs, num_rows = len(batch.lens), tail_format.num_rows
    blocks = torch.arange(cache.shape[0] - num_seqs, cache.shape[0], dtype=torch.int32)
    tail = Tail(
        cache,
        blocks.to(DEVICE),
        torch.empty(num_seqs, dtype=torch.int32, device=DEVICE),
        tail_format,
        num_rows,
    )
    before = [length - query_len for query_len, length in batch.lens]
    prior = [own[max(n - num_rows, 0) : n] for n, own in zip(before, slots)]
    starts = torch.tensor([0, *(len(own) for own in prior)]).cumsum(0).int()
    lengths = torch.tensor(before, dtype=torch.int32).to(DEVICE)
    key, value = (
        random(int(starts[-1]), NUM_KV_HEADS, layout.head_size) for _ in range(2)
    )
    device_starts = starts.to(DEVICE)
    offset = None
    if key_offset is not None:
        offset = KeyOffset(key_offset, lengths, device_starts)
    cuda_store.store(
        StoreCall(
            cache,
            torch.cat(prior).to(DEVICE),
            key,
            value,
            layout,
            key_offset=offset,
            tail=TailUpdate(tail, table, lengths, device_starts),
        )
    )
    return tail


def run(case: Case, batch: Batch, defect: str | None) -> None:
    """Store, then attend with several numbers of splits, also to raw tokens."""
    layout = case.layout
    size, num_heads = layout.head_size, case.group * NUM_KV_HEADS
    if case.has_tail:
        batch = batch.whole()
    seq_lens = [length for _, length in batch.lens]
    slots, table = slots_and_table(seq_lens)
    num_tails = len(seq_lens) if case.has_tail else 0
    cache = filled_cache(layout, slots, num_tails, defect)
    if defect == "memcheck-page":
        table[-1, math.ceil(seq_lens[-1] / BLOCK_SIZE) - 1] = cache.shape[0]
    query_lens = torch.tensor([query_len for query_len, _ in batch.lens])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)])
    num_tokens, num_seqs = int(starts[-1]), len(seq_lens)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    some_starts = starts.int().to(DEVICE)
    query = random(num_tokens, num_heads, size)
    key, value = (random(num_tokens, NUM_KV_HEADS, size) for _ in range(2))
    new_slots = step_slots(batch, slots)
    device_table, device_lens = table.to(DEVICE), lengths.to(DEVICE)
    sequences = DecodeBatch(
        num_seqs,
        device_table,
        device_lens,
        batch.query_len,
        None if batch.is_uniform else some_starts,
    )
    key_table = key_offset = tail = update = None
    if case.has_offset:
        # Two segments, of which the last counts for all later tokens.
        key_table = torch.randn(2, NUM_KV_HEADS, size).to(DEVICE)
        key_offset = KeyOffset(key_table, device_lens, some_starts)
    raw = RawTokens(query, key, value, size**-0.5)
    scoring = Scoring(size**-0.5, key_offset=key_table)
    if case.has_tail:
        tail = start_tails(case, cache, batch, slots, device_table, key_table)
        update = TailUpdate(tail, device_table, device_lens, some_starts)
    for num_splits in batch.splits:
        # With a tail, the newest token is always seen as computed.
        for own_raw in (raw,) if case.has_tail else (None, raw):
            rotated = RotatedQuery(
                torch.empty_like(query, dtype=torch.float16),
                torch.empty(num_tokens, num_heads, device=DEVICE),
            )
            rows = num_seqs * num_splits * batch.query_len
            partials = Partials(
                torch.empty(rows, num_heads, size, device=DEVICE),
                torch.empty(rows, num_heads, device=DEVICE),
            )
            output = torch.empty_like(query)
            cuda_store.store(
                StoreCall(
                    cache,
                    new_slots,
                    key,
                    value,
                    layout,
                    query,
                    rotated,
                    size**-0.5,
                    key_offset,
                    update,
                )
            )
            call = AttentionCall(
                cache, layout, sequences, scoring, output, query, own_raw, tail
            )
            batch.attend(rotated, call, partials)
            result = output.cpu()
            if defect is None:
                check(batch, starts, result)
                if tail is not None:
                    check_tail(batch, tail)


def check_tail(batch: Batch, tail: Tail) -> None:
    """Check that each has the rows that the step before wrote and this one left."""
    for (query_len, length), packed in zip(batch.lens, tail.packed_lens.tolist()):
        rows = max(tail.format.num_rows - query_len, 0)
        wanted = min(length - query_len, rows)
        assert length - packed == wanted, (query_len, length, packed)


def check(batch: Batch, starts: torch.Tensor, output: torch.Tensor) -> None:
    """Check that missing tokens have zeros, and others finite numbers."""
    assert output.isfinite().all()
    for start, (query_len, length) in zip(starts.tolist(), batch.lens):
        missing = max(query_len - length, 0)
        assert (output[start : start + missing] == 0).all()
        is_zero = (output[start + missing : start + query_len] == 0).all(-1)
        assert not is_zero.any(), (query_len, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all presets and head sizes")
    parser.add_argument("--defect", choices=SANITIZER_DEFECTS, help="plant a defect")
    parser.add_argument("--defects", action="store_true", help="print their names")
    parser.add_argument("--part", metavar="I/N", help="each Nth layout, from the Ith")
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=["decode_wgmma", "extends"],
        help="decode many queries of a KV head in passes, not by WGMMA; no extends",
    )
    args = parser.parse_args()
    if args.defects:
        print(*planted_defects("extends" in args.without))
        return
    if "decode_wgmma" in args.without:
        decode_wgmma.SERVED = range(0)
    torch.manual_seed(0)
    defect = SANITIZER_DEFECTS.get(args.defect)
    if defect is not None:
        plant(defect)
    chosen = SOME[:1] if args.defect else SOME
    if args.all and not args.defect:
        sizes = SUPPORTED_HEAD_SIZES
        chosen = [(n, d, g) for n in TURBO_PRESETS for d in sizes for g in (4, 8)]
    cases = [Case(TurboFormat.from_cache_dtype(n, d), g) for n, d, g in chosen]
    if not args.defect:
        some = [(TurboFormat.from_cache_dtype(n, d), g) for n, d, g in SOME]
        cases += [Case(*case, has_offset=True) for case in some]
        cases += [Case(*case, has_offset=True, has_tail=True) for case in some]
    if args.part:
        part, _, count = args.part.partition("/")
        cases = cases[int(part) - 1 :: int(count)]
    build(cases)
    for case in cases:
        for name, batch in batches(case).items():
            if "extends" in args.without and batch.attend in EXTENDS:
                continue
            if name in WATCHED.get(args.defect, [name]):
                run(case, batch, args.defect)
        print(case, flush=True)


if __name__ == "__main__":
    main()
