# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import sys
from pathlib import Path

import pytest
import torch

# The modules beside this one and the lab's, whatever pytest's import mode.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "lab")]


@pytest.fixture(autouse=True)
def seeded():
    """The numbers of a test do not hang on the tests before it."""
    torch.manual_seed(0)
