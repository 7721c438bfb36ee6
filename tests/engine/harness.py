# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Starts engines and servers in processes of their own, for the tests here."""

import heapq
import http.client
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quickstart import QuickstartError, free_port, wait_until_up
from turbo_process.log import what_happened
from turbo_process.runner import run_child, running
from vllm_turbo_cpu_standins.settings import (
    ENGINE_ARGS,
    SERVE_ARGS,
    Runner,
    engine_environment,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
CHILD = Path(__file__).with_name("engine_child.py")
WRITE_MODEL = SCRIPTS / "turbo_seeded" / "model.py"
# Tests read the logs. The variable is this process's, so that children of the tests and
# of scripts that run in this process share fork servers.
os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
# Longer than any test takes on a busy machine: only a process that hangs reaches it.
TIMEOUT_S = 1800


# The results of a call's requests: see `run_job`.
Requests = list[dict[str, Any]]


@dataclass
class Call:
    """One generate() of an engine.

    Attributes:
        prompts: Token ids of each prompt.
        max_tokens: Tokens to generate for each.
        one_by_one: Whether each prompt is a generate() of its own.
        forgets: Whether the prefix cache is emptied before.
        forgets_host: Whether a connector's pages in the host's memory are dropped as
            well, once all of them are written to the next tier.
        reloaded: A model folder whose weights are loaded in mid-request.
        remade_key_offset: Whether the offset of K follows them: a defect.
        loaded: A model folder whose weights are loaded before, after `forgets`.
        way: The way to load them, which `engine_child.load` knows.
        handed_over: A file for the parameters by which another engine goes on after the
            prompts; this engine lives on until that one has the pages.
        dies: Whether the process is killed instead, once the file is there.
        taken_over: The file of the engine that this one goes on from.
        lost: Whether requests whose transfer fails are asked once, and are a result.
        adapters: The folder of each prompt's LoRA adapter, or None.
        images: The files of each prompt's images.
        causal_images: Whether an image's tokens see only earlier tokens: a defect.
        pooled: A pooling task, which makes vectors or scores instead of tokens.

    """

    prompts: list[list[int]]
    max_tokens: int = 16
    one_by_one: bool = False
    forgets: bool = False
    forgets_host: bool = False
    reloaded: str | None = None
    remade_key_offset: bool = False
    loaded: str | None = None
    way: str = "load_weights"
    handed_over: str | None = None
    dies: bool = False
    taken_over: str | None = None
    lost: bool = False
    adapters: list[str | None] | None = None
    images: list[list[str]] | None = None
    causal_images: bool = False
    pooled: str | None = None


@dataclass
class Engine:
    """One engine of a job.

    Attributes:
        args: Arguments of `LLM` beyond those that every test has.
        calls: Its calls, by name and in order.
        zero_attention: Whether attention returns zeros.
        model: Model folder, if not the job's.
        may_fail: Whether an error at the start is a result.
        nan_token: A token whose embedding is NaN.
        without_key_offset: Whether K is stored with its bias.
        fixed_key_offset: Whether the offset of K stays that of the start: a defect.
        offset_segment: Tokens that share an offset of K, if not the product's number.
        misled_drafter: Whether Gemma 4's drafter reads other layers' caches: a defect.
        masked_attention: Whether sparse MLA scores all tokens, and masks those that are
            not listed.

    """

    args: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    zero_attention: bool = False
    model: str | None = None
    may_fail: bool = False
    nan_token: int | None = None
    without_key_offset: bool = False
    fixed_key_offset: bool = False
    offset_segment: int | None = None
    misled_drafter: bool = False
    masked_attention: bool = False


BASE_ARGS: dict[str, Any] = {
    **ENGINE_ARGS,
    "dtype": "float16",
    "block_size": 32,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,
    "kv_cache_memory_bytes": 32 << 20,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "disable_log_stats": True,
}


def child_variables(runner: Runner) -> dict[str, str]:
    """Returns the variables of an engine's process."""
    return {
        **engine_environment(runner),
        # Jobs run side by side, one a core.
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_job(
    folder: Path,
    model: Path,
    runner: Runner,
    engines: dict[str, Engine],
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs engines one after the other in one new process.

    Args:
        folder: The folder that job, result and log are left in.
        model: Model folder.
        runner: Model runner.
        engines: The engines, by name.
        variables: More variables of the process.

    Returns:
        Results by engine: `runner`, `num_blocks`, `block_size`, `num_tokens`, `pages`
        (a layer's bytes a page, and whether some are padding), `key_offsets` (each
        layer's for the last segment of positions), `num_kv_cache_groups`, `format` (the
        name of the pages' bytes that the scheduler has) and `calls`. If drafts are
        counted there are `drafted` and `accepted`. An engine that may fail may have
        `error` alone. A call has `requests` (`tokens`, `logprobs` and `finish_reason`,
        or `data` if pooled, and `num_cached_tokens`), `steps` and `num_preemptions`.

    """
    folder.mkdir(parents=True, exist_ok=True)
    job, result, log = (folder / name for name in ("job.json", "result.json", "log"))
    entries = {
        name: asdict(engine)
        | {"args": BASE_ARGS | engine.args, "model": engine.model or str(model)}
        for name, engine in engines.items()
    }
    job.write_text(json.dumps(entries))
    # In one process the scheduler can be watched, and engines start sooner.
    everything = child_variables(runner) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    everything |= variables or {}
    command = [sys.executable, CHILD, job, result]
    wrong = run_child(command, log, everything, TIMEOUT_S, is_forked=True)
    if wrong:
        raise RuntimeError(f"engines failed: {wrong}\n{what_happened(log)}")
    return json.loads(result.read_text())


class Jobs:
    """Runs each job once a session, side by side on this worker's share of cores."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self.pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // workers))
        self.results: dict[str, Future[dict[str, Any]]] = {}

    def stop(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def start(
        self, name: str, runner: Runner, engines: dict[str, Engine]
    ) -> Future[dict[str, Any]]:
        """Starts a job unless it was started, and returns the future of its result."""
        if name not in self.results:
            self.results[name] = self.pool.submit(
                run_job, self.folder / name, self.model, runner, engines
            )
        return self.results[name]


@contextmanager
def serving(
    folder: Path, model: Path, runner: Runner, *args: str
) -> Iterator["Server"]:
    """Runs `vllm serve` as a user would, and yields it once it answers.

    Args:
        folder: The folder that its log is left in.
        model: Model folder.
        runner: Model runner.
        args: Further arguments of the command line.

    Raises:
        RuntimeError: If it ends or does not answer in time.

    """
    port, log = free_port(), folder / "server.log"
    command = [Path(sys.executable).with_name("vllm"), "serve", model, *SERVE_ARGS]
    command += [*args, "--host", "127.0.0.1", "--port", str(port)]
    with running(command, log, child_variables(runner)) as process:
        server = Server(process, port, log)
        server.wait_until_up()
        yield server


@dataclass
class Server:
    """A running `vllm serve`."""

    process: subprocess.Popen
    port: int
    log: Path

    def wait_until_up(self) -> None:
        try:
            wait_until_up(self.process, self.port, self.log)
        except QuickstartError as error:
            raise RuntimeError(f"{error}:\n{what_happened(self.log)}") from None

    @contextmanager
    def open(
        self, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Yields the response to a GET, or to a POST of JSON."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=TIMEOUT_S
        )
        headers = {"Content-Type": "application/json"}
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON answer to a POST, and its status as `status`."""
        with self.open(path, body) as response:
            return json.loads(response.read()) | {"status": response.status}

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the events of a streamed answer."""
        with self.open(path, body | {"stream": True}) as response:
            lines = response.read().decode().splitlines()
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


def group_is_gone(process: subprocess.Popen, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether all of a process's group has ended, now or within the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def run_python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs this Python with some words; its output is captured as text."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def as_words(options: Mapping[str, object]) -> list[str]:
    """Returns options and their values as words of a command line."""
    return [str(word) for pair in options.items() for word in pair]


def values_to_come(request: Any, name: str) -> list[Any]:
    """Returns the values that a file's chosen tests have of a parameter, each once."""
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list({each[name]: None for each in params if name in each})


def requests_of(result: dict[str, Any], call: str = "batched") -> Requests:
    """Returns the requests of one of an engine's calls."""
    return result["calls"][call]["requests"]


def tokens_of(requests: Requests) -> list[list[int]]:
    return [request["tokens"] for request in requests]


def common_positions(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Returns how many leading distributions of two runs have the same context.

    A token's distribution depends on the tokens before it, so the first position
    where the runs disagree still counts.
    """
    pairs = zip(first["tokens"], second["tokens"])
    agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return len(first["tokens"]) if agreed is None else agreed + 1


def tie(kl: float) -> float:
    """Returns how far two tokens' log-probabilities may move apart at `kl` nats.

    The two share all probability and are tied: p = 1/2 each. They move apart by d at a
    divergence of KL = d^2 / 8.
    """
    return math.sqrt(8 * kl)


def decided_tokens(request: dict[str, Any], tie: float) -> list[int]:
    """Returns a run's tokens before the first that won by no more than `tie`."""
    for i, logprobs in enumerate(request["logprobs"]):
        best, second = heapq.nlargest(2, logprobs)
        if best - second <= tie:
            return request["tokens"][:i]
    return request["tokens"]


def kl_divergences(first: dict[str, Any], second: dict[str, Any]) -> list[float]:
    """Returns KL(first || second) in nats at each position of equal context.

    No term of this form is negative. A softmax in fp32 sums to one only up to rounding,
    which drops out of it.
    """
    return [
        math.fsum(
            math.exp(a) * (a - b) - math.exp(a) + math.exp(b)
            for a, b in zip(first["logprobs"][i], second["logprobs"][i])
        )
        for i in range(common_positions(first, second))
    ]


def largest_divergences(first: Requests, second: Requests) -> list[float]:
    """Returns the largest of each pair's `kl_divergences`."""
    return [max(kl_divergences(*pair)) for pair in zip(first, second, strict=True)]


def mean_divergence(first: Requests, second: Requests, skipped: int = 0) -> float:
    """Returns the mean of all pairs' `kl_divergences`, without the first positions."""
    pairs = [kl_divergences(*pair) for pair in zip(first, second, strict=True)]
    return statistics.fmean(kl for divergences in pairs for kl in divergences[skipped:])
