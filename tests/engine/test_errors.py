# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The messages that a user's mistake gets."""

import os
from pathlib import Path
from typing import Any

import pytest
from harness import TIMEOUT_S, Engine, Jobs, child_variables, run_python
from scenarios import TURBO_DTYPES

NO_SUCH_MODEL = "/no/such/model"
# Memory for some blocks, and not for a whole sequence in any format.
TOO_LITTLE = {
    "kv_cache_memory_bytes": 512 << 10,
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
}


@pytest.fixture(scope="module")
def outcome(jobs: Jobs) -> dict[str, Any]:
    def engine(dtype: str, **args: Any) -> Engine:
        return Engine({"kv_cache_dtype": dtype, **args}, may_fail=True)

    job = {
        "dtype": engine("turbo5"),
        "model": Engine(model=NO_SUCH_MODEL, may_fail=True),
    }
    for dtype in ("auto", *TURBO_DTYPES):
        job[f"memory-{dtype}"] = engine(dtype, **TOO_LITTLE)
    return jobs.start("errors", "v1", job).result()


def test_unknown_dtype_lists_the_known(outcome: dict[str, Any]):
    error = outcome["dtype"]["error"]
    assert "turbo5" in error
    for dtype in TURBO_DTYPES:
        assert f"'{dtype}'" in error


def test_an_error_that_no_job_expects_is_raised(jobs: Jobs):
    """The error has the log's last lines, and the next job runs."""
    job = jobs.start("unexpected", "v1", {"model": Engine(model=NO_SUCH_MODEL)})
    with pytest.raises(RuntimeError, match=f"(?s)status 1\n.*{NO_SUCH_MODEL}"):
        job.result()
    job = jobs.start(
        "expected", "v1", {"model": Engine(model=NO_SUCH_MODEL, may_fail=True)}
    )
    assert NO_SUCH_MODEL in job.result()["model"]["error"]


def test_missing_model_is_named(outcome: dict[str, Any]):
    assert NO_SUCH_MODEL in outcome["model"]["error"]


@pytest.mark.parametrize("dtype", ["auto", *TURBO_DTYPES])
def test_too_little_memory_says_what_to_change(outcome: dict[str, Any], dtype: str):
    error = outcome[f"memory-{dtype}"]["error"]
    assert "KV cache" in error
    assert "max_model_len" in error


def test_command_line_refuses_an_unknown_dtype(model: Path):
    words = ("-m", "vllm.entrypoints.cli.main", "serve", model)
    options = ("--kv-cache-dtype", "turbo5")
    env = os.environ | child_variables("v1")
    outcome = run_python(*words, *options, env=env, timeout=TIMEOUT_S)
    assert outcome.returncode
    (reason,) = (line for line in outcome.stderr.splitlines() if "turbo5'." in line)
    assert "kv_cache_dtype" in reason
    for dtype in TURBO_DTYPES:
        assert f"'{dtype}'" in reason
