# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the CUDA kernels on small inputs, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python ci/sanitize.py

Steps are as the backend has them: store of a prompt and of new tokens, decode, merge.
Each tensor is an allocation of its own size, and scratch is not initialised. With
--defect something is wrong that the tool of that name must find.
"""

import argparse
import math
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.ops.turbo import (
    cuda_build,
    cuda_decode,
    cuda_merge,
    cuda_store,
)
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.triton_merge import NewestToken

# Of each preset and head size one, and both widths.
SOME = [("turbo4", 128, 4), ("k4v3", 256, 8), ("turbo3", 64, 4)]
NUM_KV_HEADS = 2
BLOCK_SIZE = 32
# The last ends with the cache.
SEQ_LENS = [1, 17, 0, 33, 700, 2048]
# What is planted for a tool to find.
DEFECTS = {
    "memcheck": "a block table that names a page past the end of the cache",
    "initcheck": "pages that nobody has written",
    "racecheck": "a merge without barriers",
}
DEVICE = torch.device("cuda", 0)


def random(*shape: int) -> torch.Tensor:
    """Made on the CPU: what the tools watch are to be our kernels."""
    return torch.randn(shape).to(torch.bfloat16).to(DEVICE)


def remove_barriers() -> None:
    """Let the merge be built from a copy of the sources that has no barriers."""
    folder = Path(tempfile.mkdtemp()) / "cuda"
    shutil.copytree(cuda_build.SOURCE_DIR, folder)
    source = folder / "merge.cuh"
    text = source.read_text()
    assert "__syncthreads();" in text
    source.write_text(text.replace("__syncthreads();", ""))
    cuda_build.SOURCE_DIR = folder


def build(cases: list[tuple[TurboFormat, int]]) -> None:
    """Build all modules, at once: the compiler is another process."""
    with ThreadPoolExecutor() as pool:
        jobs = [
            job
            for layout, group in cases
            for job in (
                pool.submit(cuda_store.load_library, layout),
                pool.submit(cuda_decode.load, layout, group, DEVICE),
                pool.submit(cuda_merge.load, layout.head_size),
            )
        ]
        for job in jobs:
            job.result()


def slots_and_table(num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of all tokens, and the block table; sequences have pages in turn."""
    counts = [math.ceil(length / BLOCK_SIZE) for length in SEQ_LENS]
    assert sum(counts) == num_blocks
    table = torch.zeros(len(SEQ_LENS), max(counts), dtype=torch.int32)
    slots = []
    first = 0
    for row, (length, count) in enumerate(zip(SEQ_LENS, counts)):
        table[row, :count] = torch.arange(first, first + count)
        slots.append(first * BLOCK_SIZE + torch.arange(length))
        first += count
    return torch.cat(slots), table


def run(layout: TurboFormat, group: int, defect: str | None) -> None:
    """Store, then decode with several numbers of splits."""
    size, num_seqs = layout.head_size, len(SEQ_LENS)
    num_blocks = sum(math.ceil(length / BLOCK_SIZE) for length in SEQ_LENS)
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, layout.slot_size)
    # Whole tiles are copied, also what lies past a sequence's end: bytes that are
    # defined, for vLLM allocates caches of zeros. That they change nothing is for
    # test_recycled_bytes_do_not_leak to show.
    make = torch.empty if defect == "initcheck" else torch.zeros
    cache = make(shape, dtype=torch.uint8, device=DEVICE)
    slots, table = slots_and_table(num_blocks)
    if defect == "memcheck":
        table[-1, -1] = num_blocks
    ends = torch.tensor(SEQ_LENS).cumsum(0) - 1
    newest_slots = slots[ends].where(torch.tensor(SEQ_LENS) > 0, -1).to(DEVICE)
    # The store is launched in one way for prompts and in another for few tokens.
    some = slots.where(torch.arange(len(slots)) % 100 > 0, -1)
    for stored in (some, slots[5::300]):
        key, value = (random(len(stored), NUM_KV_HEADS, size) for _ in range(2))
        cuda_store.store(cache, stored.to(DEVICE), key, value, layout)
    table = table.to(DEVICE)
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32).to(DEVICE)
    num_heads = group * NUM_KV_HEADS
    query = random(num_seqs, num_heads, size)
    key, value = (random(num_seqs, NUM_KV_HEADS, size) for _ in range(2))
    served = cuda_decode.num_kv_splits(num_seqs, NUM_KV_HEADS, num_compute_units(0))
    for num_splits in (1, 3, served):
        for newest in (None, NewestToken(query, key, value, size**-0.5)):
            rotated = torch.empty_like(query, dtype=torch.float16)
            query_scale = torch.empty(num_seqs, num_heads, device=DEVICE)
            partial = torch.empty(num_seqs * num_splits, num_heads, size, device=DEVICE)
            lse = torch.empty(num_seqs * num_splits, num_heads, device=DEVICE)
            output = torch.empty_like(query)
            cuda_store.store(
                cache,
                newest_slots,
                key,
                value,
                layout,
                query,
                rotated,
                query_scale,
                size**-0.5,
            )
            cuda_decode.decode_attention(
                rotated,
                query_scale,
                cache,
                table,
                seq_lens,
                layout,
                partial,
                lse,
                output,
                newest,
            )
            result = output.cpu()
            assert defect or result.isfinite().all()
            assert defect or (result[2] == 0).all() and (result[4] != 0).any()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all presets and head sizes")
    parser.add_argument("--defect", choices=DEFECTS, help="plant a defect")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.defect == "racecheck":
        remove_barriers()
    chosen = SOME
    if args.all:
        sizes = cuda_decode.SUPPORTED_HEAD_SIZES
        chosen = [(n, d, g) for n in TURBO_PRESETS for d in sizes for g in (4, 8)]
    cases = [(TurboFormat.from_cache_dtype(n, d), g) for n, d, g in chosen]
    build(cases)
    for layout, group in cases:
        run(layout, group, args.defect)
        print(f"{layout.name} {layout.head_size}, {group} queries a head", flush=True)


if __name__ == "__main__":
    main()
