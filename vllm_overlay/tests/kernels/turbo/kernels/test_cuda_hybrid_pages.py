# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pages of hybrid models, for CUDA's kernels and Triton's.

vLLM makes these pages as large as the state of other layers: they have thousands of
tokens, and not a power of two.
"""

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TurboFormat

from ..attention_kernels import DECODES, kernels_and_layouts
from ..attention_utils import assert_within
from ..kernel_under_test import Kernel
from ..layer.test_prefill import gather
from ..sequences import NUM_KV_HEADS, Features, Sequences, raw_or_stored
from ..utils import (
    BF16,
    CUDA_IS_EMULATED,
    DEVICE,
    FP16,
    ON_GPU,
    by_kernel,
    gaussian,
    random_pages,
    requires_nvidia,
    requires_triton,
    slots_of,
)
from .store_checks import CUDA, TRITON, check_bytes

# Block sizes that vLLM aligns: a short one, Qwen3-Next's and Qwen3.5-397B's.
BLOCK_SIZES = [528, 3952, 7872]
# These models' head size, and one whose emulated kernels other tests also build.
HEAD_SIZES = [256, 128]
# Query heads a KV head: Qwen3.6-27B's and Qwen3-Next's.
GROUPS = [6, 8]
if not (ON_GPU or CUDA_IS_EMULATED):
    # The interpreter takes seconds for each.
    BLOCK_SIZES, HEAD_SIZES, GROUPS = [3952], [256], [6]
block_sizes = pytest.mark.parametrize("block_size", BLOCK_SIZES)
LAYOUTS = [TurboFormat.from_cache_dtype("turbo4", size) for size in HEAD_SIZES]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=HEAD_SIZES)
groups = pytest.mark.parametrize("group", GROUPS)
# Tokens that a query token sees in a long sequence; interpreters take minutes for more.
WINDOW = 20


def lengths(block_size: int) -> list[int]:
    """Lengths that end within a block, around its end, and in a third block."""
    ends = [block_size - 1, block_size, block_size + 1, 2 * block_size + 7]
    return [18, block_size // 2 + 3, *ends]


def check(
    kernel: Kernel,
    layout: TurboFormat,
    block_size: int,
    query_len: int,
    group: int,
    with_raw: bool = True,
    window: int | None = WINDOW,
) -> None:
    """Check sequences of which all tokens, or the last ones, are stored and seen."""
    batch = Sequences(
        layout,
        lengths(block_size),
        query_len,
        group,
        Features(window, dtype=BF16),
        block_size=block_size,
        num_stored=None if window is None else query_len + window,
    )
    batch.compare(kernel, with_raw, batch.attend(kernel, with_raw))


@by_kernel("kernel", [(CUDA,), (TRITON,)])
@layouts
@block_sizes
def test_store(kernel, layout, block_size):
    """Store at both ends of each block, and of tiles between."""
    offsets = torch.tensor([0, 15, 16, block_size // 32 * 16 - 1, block_size - 1])
    slots = (torch.arange(3)[:, None] * block_size + offsets).flatten().to(DEVICE)
    shape = (len(slots), NUM_KV_HEADS, layout.head_size)
    key, value = (gaussian(*shape, dtype=BF16, seed=seed) for seed in (0, 1))
    check_bytes(kernel, layout, key, value, slots, 3, block_size)


@kernels_and_layouts(DECODES, LAYOUTS)
@block_sizes
@groups
@pytest.mark.parametrize("query_len", [1, 3])
def test_decodes(kernel, layout, block_size, group, query_len):
    if not ON_GPU and "repetition" in kernel.opt_outs and query_len == 1:
        pytest.skip(kernel.opt_outs["repetition"])
    check(kernel, layout, block_size, query_len, group)


@kernels_and_layouts(["extend_mma"], LAYOUTS)
@block_sizes
@groups
@raw_or_stored
def test_extends(kernel, layout, block_size, group, with_raw):
    check(kernel, layout, block_size, 16, group, with_raw)


@requires_nvidia
@kernels_and_layouts(["decode", "triton", "extend_mma"], LAYOUTS)
@block_sizes
@groups
def test_whole_sequences(kernel, layout, block_size, group):
    query_len = 16 if kernel.is_extend else 3
    check(kernel, layout, block_size, query_len, group, window=None)


@requires_triton
@layouts
@block_sizes
def test_gather(layout, block_size):
    """Pieces of context that begin and end around the borders of blocks."""
    cache = random_pages(layout, 4, NUM_KV_HEADS, block_size)
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32, device=DEVICE)
    starts, lens = [block_size - 9, block_size], [20, 5]
    key, value = gather(cache, table, starts, lens, layout, FP16)
    spans = zip(table, starts, lens)
    slots = [slots_of(row, start, start + n, block_size) for row, start, n in spans]
    expected_key, expected_value = reference.load(cache, torch.cat(slots), layout)
    assert torch.equal(key[:25].float(), expected_key.half().float())
    allowed = 2.0**-9 * expected_value.abs() + 2.0**-25 * 8
    assert_within(value[:25].float(), expected_value, allowed)
