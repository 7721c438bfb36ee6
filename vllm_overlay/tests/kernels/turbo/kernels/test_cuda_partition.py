# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode kernel's cut of a batch, tested with its source compiled for the host.

The lanes of a warp are threads. Undefined behaviour ends the program.
"""

import os
import random
import shutil
import subprocess
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm.v1.attention.ops.turbo.cuda.build import HEADER_NAME, SOURCE_DIR
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.decode import tile_warps
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import Variant

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

# The part of CUDA that partition.cuh needs, in place of CUDA's header.
SHIM = r"""
#pragma once
#include <pthread.h>
#include <algorithm>
#include <atomic>
#define __device__
#define __forceinline__ inline
#define __noinline__
using std::max;
using std::min;
struct __half;
inline const struct {
  int x;
} gridDim = {1};
inline pthread_barrier_t barrier;
inline std::atomic<int> reduced;
template <typename F>
int reduce(int x, int start, F combine) {
  if (pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD)
    reduced = start;
  pthread_barrier_wait(&barrier);
  int seen = reduced;
  while (!reduced.compare_exchange_weak(seen, combine(seen, x))) {
  }
  pthread_barrier_wait(&barrier);
  return reduced;
}
inline int __reduce_add_sync(unsigned, int x) {
  return reduce(x, 0, [](int a, int b) { return a + b; });
}
inline int __reduce_max_sync(unsigned, int x) {
  return reduce(x, -1, [](int a, int b) { return max(a, b); });
}
"""
# A line of input is passes, warps, splits, a window and lengths. The answer is a
# partition.
PROGRAM = r"""
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>
#include "decode/partition.cuh"

int main() {
  pthread_barrier_init(&barrier, nullptr, 32);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream numbers(line);
    int num_passes, num_warps, length;
    turbo::AttentionParams p = {};
    numbers >> num_passes >> num_warps >> p.num_splits >> p.sliding_window;
    std::vector<int> lengths;
    while (numbers >> length) lengths.push_back(length);
    p.seq_lens = p.known_lens = lengths.data();
    p.num_seqs = int(lengths.size());
    p.query_len = 1;
    turbo::Partition results[32];
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; ++lane) {
      lanes.emplace_back([&, lane] {
        results[lane] = turbo::partition(p, num_passes, num_warps, lane);
      });
    }
    for (auto& lane : lanes) lane.join();
    const auto& cut = results[0];
    std::printf("%d %d %d %d\n", cut.team_size, cut.range, cut.num_ranges,
                int(cut.aligned));
    for (const auto& other : results) {
      if (other.range != cut.range || other.num_ranges != cut.num_ranges)
        return 1;
    }
  }
}
"""


# kAllTokens of common/tensors.cuh.
ALL_TOKENS = 1 << 30


class Case(NamedTuple):
    """The arguments of ``partition``, and the sequences' lengths."""

    num_passes: int
    num_warps: int
    num_splits: int
    sliding_window: int
    seq_lens: list[int]


class Cut(NamedTuple):
    """The fields of ``Partition`` in partition.cuh."""

    team_size: int
    range: int
    num_ranges: int
    aligned: bool


class Instance(NamedTuple):
    """A module of a head size, for keys with or without an offset."""

    head_size: int
    has_key_offset: bool


INSTANCES = {
    "plain": Instance(128, False),
    "offset": Instance(128, True),
    "shared": Instance(512, False),
}


@pytest.fixture(scope="module", params=INSTANCES.values(), ids=INSTANCES)
def instance(request) -> Instance:
    return request.param


@pytest.fixture(scope="module")
def program(tmp_path_factory, instance) -> Path:
    folder = tmp_path_factory.mktemp("partition")
    (folder / "cuda_fp16.h").write_text(SHIM)
    layout = TurboFormat.from_cache_dtype("turbo4", instance.head_size)
    header = layout_header(layout, Variant(instance.has_key_offset))
    (folder / HEADER_NAME).write_text(header)
    (folder / "main.cpp").write_text(PROGRAM)
    assert COMPILER is not None
    command: list[str | Path] = [COMPILER, "-std=c++17", "-O1", "-pthread"]
    command += ["-Wno-unknown-pragmas"]
    command += ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
    command += [f"-I{folder}", f"-I{SOURCE_DIR}", folder / "main.cpp", "-o"]
    result = subprocess.run([*command, folder / "main"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder / "main"


def cut_all(program: Path, cases: list[Case]) -> list[Cut]:
    lines = [" ".join(map(str, [*case[:-1], *case.seq_lens])) for case in cases]
    result = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    rows = [list(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(rows) == len(cases)
    return [Cut(a, b, c, bool(d)) for a, b, c, d in rows]


def check(case: Case, cut: Cut, instance: Instance) -> None:
    """Check that ranges hold every tile of a window, and no pass has more ranges than
    splits. With an offset of K they begin at even tiles of a sequence, because both
    tiles of a pair must have the same offset.
    """
    assert cut.team_size in (tile_warps(instance.head_size), 4)
    assert case.num_warps % cut.team_size == 0
    unit = 2 if instance.has_key_offset else 1
    firsts = [max(length - case.sliding_window, 0) for length in case.seq_lens]
    firsts = [first // TILE_TOKENS // unit * unit for first in firsts]
    ends = [-(-length // TILE_TOKENS) for length in case.seq_lens]
    tiles = [end - first for first, end in zip(firsts, ends)]
    if instance.has_key_offset:
        tiles = [tile + tile % 2 for tile in tiles]
        assert cut.range % 2 == 0 or not any(tiles)
    counted = [n for n in tiles for _ in range(case.num_passes)]
    if cut.range == 0:
        assert not any(tiles) and cut.num_ranges == 0
        return
    assert cut.range > 0
    if cut.aligned:
        counted = [-(-n // cut.range) * cut.range for n in counted]
    ends = list(accumulate(counted, initial=0))
    assert cut.num_ranges == -(-ends[-1] // cut.range)
    for first, last in zip(ends, ends[1:]):
        if last > first:
            splits = (last - 1) // cut.range - first // cut.range + 1
            assert splits <= case.num_splits, (case, cut)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 64])
@pytest.mark.parametrize("num_seqs", [1, 2, 31, 32, 33, 300])
def test_sequences_without_cached_tokens(program, instance, num_splits, num_seqs):
    """Prompts of one token, and padding, have no tiles and no range."""
    case = Case(8, 1584, num_splits, ALL_TOKENS, [0] * num_seqs)
    (cut,) = cut_all(program, [case])
    assert cut.num_ranges == 0
    check(case, cut, instance)


def test_random_batches(program, instance):
    generator = random.Random(0)
    cases = []
    for _ in range(600):
        num_seqs = generator.choice([1, 2, 5, 32, 33, 70])
        longest = generator.choice([1, 16, 17, 300, 5000, 100_000])
        shortest = generator.choice([0, longest - longest // 8])
        lengths = [generator.randint(shortest, longest) for _ in range(num_seqs)]
        num_warps = generator.choice([4, 8, 20, 16 * 12, 108 * 8, 132 * 12])
        num_passes = generator.choice([1, 2, 8, 48])
        num_splits = generator.choice([1, 2, 3, 8, 64])
        window = generator.choice([1, 16, 17, 1000, ALL_TOKENS])
        cases.append(Case(num_passes, num_warps, num_splits, window, lengths))
    cuts = cut_all(program, cases)
    for case, cut in zip(cases, cuts):
        check(case, cut, instance)
    assert {cut.team_size for cut in cuts} == {tile_warps(instance.head_size), 4}
    assert {cut.aligned for cut in cuts} == {False, True}


@pytest.mark.parametrize("num_splits", [1, 8, 64])
def test_a_window_alone_is_divided(program, num_splits):
    """The cut does not depend on the lengths, only on the window."""
    window, step = 1024, 2 * TILE_TOKENS
    cases = [
        Case(8, 1584, num_splits, window, [window + more * step] * 3)
        for more in (0, 1, 100, 4000)
    ]
    cuts = cut_all(program, cases)
    assert len(set(cuts)) == 1 and cuts[0].num_ranges > 0
