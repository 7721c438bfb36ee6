# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmarks' arms attend correctly, by the benchmarks' own gates.

Their timings mean nothing otherwise, and on a GPU an arm that fails is left out.
"""

import argparse
from pathlib import Path
from types import ModuleType

import pytest

from ..utils import ON_GPU, requires_triton

FOLDER = Path(__file__).parents[4] / "benchmarks" / "kernels"
# Around a block's end, and longer than a sliding window.
LENGTHS = (1, 17, 150)
# Arms of the other two presets are the same but for the codes.
DECODES = [
    "turbo4",
    "turbo4_triton",
    "turbo4_offset",
    "turbo4_direction",
    "turbo4_BLHNC",
    "turbo4_BHLNC",
    "turbo4_window",
    "turbo4_sliding128",
    "turbo4[32,4,2,0,3]",
    "k4v3_window",
]


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not FOLDER.exists():
        pytest.skip("the benchmarks are not beside the tests")
    monkeypatch.syspath_prepend(str(FOLDER))
    import benchmark_turbo_decode

    return benchmark_turbo_decode


@requires_triton
@pytest.mark.parametrize("name", DECODES)
def test_decodes(decode: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(decode, "GATE_LENS", LENGTHS)
    arm, _, numbers = name.partition("[")
    args = argparse.Namespace(
        arms=[arm],
        variants=[decode.parse_variant(numbers[:-1])] if numbers else [],
        block_size=16,
        device="cuda" if ON_GPU else "cpu",
    )
    makers = decode.choose_arms(args)
    decode.gate(makers[name], decode.Shape.parse("1x64x4x2x64"), args)


@requires_triton
@pytest.mark.parametrize(
    "name", ["turbo4", "turbo4_mean", "turbo4_listed", "turbo4_triton_listed"]
)
def test_latents(decode: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str):
    import benchmark_turbo_mla as mla

    monkeypatch.setattr(mla, "GATE_LENS", LENGTHS)
    args = argparse.Namespace(device="cuda" if ON_GPU else "cpu")
    mla.gate(mla.ARMS[name], mla.Shape.parse("1x64x4"), args)
