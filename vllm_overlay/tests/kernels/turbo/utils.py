# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Cases and caches shared by the tests of the turbo KV cache.

The kernels run on a GPU or, with TRITON_INTERPRET=1 and no GPU visible, in
Triton's interpreter, where a case must stay at a few hundred tokens.
"""

import __future__

import ast
import math
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.ops import turbo
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import (
    HEAD_SIZES,
    KEY_CODEBOOKS,
    TURBO_PRESETS,
    VALUE_CODEBOOKS,
    ScaleWords,
    TurboFormat,
)
from vllm.v1.attention.ops.turbo.interface import (
    OFFSET_SEGMENT,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.reference.bytes import pack_scales
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

DEVICE = torch.device(current_platform.device_type)
ON_GPU = DEVICE.type != "cpu"

BF16, FP16 = torch.bfloat16, torch.float16
# The layouts that the backend declares.
CACHE_LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)
# 48 is no power of two; hybrid models have pages of hundreds and thousands of tokens.
if ON_GPU:
    KERNEL_CASES = [(size, dtype) for size in HEAD_SIZES for dtype in (BF16, FP16)]
    PAGES = [(p, n) for p in CACHE_LAYOUTS for n in (16, 32, 48, 528, 3952, 7872)]
else:
    KERNEL_CASES = [(64, BF16), (80, FP16), (128, BF16), (128, FP16), (256, BF16)]
    PAGES = list(zip(CACHE_LAYOUTS, (32, 48, 16)))
# The block-table entry past a sequence's end, which no kernel may follow.
INVALID_BLOCK = 2**30

# Head sizes of K and V that differ. The first are a model's. V of 80 has an odd number
# of groups, and more columns of a step than K of 128 and of 64.
TWO_SIZES = [(192, 128), (128, 80), (64, 80)]
UNEVEN = [TurboFormat.from_cache_dtype("turbo4", *sizes) for sizes in TWO_SIZES]
UNEVEN += [TurboFormat.from_cache_dtype(x, 192, 128) for x in ("turbo3", "k4v3")]

CAN_RUN_KERNELS = HAS_TRITON and (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1")
requires_triton = pytest.mark.skipif(
    not CAN_RUN_KERNELS, reason="needs a GPU, or TRITON_INTERPRET=1"
)
ON_NVIDIA = ON_GPU and current_platform.is_cuda()
# Whether an emulator of a GPU is installed, which runs CUDA's kernels on tensors of a
# CPU. It takes seconds for a few thousand tokens.
CUDA_IS_EMULATED = os.environ.get("TURBO_CUDA_EMULATION") == "1"
CAN_RUN_CUDA = ON_NVIDIA or CUDA_IS_EMULATED
# Head sizes of CUDA's kernels. The entry of Triton's kernels has no ``cuda.build``.
CUDA_HEAD_SIZES = (64, 128, 256, 512)
# Tokens of a segment of the offset of K: see the fixture ``short_segments``. CUDA's
# kernels are compiled for the segments that are served, or that an emulated GPU has.
SEGMENT = OFFSET_SEGMENT if ON_GPU or CUDA_IS_EMULATED else 64
requires_cuda = pytest.mark.skipif(not CAN_RUN_CUDA, reason="needs an NVIDIA GPU")
# Kernels with instructions for warpgroups (WGMMA).
requires_hopper = pytest.mark.skipif(
    not (CUDA_IS_EMULATED or ON_NVIDIA and current_platform.is_device_capability(90)),
    reason="needs a GPU of compute capability 9.0",
)
# Streams, graphs, failing launches, and cases that need a GPU's memory or speed.
requires_nvidia = pytest.mark.skipif(
    not ON_NVIDIA, reason="needs an NVIDIA GPU, not an emulated one"
)
all_presets = pytest.mark.parametrize("name", TURBO_PRESETS)
# The interpreter takes seconds a case. It skips k4v3, which packs K as turbo4 does and
# V as turbo3.
PACKINGS = list(TURBO_PRESETS) if ON_GPU else ["turbo4", "turbo3"]
packings = pytest.mark.parametrize("name", PACKINGS)
all_head_sizes = pytest.mark.parametrize("head_size", HEAD_SIZES)
all_codebooks = pytest.mark.parametrize(
    "codebook",
    [*KEY_CODEBOOKS.values(), *VALUE_CODEBOOKS.values()],
    ids=["key4", "key3", "value4", "value3"],
)
model_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
kernel_cases = pytest.mark.parametrize(
    "head_size, dtype",
    KERNEL_CASES,
    ids=[
        f"{size}-{'bf16' if dtype == BF16 else 'fp16'}" for size, dtype in KERNEL_CASES
    ],
)
kernel_head_sizes = pytest.mark.parametrize(
    "head_size", sorted({size for size, _ in KERNEL_CASES})
)
all_pages = pytest.mark.parametrize(
    "cache_layout, block_size", PAGES, ids=[f"{p.name}-{n}" for p, n in PAGES]
)


class KernelUnderTest(NamedTuple):
    """A kernel that tests are parametrised by.

    Attributes:
        name: Its name in the ids of tests.
        launch: The function that launches it.
        marks: Marks of its tests.
        num_tokens: Number of tokens for tests of many. An interpreter takes seconds.

    """

    name: str
    launch: Callable[..., None]
    marks: tuple[pytest.MarkDecorator, ...]
    num_tokens: int = 0


def layout_id(layout: Any) -> str:
    """The part of a test's id for a layout, of K and V or of latents."""
    own = f"{layout.name}-{layout.head_size}"
    if getattr(layout, "is_even", True):
        return own
    return f"{own}-{layout.head_size_v}"


def case_id(value: Any) -> str | None:
    """The part of a test's id for a dtype, a layout or a kernel; None for others."""
    if isinstance(value, torch.dtype):
        return {BF16: "bf16", FP16: "fp16", torch.float32: "fp32"}[value]
    if hasattr(value, "head_size"):
        return layout_id(value)
    return getattr(value, "name", None)


def cuda_module(name: str) -> Any:
    """A module of ``turbo.cuda``. A test is skipped before the change that adds it.

    A module that is there and cannot be imported fails.
    """
    if not Path(turbo.__path__[0], "cuda", f"{name}.py").exists():
        pytest.skip(f"turbo.cuda.{name} is of a later change")
    return import_module(f"vllm.v1.attention.ops.turbo.cuda.{name}")


def by_kernel(names: str, cases: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrise a test by a kernel and further values, with the kernel's marks."""
    marked = [pytest.param(*case, marks=case[0].marks) for case in cases]
    return pytest.mark.parametrize(names, marked, ids=case_id)


def function_of(path: Path, name: str, **scope: Any) -> Callable[..., Any]:
    """A function of a module that cannot be imported, compiled from the source.

    Decorators are left out. The globals are only those of ``scope``, so that any other
    code that runs raises a NameError.
    """
    (function,) = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    function.decorator_list = []
    annotations = __future__.annotations.compiler_flag
    module = ast.Module([function], [])
    exec(compile(module, path, "exec", flags=annotations), scope)
    return scope[name]


def gaussian(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=DEVICE, dtype=dtype)


def vectors(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Gaussian vectors from tiny to huge, with NaN, Inf, zeros and denormal numbers."""
    x = gaussian(*shape, dtype=torch.float32, seed=seed)
    magnitude = torch.logspace(-7, 4, shape[0], device=DEVICE)
    x = (x * magnitude[:, None, None]).to(dtype)
    x[1] = 0
    x[2] = 1
    x[3] = 0
    x[3, :, 3] = -1  # one spike
    x[4, :, 7] = math.nan
    x[5, 0] = math.nan
    x[6, 0, 1] = math.inf
    x[7, -1, 5] = -math.inf
    x[8] = torch.finfo(dtype).max
    x[9] = x[9].sign() * torch.finfo(dtype).smallest_normal / 16
    x[10] *= 1e30
    x[11] *= 1e-30
    return x


def random_slots(num_tokens: int, num_slots: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_slots, generator=generator)[:num_tokens].to(DEVICE)


def random_bytes(*shape: int, below: int = 256, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(below, shape, generator=generator).to(DEVICE, torch.uint8)


def cache_spec(
    layout: TurboFormat, num_kv_heads: int, block_size: int
) -> AttentionSpec:
    """The backend's spec, from which vLLM sizes and views the cache."""
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=layout.head_size,
        dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode(layout.name),
        state_content_bytes=layout.slot_size,
    )


def layer_caches(
    layout: TurboFormat,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    cache_layout: KVCacheLayout = KVCacheLayout.LBHNC,
    num_layers: int = 3,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Caches of some layers in one buffer, viewed as vLLM does.

    Returns:
        The buffer, every byte 0xFF (codes and scales that no encoder writes),
        and for each layer its (num_blocks, H, N, C) view.

    """
    spec = cache_spec(layout, num_kv_heads, block_size)
    strides = compute_layout_strides(spec, num_blocks, num_layers, cache_layout)
    size = num_layers * num_blocks * spec.page_size_bytes
    buffer = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    placement = KVCacheTensor(
        size=size,
        layers=[f"layers.{index}" for index in range(num_layers)],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    views = create_kv_cache_views(buffer, spec, num_blocks, cache_layout, placement)
    return buffer, views


def new_cache(
    layout: TurboFormat,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    cache_layout: KVCacheLayout = KVCacheLayout.LBHNC,
) -> torch.Tensor:
    """The cache of the middle one of three layers that share a buffer."""
    return layer_caches(layout, num_blocks, num_kv_heads, block_size, cache_layout)[1][
        1
    ]


def random_scales(*shape: int, words: ScaleWords, seed: int) -> torch.Tensor:
    """Scale bytes of random vectors, (*shape, S): any finite scales, zero included."""
    shape = (*shape, words.num_words)
    base = random_bytes(*shape, 1, below=0xF8, seed=seed)
    delta = random_bytes(
        *shape, words.word_groups, below=words.max_delta + 1, seed=seed
    )
    delta[..., 0] = 0
    delta = torch.minimum(delta, base // words.delta_step)
    codes = base - words.delta_step * delta
    return pack_scales(codes.flatten(-2), words)


def random_pages(
    layout: TurboFormat, num_blocks: int, num_kv_heads: int, block_size: int
) -> torch.Tensor:
    """A cache of random codes and scales; every scale is finite."""
    shape = (num_blocks, num_kv_heads, block_size // 16)
    parts = [random_bytes(*shape, layout.key_scales_offset, seed=1)]
    for seed, words in ((2, layout.scale_words), (3, layout.scale_words_v)):
        scales = random_scales(*shape, 16, words=words, seed=seed)
        parts.append(scales.flatten(-2))
    pages = torch.cat(parts, -1)
    return pages.view(num_blocks, num_kv_heads, block_size, layout.slot_size)


def spread_pages(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three pages of a cache where byte offsets pass 2**31 and 2**32.

    Offsets that overflow 32 bits, signed or unsigned, lead to mapped memory with other
    bytes. A kernel that computes one reads or writes the wrong page and does not fault.
    On a CPU, memory that is not touched is not allocated.

    Args:
        pages: (3, H, N, C) uint8, contiguous.

    Returns:
        A cache, (num_blocks, H, N, C) uint8, and the numbers of the blocks that hold
        the pages, (3,) int64.

    """
    page_bytes = pages[0].numel()
    blocks = [5, 2**31 // page_bytes + 1, 2**32 // page_bytes + 2]
    num_blocks = blocks[-1] + 1
    memory = torch.empty(
        2**31 + num_blocks * page_bytes, dtype=torch.uint8, device=DEVICE
    )
    cache = memory[2**31 :].view(num_blocks, *pages.shape[1:])
    # The last two offsets wrap around to minus 2**31 or zero, plus a few pages.
    memory[: 4 * page_bytes] = 0xFF
    cache[:4] = 0xFF
    cache[blocks] = pages
    return cache, torch.tensor(blocks, device=DEVICE)


def num_blocks_for(seq_lens: list[int], block_size: int) -> int:
    """Number of blocks of a cache for the sequences, with three to spare."""
    return sum(math.ceil(length / block_size) for length in seq_lens) + 3


def make_block_table(seq_lens: list[int], block_size: int) -> torch.Tensor:
    """Distinct random blocks of ``num_blocks_for`` blocks, (R, max_blocks) int32.

    Entries past a sequence's end are INVALID_BLOCK, also in the last column.
    """
    counts = [math.ceil(length / block_size) for length in seq_lens]
    generator = torch.Generator().manual_seed(len(seq_lens))
    blocks = torch.randperm(num_blocks_for(seq_lens, block_size), generator=generator)
    table = torch.full((len(seq_lens), max(counts) + 1), INVALID_BLOCK)
    for row, part in enumerate(blocks[: sum(counts)].split(counts)):
        table[row, : counts[row]] = part
    return table.to(DEVICE, torch.int32)


def slots_of(
    block_table_row: torch.Tensor, first: int, last: int, block_size: int
) -> torch.Tensor:
    """Slots of a sequence's positions first to last - 1, (last - first,) int64."""
    positions = torch.arange(first, last, device=block_table_row.device)
    blocks = block_table_row[positions // block_size].long()
    return blocks * block_size + positions % block_size


def fill_cache(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: list[int],
    layout: TurboFormat,
    dtype: torch.dtype = torch.bfloat16,
    num_stored: int | None = None,
) -> None:
    """Store Gaussian K and V of sequences, or their last tokens, by the reference."""
    num_kv_heads, block_size = kv_cache.shape[1:3]
    for row, length in enumerate(seq_lens):
        first = max(length - (num_stored or length), 0)
        key, value = (
            gaussian(length - first, num_kv_heads, size, dtype=dtype, seed=seed)
            for seed, size in enumerate(
                (layout.head_size, layout.head_size_v), 2 * row + 100
            )
        )
        slots = slots_of(block_table[row], first, length, block_size)
        reference.store(StoreCall(kv_cache, slots, key, value, layout))


def load_context(
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    layout: TurboFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, each (length, H, D) fp32, rotated back, that attention should see."""
    slots = slots_of(block_table_row, 0, length, kv_cache.shape[2])
    keys, values = reference.load(kv_cache, slots, layout)
    keys = reference.inverse_rotate(keys) * layout.key_codebook.gain
    return keys, reference.inverse_rotate(values)
