# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The comparison of the tests: a wrong number is noticed, and its place reported."""

import math

import pytest
import torch

from .attention_utils import assert_within


def test_numbers_within_the_bound_pass():
    expected = torch.tensor([[1.0, -2.0], [0.0, 4.0]])
    assert_within(expected + 0.25, expected, 0.25)
    assert_within(expected.half(), expected, torch.tensor([0.0, 0.5]))


@pytest.mark.parametrize("allowed", [0.5, torch.tensor([[0.5], [0.25]])])
def test_the_worst_number_is_named(allowed):
    expected = torch.zeros(2, 3)
    found = torch.tensor([[0.75, 0.0, 0.0], [0.0, 0.0, -2.0]])
    with pytest.raises(AssertionError) as failure:
        assert_within(found, expected, allowed, "sequence 7")
    text = str(failure.value)
    assert text.startswith("sequence 7: 2 of 6 differ by more than is allowed")
    assert "at (1, 2) is -2, expected 0, error 2, allowed 0." in text


@pytest.mark.parametrize("in_found", [True, False])
def test_nan_is_wrong(in_found):
    found, expected = torch.zeros(4), torch.zeros(4)
    (found if in_found else expected)[2] = math.nan
    with pytest.raises(AssertionError, match=rf"1 of 4 .*, {int(in_found)} are NaN"):
        assert_within(found, expected, 1.0)
