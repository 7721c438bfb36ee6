# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab's values of two bits: their error, their bytes, and the keys beside them."""

import pytest
import torch
from blockcodes import codebook_round_trip, trellis_codebook
from means import PRESETS
from scalar import gaussian_vectors, relative_error
from two_bits import KEYS, VALUE_BITS, two_bits, value_round_trip
from variants import preset

from vllm.v1.attention.ops.turbo.reference import codec


@pytest.mark.parametrize("head_size", [64, 128])
def test_values_err_as_the_code_does_on_gaussian_vectors(head_size: int):
    """docs/audit.md has the figure. The rate-distortion bound of two bits is 1/16."""
    x = gaussian_vectors(1000, head_size, seed=3)
    error = relative_error(value_round_trip(x), x)
    assert error == pytest.approx(0.079, abs=2e-3)


def test_a_value_takes_eight_levels_a_group():
    """Sixteen coordinates have one scale, and more levels than two bits name alone."""
    codebook = trellis_codebook(VALUE_BITS, 64)
    decoded = codebook_round_trip(gaussian_vectors(200, 64, seed=4), codebook)
    groups = codec.by_group(decoded).flatten(0, -2)
    assert all(len(torch.unique(group)) <= 8 for group in groups)
    assert any(len(torch.unique(group)) > 4 for group in groups)


@pytest.mark.parametrize("head_size, bytes_of", [(64, (52, 44)), (128, (104, 88))])
def test_bytes_of_a_token(head_size: int, bytes_of: tuple[int, int]):
    found = tuple(two_bits(name, head_size).num_bytes for name in KEYS)
    assert found == bytes_of
    assert found[0] == preset("turbo3", head_size).num_bytes


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_those_of_the_preset(name: str):
    assert KEYS[name] in PRESETS
    x = gaussian_vectors(50, 64, seed=5)
    assert torch.equal(two_bits(name, 64).key(x), preset(KEYS[name], 64).key(x))
