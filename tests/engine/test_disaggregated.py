# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine that goes on from the pages that another one's prefill has filled.

NIXL moves the pages through the host's memory, from a producer's process to another,
the consumer's.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trained
from harness import Call, Engine, Jobs, mean_divergence, requests_of, run_job
from quickstart import free_port
from turbo_quality.cases import HELD_OUT, MODEL, Plan, Vocabulary, build_tasks

pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")

BLOCK = 64
# So few that most rows of a recent window come from the pages that were handed over.
MAX_TOKENS = 7
# Tokens of texts: they end at a block's border, beside one, and within a block.
LENGTHS = (128, 65, 148, 100, 193, 90, 170, 128)
SETTINGS: dict[str, dict[str, Any]] = {
    "stored": {"turbo_prefill": "stored"},
    # The window's gain is measured alone.
    "window": {"turbo_window": "auto", "turbo_means": "off"},
}
CODES = {"turbo_prefill": "stored", "turbo_means": "off"}


@dataclass(frozen=True)
class Pair:
    """Two engines.

    Attributes:
        settings: A name of SETTINGS.
        connector: NIXL's connector that pulls pages, or the one that pushes them.
        produced: Tokens of the producer's blocks.

    """

    settings: str
    connector: str = "NixlConnector"
    produced: int = BLOCK

    def __str__(self) -> str:
        kind = self.connector.removeprefix("Nixl").removesuffix("Connector").lower()
        parts = [self.settings, kind]
        if self.produced != BLOCK:
            parts.append(f"{self.produced}-{BLOCK}")
        return "-".join(part for part in parts if part)


PULLED = Pair("window")
MATRIX = (
    Pair("stored"),
    Pair("stored", "NixlPushConnector"),
    Pair("stored", produced=16),
)


def tasks() -> list[dict[str, Any]]:
    """Texts with a fact that is asked for."""
    plan = Plan(0, 0, 0, 0, lengths=(512,), depths=(0.3,), cases=1)
    text = HELD_OUT.read_text(encoding="utf-8")
    found = build_tasks(text, plan, 0, Vocabulary(MODEL))
    return [task for task in found if task["kind"] == "needle"]


def prompts() -> list[list[int]]:
    """The prompts of tasks, then texts to go on with."""
    return [*(task["prompt"] for task in tasks()), *trained.texts(LENGTHS)]


def engine(call: Call, dtype: str = "turbo4", **attention: Any) -> Engine:
    args = {
        "kv_cache_dtype": dtype,
        "block_size": BLOCK,
        "dtype": "bfloat16",
        "max_model_len": 640,
        "attention_config": attention,
    }
    return Engine(args, {"batched": call}, model=str(MODEL))


def half(role: str, call: Call, pair: Pair) -> Engine:
    """One of the two engines."""
    made = engine(call, **SETTINGS[pair.settings])
    transfer = {
        "kv_connector": pair.connector,
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
    }
    args = made.args | {"kv_transfer_config": transfer}
    if role == "kv_producer":
        args["block_size"] = pair.produced
    return replace(made, args=args)


def run_halves(pool: ThreadPoolExecutor, folder: Path, pair: Pair) -> dict[str, Any]:
    """Returns the results of the consumer's job.

    Args:
        pool: Two threads at least, because one half waits for the other.
        folder: The folder of both jobs.
        pair: The engines.

    Raises:
        RuntimeError: If one of the two failed; the other does not wait for it then.

    """
    path = folder / "handed_over.json"
    first = Call(prompts(), 1, handed_over=str(path))
    then = Call(prompts(), MAX_TOKENS, taken_over=str(path))
    halves = {
        "producer": half("kv_producer", first, pair),
        "consumer": half("kv_consumer", then, pair),
    }
    runs = [
        pool.submit(
            run_job,
            folder / role,
            MODEL,
            "v2",
            {role: each},
            {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        )
        for role, each in halves.items()
    ]
    done, _ = wait(runs, return_when=FIRST_EXCEPTION)
    # A half that has lost the other one waits for these files.
    if any(run.exception() for run in done):
        path.write_text("[]")
        path.with_suffix(".taken").touch()
    _, consumer = (run.result() for run in runs)
    return consumer["consumer"]


@pytest.fixture(scope="module")
def alone(jobs: Jobs) -> dict[str, Any]:
    """Results of engines that prefill and decode."""
    call = Call(prompts(), MAX_TOKENS)
    engines = {"exact": engine(call, "auto"), "codes": engine(call, **CODES)}
    engines |= {name: engine(call, **options) for name, options in SETTINGS.items()}
    return jobs.start("one-engine", "v2", engines).result()


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(
    scope="module",
    params=[PULLED, *(pytest.param(each, marks=pytest.mark.matrix) for each in MATRIX)],
    ids=str,
)
def pair(
    request: pytest.FixtureRequest,
    pool: ThreadPoolExecutor,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict[str, Any]]:
    """A name of SETTINGS, and the consumer's results."""
    folder = tmp_path_factory.mktemp("halves")
    return request.param.settings, run_halves(pool, folder, request.param)


@pytest.fixture(scope="module")
def orphan(
    pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Results of a consumer whose producer was killed before it sent pages."""
    folder = tmp_path_factory.mktemp("orphan")
    path = str(folder / "handed_over.json")
    asked = prompts()[:1]
    first = half("kv_producer", Call(asked, 1, handed_over=path, dies=True), PULLED)
    lost = Call(asked, MAX_TOKENS, taken_over=path, lost=True)
    then = half("kv_consumer", lost, PULLED)
    own = Call(asked, MAX_TOKENS)
    then = replace(then, calls=then.calls | {"own": own})

    def run(name: str, each: Engine) -> dict[str, Any]:
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        return run_job(folder / name, MODEL, "v2", {name: each}, port)

    with pytest.raises(RuntimeError, match="SIGKILL|signal 9|-9|[Kk]illed"):
        pool.submit(run, "producer", first).result()
    assert Path(path).exists()
    return pool.submit(run, "consumer", then).result()["consumer"]


def divergence(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The mean divergence of decoded tokens, in nats; the first is the prefill's."""
    return mean_divergence(requests_of(first), requests_of(second), skipped=1)


def test_answers_are_those_of_one_engine(pair, alone):
    name, consumer = pair
    runs = requests_of(consumer), requests_of(alone[name])
    for task, own, theirs in zip(tasks(), *runs):
        length = len(task["answer"])
        assert own["tokens"][:length] == task["answer"] == theirs["tokens"][:length]


def test_no_prompt_is_prefilled_again(pair):
    """Only its last token is computed, because no distribution is handed over."""
    _, consumer = pair
    new = [new for step in consumer["calls"]["batched"]["steps"] for new, _ in step]
    assert set(new) == {1}


def test_pages_and_windows_come_along(pair, alone):
    """The consumer is as near to the exact cache as one engine, window included."""
    name, consumer = pair
    own = divergence(alone["exact"], consumer)
    assert own < 2 * divergence(alone["exact"], alone[name])
    if name == "window":
        # Without its rows it is nearer to a half.
        assert own < divergence(alone["exact"], alone["codes"]) / 5


def test_lost_pages_are_an_error(orphan):
    """No answer is given without the prompt."""
    (lost,) = requests_of(orphan)
    assert lost["finish_reason"] == "error"
    assert lost["tokens"] == []


def test_the_engine_lives_on(orphan):
    (task,) = tasks()[:1]
    (own,) = requests_of(orphan, "own")
    assert own["tokens"][: len(task["answer"])] == task["answer"]
