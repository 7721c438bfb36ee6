# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Answers must not depend on how vLLM batches, chunks, caches or preempts.

Each case is one cache dtype on one model runner. With `turbo_prefill` "stored" the
turbo dtypes are held to equality like vLLM's own cache. With "raw", the default, a
token may see its neighbours quantised or not, and the difference is bounded.
"""

from dataclasses import dataclass
from statistics import mean
from typing import Any

import pytest
from harness import (
    Engine,
    Jobs,
    Runner,
    decided_tokens,
    kl_divergences,
    requests_of,
    tie,
    tokens_of,
    values_to_come,
)
from scenarios import (
    ALL_BYTES,
    BLOCK,
    DRAFTED,
    FOLLOWERS,
    LONG,
    MIXED,
    NUM_DRAFTS,
    NUM_GENERATED,
    PREFIX,
    PROMPTS,
    REFERENCE,
    SCARCE,
    TURBO_DTYPES,
    engines,
)

# The divergence that rounding may cause, in nats at any position. The order of sums
# causes about 1e-10 in fp32. Under a turbo dtype it may flip one of a token's many
# codes, a small part of quantisation's error.
KL_TOLERANCE = {"auto": 1e-6, "turbo": 1e-3}
# Mean KL in nats between runs that see the same tokens quantised or raw. The noise is
# large, because the model's attention is sharp.
KL_BOUND = {"turbo4": 0.06, "turbo3": 0.3}


@dataclass(frozen=True)
class Case:
    """One cache dtype on one model runner."""

    dtype: str
    runner: Runner
    prefill: str | None = None
    has_window: bool = False

    @property
    def name(self) -> str:
        window = "window" if self.has_window else None
        return "-".join(filter(None, (self.dtype, self.prefill, window, self.runner)))

    @property
    def engines(self) -> dict[str, Engine]:
        return engines(self.dtype, self.prefill, self.runner, self.has_window)


# A case takes a minute and more. The runners treat all dtypes alike, and the kernels'
# tests compare their bytes, so that one dtype runs on V2.
EQUAL = [
    Case("auto", "v1"),
    Case("auto", "v2"),
    *(Case(dtype, "v1", "stored") for dtype in TURBO_DTYPES),
    Case("turbo4", "v2", "stored"),
]
BOUNDED = [
    Case("turbo4", "v1", "raw"),
    Case("turbo4", "v2", "raw"),
    Case("turbo4", "v2", "raw", has_window=True),
    Case("turbo3", "v1", "raw"),
]

IN_CI = ("turbo4-stored-v2", "turbo4-raw-v1", "turbo4-raw-window-v2")


class Outcome:
    """A case's results, with the answers each prompt had alone."""

    def __init__(self, case: Case, engines: dict[str, Any]) -> None:
        self.case = case
        self.engines = engines
        alone = requests_of(engines["plain"], "one_by_one")
        self.alone = dict(zip(map(tuple, REFERENCE), alone, strict=True))

    def call(self, engine: str, call: str) -> dict[str, Any]:
        return self.engines[engine]["calls"][call]

    def assert_as_alone(
        self,
        engine: str,
        call: str,
        prompts: list[list[int]],
        seen_alike: bool = False,
    ) -> None:
        """Asserts each prompt's answer, or its noise, against its run alone.

        Distributions agree wherever the contexts do. Tokens agree up to a tie that
        rounding may decide, which most prompts never meet. With raw prefills both hold
        if each run sees the same tokens as computed, and the rest as stored
        (`seen_alike`).
        """
        requests = requests_of(self.engines[engine], call)
        pairs = [
            (self.alone[tuple(prompt)], request)
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        divergences = [kl for pair in pairs for kl in kl_divergences(*pair)]
        if self.case.prefill == "raw" and not seen_alike:
            assert mean(divergences) < KL_BOUND[self.case.dtype]
            return
        tolerance = KL_TOLERANCE["auto" if self.case.dtype == "auto" else "turbo"]
        assert max(divergences) < tolerance
        for alone, request in pairs:
            decided = decided_tokens(alone, tie(tolerance))
            assert request["tokens"][: len(decided)] == decided
        # Tokens behind a tie may have another context, and are not compared then.
        assert 2 * len(divergences) > NUM_GENERATED * len(pairs)


def parameter(case: Case) -> Any:
    """Marks a case as the matrix's if one in CI differs in runner or dtype alone."""
    marks = [] if case.name in IN_CI else [pytest.mark.matrix]
    return pytest.param(case, marks=marks, id=case.name)


@pytest.fixture(params=[parameter(case) for case in EQUAL + BOUNDED], scope="module")
def outcome(request: pytest.FixtureRequest, jobs: Jobs) -> Outcome:
    # The other cases that are to come start as well: they run side by side.
    for case in [request.param, *values_to_come(request, "outcome")]:
        jobs.start(case.name, case.runner, case.engines)
    return Outcome(request.param, jobs.results[request.param.name].result())


def test_runs_on_the_runner_asked_for(outcome: Outcome):
    assert {e["runner"] for e in outcome.engines.values()} == {outcome.case.runner}


def test_batched_as_alone(outcome: Outcome):
    first_step = outcome.call("plain", "batched")["steps"][0]
    assert first_step == [[len(prompt), 0] for prompt in PROMPTS]
    outcome.assert_as_alone("plain", "batched", PROMPTS, seen_alike=True)


def test_prefix_cache(outcome: Outcome):
    outcome.assert_as_alone("prefix", "cold", PROMPTS, seen_alike=True)
    warm = requests_of(outcome.engines["prefix"], "warm")
    # The last token is always computed, so a prompt of whole blocks loses one.
    cached = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    assert [request["num_cached_tokens"] for request in warm] == cached
    outcome.assert_as_alone("prefix", "warm", PROMPTS)


def test_long_first_chunk_beside_short_prefix_hits(outcome: Outcome):
    """The longest query has no context and others have, which are shorter in all."""
    first_step = outcome.call("prefix", "mixed")["steps"][0]
    hits = [[len(prompt) - len(PREFIX), len(PREFIX)] for prompt in FOLLOWERS]
    assert first_step == [[len(LONG), 0], *hits]
    outcome.assert_as_alone("prefix", "mixed", MIXED)


def test_chunked_prefill(outcome: Outcome):
    steps = outcome.call("chunked", "chunked")["steps"]
    continued = [
        new for step in steps for new, computed in step if computed and new > 1
    ]
    assert len(continued) > 3
    # A chunk runs beside other requests' decodes.
    assert any(min(step)[0] == 1 < max(step)[0] for step in steps)
    outcome.assert_as_alone("chunked", "chunked", PROMPTS)


def test_preemption(outcome: Outcome):
    assert outcome.call("scarce", "scarce")["num_preemptions"] > 0
    outcome.assert_as_alone("scarce", "scarce", SCARCE)


def test_drafts(outcome: Outcome):
    """A step that verifies drafts gives what steps of one token give."""
    if outcome.case.runner == "v2":
        pytest.skip("vLLM's kernels for drafts do not run in the interpreter")
    verified = [
        {new for new, computed in step if computed}
        for call in ("batched", "one")
        for step in outcome.call("drafts", call)["steps"]
    ]
    most = 1 + NUM_DRAFTS
    assert {most} in verified
    assert any(len(lengths) > 1 and most in lengths for lengths in verified)
    outcome.assert_as_alone("drafts", "batched", DRAFTED)
    outcome.assert_as_alone("drafts", "one", [ALL_BYTES])


def test_attention_decides_every_answer(outcome: Outcome):
    """Guards the tests above: were attention ignored, they would all pass."""
    runs = (tokens_of(requests_of(outcome.engines[e])) for e in ("zeroed", "plain"))
    assert all(without != normal for without, normal in zip(*runs, strict=True))
