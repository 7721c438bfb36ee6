# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs kernels in Triton's interpreter as it is, and as the stand-ins quicken it.

Usage: TRITON_INTERPRET=1 python interpreter_child.py RESULT. The result has, for each
way, the bytes of each kernel's output, or its error.
"""

import json
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from vllm_turbo_cpu_standins.interpreter import quicken

SIZE = 16


@triton.jit
def largest_of(x, AXIS: tl.constexpr):
    return tl.max(tl.abs(x), AXIS)


@triton.jit
def normalise(x):
    return x / largest_of(x, 1)[:, None], largest_of(x, 1)


@triton.jit
def arithmetic(x_ptr, out_ptr, count, factor, SIZE: tl.constexpr):
    """Types, broadcasts, reductions, masks and nested device functions."""
    row, column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    places = (row[:, None] * SIZE + column) + tl.program_id(0).to(tl.int64) * SIZE**2
    x = tl.load(x_ptr + places, mask=column < count, other=2.0)
    y, largest = normalise(x)
    bits = (y * 1000).to(tl.int32)
    bits = (bits >> 2 & 0xFF) | (bits << 8)
    y = y.to(tl.bfloat16).to(tl.float32) + tl.dot(y, tl.trans(y))
    y = tl.where(bits % 3 == 0, y.to(tl.float16), -tl.sum(y, 0))
    total = tl.zeros([SIZE], tl.float32)
    for step in range(count):
        total += tl.sum(tl.where(row[:, None] == step, y, 0.0), 0) * factor
    pair = tl.join(total[None, :] + largest[:, None], bits.to(tl.float32))
    even, odd = tl.split(pair)
    even = tl.reshape(tl.reshape(even, [SIZE // 2, 2, SIZE]), [SIZE, SIZE])
    low = (row.to(tl.uint8) * 3).to(tl.uint32, bitcast=False)
    result = even + odd * low[:, None] + tl.cumsum(x, 1)
    tl.store(out_ptr + places, result, mask=row[:, None] != 3)


@triton.jit
def overflow(x_ptr, out_ptr, count, factor, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out_ptr + places, (places + 2147483640) * 1.0)


@triton.jit
def unlike_shapes(x_ptr, out_ptr, count, factor, SIZE: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE), 0))


@triton.jit
def no_power_of_two(x_ptr, out_ptr, count, factor, SIZE: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.zeros([SIZE, 3], tl.float32), 0))


@triton.jit
def unlike_ranks(x_ptr, out_ptr, count, factor, SIZE: tl.constexpr):
    x = tl.zeros([SIZE], tl.float32).broadcast_to(SIZE, SIZE)
    tl.store(out_ptr + tl.arange(0, SIZE), tl.sum(x, 0))


KERNELS = (arithmetic, overflow, unlike_shapes, no_power_of_two, unlike_ranks)


def outcome(kernel: triton.JITFunction) -> str:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, SIZE, SIZE, generator=generator)
    out = torch.full_like(x, 7)
    try:
        kernel[(2,)](x, out, SIZE - 3, 0.3, SIZE)
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {cause}"
    return out.numpy().tobytes().hex()


def outcomes() -> dict[str, str]:
    return {kernel.fn.__name__: outcome(kernel) for kernel in KERNELS}


def main() -> None:
    plain = outcomes()
    quicken()
    result = {"plain": plain, "quick": outcomes(), "again": outcomes()}
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
