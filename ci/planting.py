# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Defects that are planted in the CUDA kernels: see cuda_defects.py."""

from typing import NamedTuple

BARRIER = "  __syncthreads();\n"


class Change(NamedTuple):
    """A change to a source that changes no result.

    Attributes:
        source: The source's path in ``cuda_build.SOURCE_DIR``.
        old: The text to replace, which is there once.
        new: The text in its place.

    """

    source: str
    old: str
    new: str


class Defect(NamedTuple):
    """A change to a source that a test has to notice.

    Attributes:
        source: The source's path in ``cuda_build.SOURCE_DIR``.
        old: The text to replace, which is there ``times`` times.
        new: The text in its place.
        test: The test that has to fail.
        selected: pytest's -k, which selects the test's cases.
        times: How often ``old`` is there.
        shown_by: A harmless change that is planted as well, or None. Without it, a GPU
            shows the defect only by chance. The test has to pass with it alone.

    """

    source: str
    old: str
    new: str
    test: str = ""
    selected: str = ""
    times: int = 1
    shown_by: Change | None = None
