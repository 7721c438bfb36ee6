# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The emulated GPU runs small kernels right, and sees mistakes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm_turbo_cpu_standins.cuda import build
from vllm_turbo_cpu_standins.cuda.translate import translate

SOURCE = Path(__file__).parent / "emulated.cu"
SUM, REVERSE, HALVES, COPY, MULTIPLY, FOLLOW, MULTIPLY_GROUP, MATRICES = range(8)
THREADS = 64
needs_compiler = pytest.mark.skipif(
    build.compiler() is None, reason="needs a C++ compiler"
)


@pytest.fixture(scope="module")
def emulated() -> Callable[..., None]:
    library = build.build(SOURCE, SOURCE.parent, "emulated")
    return build.load(library, "emulated")


@needs_compiler
@pytest.mark.parametrize("kernel", [SUM, REVERSE, HALVES, FOLLOW])
def test_kernels_that_are_right(emulated, kernel):
    x = torch.arange(1.0, THREADS + 1)
    expected = {
        SUM: x.sum().expand(THREADS),
        REVERSE: x.view(2, 32).flip(1).flatten(),
        HALVES: x.view(4, 16)[[1, 0, 3, 2]].flatten(),
        FOLLOW: x,
    }
    y = torch.zeros(THREADS)
    emulated(kernel, x, y, 0, 1)
    assert torch.equal(y, expected[kernel])


@needs_compiler
def test_copies(emulated):
    x, y = torch.randn(8 * THREADS), torch.zeros(8 * THREADS)
    emulated(COPY, x, y, 0, 1)
    assert torch.equal(x, y)


@needs_compiler
def test_a_matrix_product(emulated):
    """The elements are integers, whose product is exact."""
    a = torch.randint(-9, 10, (16, 16)).float()
    b = torch.randint(-9, 10, (16, 8)).float()
    y = torch.zeros(16, 8)
    emulated(MULTIPLY, torch.cat([a.flatten(), b.flatten()]), y, 0, 1)
    assert torch.equal(y, a @ b)


@needs_compiler
def test_matrices_that_are_stored_and_loaded(emulated):
    x = torch.randint(-9, 10, (4, 32, 2)).float()
    y = torch.zeros(THREADS)
    emulated(MATRICES, x.flatten(), y, 0, 1)
    assert torch.equal(y, x.sum((0, 2)).repeat(2))


@needs_compiler
@pytest.mark.parametrize("overwritten", [0, 4])
def test_a_product_of_a_warpgroup(emulated, overwritten):
    """Its operand may be overwritten when all have waited for it."""
    x = torch.randint(-9, 10, (8, 16)).float()
    y = torch.zeros(8)
    emulated(MULTIPLY_GROUP, x, y, overwritten, 1)
    assert torch.equal(y, x.sum(1))


@needs_compiler
@pytest.mark.parametrize(
    "kernel, defect, message",
    [
        (SUM, 1, r"that thread \d+ reads, and nothing orders the two(.|\n)*in .*sum"),
        (SUM, 2, "an index is past the end of its array|of no variable"),
        (REVERSE, 1, "no thread can go on:(.|\n)*syncwarp(.|\n)*32 threads have ended"),
        (REVERSE, 2, "lanes of a warp differ: this one is at ballot"),
        (REVERSE, 3, "that thread 15 reads, and nothing orders the two"),
        (REVERSE, 4, "writes 4 bytes that thread 1 writes|of global memory"),
        (REVERSE, 5, "writes 4 bytes of global memory, of no tensor"),
        (REVERSE, 6, "writes 4 bytes of shared memory, of no variable"),
        (REVERSE, 7, "not aligned for what is there|no multiple"),
        (HALVES, 1, "no thread can go on:(.|\n)*waits at barrier 1"),
        (HALVES, 2, "and nothing orders the two"),
        (COPY, 1, "reads 4 bytes that a copy is on its way to"),
        (FOLLOW, 1, "writes 4 bytes before it has waited for the kernel before it"),
        (FOLLOW, 2, "thread 32 .* ends without having waited"),
        (MULTIPLY_GROUP, 1, r"product reads 16 bytes that thread \d+ writes"),
        (MULTIPLY_GROUP, 2, "writes 2 bytes that a product reads that has not been"),
        (MULTIPLY_GROUP, 3, "writes 2 bytes that a product reads that has not been"),
        (MULTIPLY_GROUP, 5, r"writes 2 bytes that thread \d+ reads, and nothing"),
        (MATRICES, 1, r"16 bytes that thread \d+ (read|write)s(.|\n)*emulated.cu:\d"),
        (MATRICES, 2, r"that thread \d+ (read|write)s, and nothing orders the two"),
    ],
)
def test_mistakes_are_seen(emulated, kernel, defect, message):
    x, y = torch.ones(8 * THREADS), torch.zeros(8 * THREADS)[:THREADS]
    if kernel == COPY:
        y = torch.zeros(8 * THREADS)
    with pytest.raises(RuntimeError, match=message):
        emulated(kernel, x, y, defect, 1)
    # The next launch is not affected.
    emulated(SUM, x, torch.zeros(THREADS), 0, 1)


@needs_compiler
def test_blocks_that_write_the_same_place_are_seen(emulated):
    """Blocks may write the same value there."""
    x, y = torch.ones(THREADS), torch.zeros(THREADS)
    emulated(SUM, x, y, 0, 2)
    with pytest.raises(RuntimeError, match="that another block writes"):
        emulated(SUM, x, y, 3, 2)


def test_translation_keeps_lines_and_names_what_it_does_not_know():
    source = 'int f() {\n  asm("ex2.approx.ftz.f32 %0,\\n"\n "%1;" : "=f"(y) : "f"(x));'
    translated = translate(source, "a.cu")
    assert translated.count("\n") == source.count("\n") + 1
    assert "exp2_approx(::emulator::Site::current(), y, x)" in translated
    with pytest.raises(ValueError, match=r"a\.cu:2: .* no instruction 'nop;'"):
        translate('\nasm volatile("nop;");', "a.cu")


def test_what_a_source_does_not_include_is_not_translated(tmp_path):
    """It may have instructions that the emulator does not know."""
    (tmp_path / "one").mkdir()
    source = tmp_path / "one" / "kernel.cu"
    source.write_text('#include "one/first.cuh"\n#include "made.h"\n')
    (tmp_path / "one" / "first.cuh").write_text('#include "second.cuh"\n')
    (tmp_path / "second.cuh").write_text('#include "one/first.cuh"\nint x;\n')
    (tmp_path / "other.cuh").write_text('asm("unknown;");\n')
    made = build.translated(source, tmp_path)
    names = {str(path.relative_to(made)) for path in made.rglob("*.cu*")}
    assert names == {"one/kernel.cu", "one/first.cuh", "second.cuh"}
    source.write_text('#include "other.cuh"\n')
    with pytest.raises(ValueError, match="other.cuh:1: .* no instruction 'unknown;'"):
        build.translated(source, tmp_path)


@needs_compiler
def test_assembly_of_macros_is_translated_where_they_are_used(tmp_path):
    source = tmp_path / "a.cu"
    lines = [
        "#pragma once",
        "#define EXP2(y, x) \\",
        *8 * ["  \\"],
        '  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));',
        "#if __CUDA_ARCH__ >= 900",
        "void f() { EXP2(z, 2.0f) }",
        "#endif",
    ]
    source.write_text("\n".join(lines) + "\n")
    translated = (build.translated(source, tmp_path) / "a.cu").read_text()
    found = translated.splitlines()[1:]
    assert (found[0], found[11], found[13]) == (lines[0], lines[11], lines[13])
    assert "exp2_approx(::emulator::Site::current(), z, 2.0f)" in found[12]
