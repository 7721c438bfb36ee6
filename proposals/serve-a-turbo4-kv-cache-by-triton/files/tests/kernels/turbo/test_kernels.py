# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""turbo4's kernels against golden bytes and the PyTorch reference."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES, TurboFormat
from vllm.v1.attention.ops.turbo.triton.decode import decode_attention
from vllm.v1.attention.ops.turbo.triton.gather import gather
from vllm.v1.attention.ops.turbo.triton.store import store

from . import reference
from .utils import DEVICE, Sequences, assert_near, attend, pages

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
NUM_TOKENS = 24
# Tokens, one of each tile, whose bytes are in the file.
TOKENS = (5, 18)
ROUNDING = 2e-3  # of fp16, relative to the largest output

all_head_sizes = pytest.mark.parametrize("head_size", HEAD_SIZES)


def pseudo_random(count: int) -> torch.Tensor:
    """Integers of 32 bits, as int64, without a random number generator."""
    return torch.arange(count) * 2654435761 % 2**32


def golden_vectors(head_size: int) -> torch.Tensor:
    """Keys and values of two heads, (2, T, H, D) bf16."""
    x = pseudo_random(2 * NUM_TOKENS * 2 * head_size).double() / 2**31 - 1
    exponents = torch.arange(NUM_TOKENS) % 9 - 4
    x = x.view(2, NUM_TOKENS, 2, head_size) * 2.0 ** exponents[:, None, None]
    return x.bfloat16()


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("is_kernel", [False, True])
@all_head_sizes
def test_golden_bytes(head_size, is_kernel):
    """The format is an ABI: bytes never change under a dtype's name."""
    key, value = golden_vectors(head_size).to(DEVICE)
    run = store if is_kernel else reference.store
    cache = pages(1, 2, 2 * fmt.TILE_TOKENS, head_size).zero_()
    slots = torch.arange(NUM_TOKENS, device=DEVICE)
    run(key, value, cache, slots)
    expected = GOLDEN[f"turbo4 {head_size}"]
    assert digest(cache) == expected["page"]
    cache.zero_()
    kept = torch.isin(slots, torch.tensor(TOKENS, device=DEVICE))
    run(key, value, cache, torch.where(kept, slots, -1))
    some = cache[0, 0].flatten()
    assert bytes(some[some != 0].tolist()).hex() == expected["tokens"]


@all_head_sizes
def test_golden_reading(head_size):
    layout = TurboFormat(head_size)
    some_bytes = pseudo_random(2 * layout.tile_bytes) >> 24
    some_bytes = some_bytes.clamp(7, fmt.SCALE_CODE_MAX).to(torch.uint8)
    cache = some_bytes.view(1, 1, 2 * fmt.TILE_TOKENS, layout.slot_size)
    read = reference.load(cache, torch.arange(2 * fmt.TILE_TOKENS), layout)
    assert digest(torch.stack(read)) == GOLDEN[f"turbo4 {head_size}"]["read"]


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "BHLNC"])
@all_head_sizes
def test_store_against_reference(head_size, order):
    """Broken, tiny and huge vectors, in all layouts; no other byte is touched."""
    torch.manual_seed(1)
    num_tokens, num_heads, block_size = 37, 2, 48
    x = torch.randn(2, num_tokens, num_heads, head_size).bfloat16()
    x[:, 1] = 0
    x[:, 2] *= 1e-30
    x[:, 3] *= 1e30
    x[:, 4, :, 5] = float("inf")
    x[:, 5, :, 6] = float("nan")
    x[:, 6] = 1
    slots = torch.randperm(2 * block_size)[:num_tokens]
    slots[7] = -1
    size = (2, 3, num_heads, block_size, TurboFormat(head_size).slot_size)
    axes = {"LBHNC": (0, 1, 2), "BLHNC": (1, 0, 2), "BHLNC": (1, 2, 0)}[order]
    shape = [size[axis] for axis in axes] + list(size[3:])
    back = [axes.index(axis) for axis in range(3)] + [3, 4]
    cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)
    layers = cache.permute(back)
    expected = layers.cpu().contiguous()
    store(*x.to(DEVICE), layers[1], slots.to(DEVICE))
    reference.store(*x, expected[1], slots)
    assert torch.equal(layers.cpu(), expected)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    "head_size, group, block_size",
    [(64, 1, 16), (128, 4, 48), (128, 5, 64), (128, 16, 128), (256, 8, 32)],
)
def test_decode_against_reference(head_size, group, block_size, window):
    lens, num_heads = [1, 15, 17, 64, 0, 129], 2
    seqs = Sequences.make(lens, num_heads, head_size, block_size)
    query = torch.randn(len(lens), num_heads * group, head_size).half().to(DEVICE)
    scale, splits = head_size**-0.5, 3
    rows = (len(lens) * splits, num_heads * group)
    partial = torch.full((*rows, head_size), float("nan"), device=DEVICE)
    output = decode_attention(
        query,
        seqs.kv_cache,
        seqs.block_table,
        seqs.seq_lens,
        scale,
        (partial, torch.full(rows, float("nan"), device=DEVICE)),
        splits,
        window,
    )
    for row, n in enumerate(lens):
        if n == 0:
            assert (output[row] == 0).all()
            continue
        own = (query[row : row + 1], seqs.key[row], seqs.value[row])
        assert_near(output[row : row + 1], attend(*own, scale, window), ROUNDING)


@all_head_sizes
def test_gather_against_reference(head_size):
    """Cached tokens are dequantised, those of the chunk are copied."""
    lens, query_lens, key_lens = [50, 9, 33], [18, 9, 1], [50, 9, 20]
    seqs = Sequences.make(lens, 2, head_size, 32)
    total = sum(query_lens)
    key, value = torch.randn(2, total, 2, head_size).half().to(DEVICE)
    gathered = torch.full((2, sum(key_lens), 2, head_size), float("nan")).half()
    gathered = gathered.to(DEVICE)
    starts, ends = ([0, *torch.tensor(x).cumsum(0)] for x in (query_lens, key_lens))
    gather(
        seqs.kv_cache,
        (key, value),
        (gathered[0], gathered[1]),
        seqs.block_table,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        seqs.seq_lens,
        torch.tensor(ends, dtype=torch.int32, device=DEVICE),
        max(key_lens),
    )
    for row, n in enumerate(lens):
        own = gathered[:, ends[row] : ends[row + 1]]
        chunk = slice(starts[row], starts[row + 1])
        cached = key_lens[row] - query_lens[row]
        first = n - key_lens[row]
        for found, raw, stored in zip(own, (key, value), (seqs.key, seqs.value)):
            assert torch.equal(found[cached:], raw[chunk])
            if cached:
                expected = stored[row][first : first + cached].double()
                assert_near(found[:cached], expected, 1e-3)
