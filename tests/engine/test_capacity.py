# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tokens that vLLM's block manager fits into the same memory."""

from typing import Any

import pytest
from harness import Engine, Jobs
from scenarios import GAIN, TURBO_DTYPES


@pytest.fixture(scope="module")
def capacity(jobs: Jobs) -> dict[str, int]:
    def engine(dtype: str) -> Engine:
        args: dict[str, Any] = {
            "dtype": "bfloat16",
            "kv_cache_dtype": dtype,
            "kv_cache_memory_bytes": 64 << 20,
        }
        return Engine(args)

    dtypes = ("auto", *TURBO_DTYPES)
    outcome = jobs.start(
        "capacity", "v1", {dtype: engine(dtype) for dtype in dtypes}
    ).result()
    return {
        dtype: outcome[dtype]["num_blocks"] * outcome[dtype]["block_size"]
        for dtype in dtypes
    }


@pytest.mark.parametrize("dtype", TURBO_DTYPES)
def test_capacity_over_bf16(capacity: dict[str, int], dtype: str):
    assert capacity[dtype] / capacity["auto"] == pytest.approx(GAIN[dtype], rel=0.01)
