# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention over packed pages as a CUDA kernel, built by FlashInfer's JIT.

As ``triton_decode``, but one persistent grid cuts the batch's tiles evenly among
its warps, whatever the lengths. ``cuda_merge`` joins the partial results.
"""

import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.cuda_build import (
    CudaModule,
    build_and_load,
    load_tvm_module,
)
from vllm.v1.attention.ops.turbo.cuda_merge import merge_splits
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.triton_merge import (
    MAX_KV_SPLITS,
    NewestToken,
    count_sequences,
)

SUPPORTED_HEAD_SIZES = (64, 128, 256)
# Bits of a trellis-coded code in the plane of branches; the path has one more.
BRANCH_BITS = 2
# Queries of a KV head up to which the tensor core's columns are shared by two halves
# of the work.
MAX_PAIRED_QUERIES = 4
# Warps a block, one block a multiprocessor; multiples of the team size in
# segment.cuh. More leave too few registers. Two pairs of tiles a warp are in flight.
_TEAM_WARPS = 4
_TILES_IN_FLIGHT = 4
# Splits of all query tokens of a batch that there is room for in any case.
_MAX_PARTIALS = 4096
# Queries in int8, each column's for both halves of the scale groups; a few numbers.
_QUERY_COLUMNS = 2 * 8
_SHARED_BYTES_BESIDE_TILES = 256


def _max_warps(head_size: int, paired: bool) -> int:
    if head_size > 128:
        return 8
    return 16 if head_size < 128 and paired else 12


def _word(values: list[int]) -> str:
    return "0x" + bytes(v & 0xFF for v in reversed(values)).hex().upper() + "u"


def half2(value: float) -> str:
    """A number twice in fp16, as C++ has the bits."""
    bits = struct.unpack("<H", struct.pack("<e", value))[0]
    return f"0x{bits:04X}{bits:04X}u"


def constants_header(layout: TurboFormat) -> str:
    """The C++ header with the constants of a layout."""
    integers = [round(m * fmt.KEY_LEVEL_UNIT) for m in layout.key_codebook.magnitudes]
    negative = [-m for m in reversed(integers)]
    positive = [m + 1 for m in reversed(integers)]
    linear, quadratic = layout.value_codebook.coefficients
    words = layout.scale_words
    key_branch_bits = BRANCH_BITS if layout.key_codebook.trellis else layout.key_bits
    constants = {
        "HEAD_SIZE": layout.head_size,
        "NUM_UNITS": layout.num_units,
        "KEY_BITS": layout.key_bits,
        "VALUE_BITS": layout.value_bits,
        "KEY_BRANCH_BITS": key_branch_bits,
        "KEY_PATHS_OFFSET": fmt.TILE_TOKENS * layout.head_size * key_branch_bits // 8,
        "VALUE_PATHS_OFFSET": fmt.TILE_TOKENS * layout.head_size * BRANCH_BITS // 8,
        "TILE_TOKENS": fmt.TILE_TOKENS,
        "TILE_BYTES": layout.tile_bytes,
        "VALUE_CODES_OFFSET": layout.value_codes_offset,
        "KEY_SCALES_OFFSET": layout.key_scales_offset,
        "VALUE_SCALES_OFFSET": layout.value_scales_offset,
        "SCALE_SHIFT": fmt.SCALE_SHIFT,
        "SCALE_DELTA_BITS": words.delta_bits,
        "SCALE_DELTA_STEP": words.delta_step,
        "KEY_NEGATIVE_LOW": _word(negative[:4]),
        "KEY_NEGATIVE_HIGH": _word(negative[4:]),
        "KEY_POSITIVE_LOW": _word(positive[:4]),
        "KEY_POSITIVE_HIGH": _word(positive[4:]),
        "KEY_LEVEL_UNIT": f"{float(fmt.KEY_LEVEL_UNIT)}f",
        "VALUE_LINEAR": half2(linear),
        "VALUE_QUADRATIC": half2(quadratic),
    }
    lines = ["#pragma once", ""]
    lines += [f"#define {name} {value}" for name, value in constants.items()]
    return "\n".join(lines) + "\n"


def unsupported_reason(layout: TurboFormat) -> str | None:
    """Why there is no instance of the kernel for a layout; None if there is one."""
    if layout.head_size not in SUPPORTED_HEAD_SIZES:
        return f"head size {layout.head_size} has no CUDA decode kernel"
    return None


def num_warps(layout: TurboFormat, paired: bool, shared_bytes: int) -> int:
    """Warps a block, of which ``shared_bytes`` of shared memory serve all."""
    per_warp = _TILES_IN_FLIGHT * layout.tile_bytes + _SHARED_BYTES_BESIDE_TILES
    per_warp += _QUERY_COLUMNS * layout.head_size
    fitting = shared_bytes // per_warp // _TEAM_WARPS * _TEAM_WARPS
    assert fitting > 0, (layout, shared_bytes)
    return min(_max_warps(layout.head_size, paired), fitting)


def load(layout: TurboFormat, num_queries: int, device: torch.device) -> Any:
    """Build, if need be, and load the module for a number of queries.

    Args:
        layout: The cache's format.
        num_queries: Queries of a sequence and KV head: query heads, times tokens.
        device: Where it is to run.

    Raises:
        RuntimeError: If it cannot be built.

    """
    reason = unsupported_reason(layout)
    if reason is not None:
        raise RuntimeError(reason)
    return _load(layout, num_queries <= MAX_PAIRED_QUERIES, device)


@cache
def _load(layout: TurboFormat, paired: bool, device: torch.device) -> Any:
    properties: Any = torch.cuda.get_device_properties(device)
    warps = num_warps(layout, paired, properties.shared_memory_per_block_optin)
    return build_and_load(
        CudaModule(
            "decode",
            f"{layout.name}_{layout.head_size}",
            "turbo_constants.h",
            constants_header(layout),
            (f"-DDECODE_PAIRED={str(paired).lower()}", f"-DDECODE_WARPS={warps}"),
        ),
        load_tvm_module,
    )


def num_kv_splits(
    num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """Splits a sequence at most: room for partial results.

    The kernel itself decides on the ranges that its warps attend to, by lengths. A
    sequence that is as long as all others together, or alone, is to have teams of
    warps on every multiprocessor, unless the batch is so large that room for it would
    cost too much.

    Args:
        num_seqs: Sequences in the (padded) batch.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the GPU.
        query_len: Query tokens a sequence.

    """
    num_seqs = max(1, num_seqs)
    teams = num_sms * _max_warps(128, True) // _TEAM_WARPS
    alone = -(-teams // num_kv_heads) + 1
    average = -(-teams * _TEAM_WARPS // (num_seqs * num_kv_heads))
    room = max(_MAX_PARTIALS // (num_seqs * query_len), 2 * average + 1)
    return max(2, min(MAX_KV_SPLITS, alone, room))


def attend(
    load_kernel: Callable[[TurboFormat, int, torch.device], Callable[..., None]],
    rotated_query: torch.Tensor,
    query_scale: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: TurboFormat,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
    newest: NewestToken | None,
    query_len: int,
    query_start_loc: torch.Tensor | None,
) -> None:
    """Run a kernel that makes partial results of pages, and the merge of these.

    ``load_kernel`` gives the kernel of a layout, number of queries of a sequence and KV
    head, and device. The other arguments are those of ``decode_attention``.

    """
    num_tokens, num_heads, _ = rotated_query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    assert block_size % fmt.TILE_TOKENS == 0, block_size
    assert kv_cache.stride()[2:] == (layout.slot_size, 1), kv_cache.stride()
    assert all(stride % 16 == 0 for stride in kv_cache.stride()[:2])
    assert kv_cache.data_ptr() % 16 == 0
    assert rotated_query.is_contiguous() and query_scale.is_contiguous()
    assert partial.is_contiguous() and partial_lse.is_contiguous()
    assert output.stride(2) == 1 and block_table.stride(1) == 1
    num_seqs = count_sequences(num_tokens, query_len, query_start_loc)
    if num_seqs == 0:
        return
    num_splits = partial.shape[0] // (num_seqs * query_len)
    assert 1 <= num_splits <= MAX_KV_SPLITS, num_splits
    num_queries = num_heads // num_kv_heads * query_len
    load_kernel(layout, num_queries, kv_cache.device)(
        rotated_query,
        query_scale,
        kv_cache,
        block_table,
        seq_lens,
        partial,
        partial_lse,
        query_start_loc,
        num_seqs,
        query_len,
        newest is not None,
    )
    merge_splits(
        partial,
        partial_lse,
        seq_lens,
        output,
        num_kv_heads,
        newest,
        query_len=query_len,
        query_start_loc=query_start_loc,
    )


def _load_decode(
    layout: TurboFormat, num_queries: int, device: torch.device
) -> Callable[..., None]:
    return load(layout, num_queries, device).decode


def decode_attention(
    rotated_query: torch.Tensor,
    query_scale: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: TurboFormat,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
    newest: NewestToken | None = None,
    query_len: int = 1,
    query_start_loc: torch.Tensor | None = None,
) -> None:
    """Attend from each sequence's last tokens to its cached tokens, causally.

    Arguments are those of ``triton_decode.decode_attention``, of a layout without an
    ``unsupported_reason``, with blocks and heads of the cache at multiples of 16 bytes.
    S is the most splits of a sequence; with S = 1 a result does not depend on the rest
    of the batch.

    """
    attend(
        _load_decode,
        rotated_query,
        query_scale,
        kv_cache,
        block_table,
        seq_lens,
        layout,
        partial,
        partial_lse,
        output,
        newest,
        query_len,
        query_start_loc,
    )
