# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs weeks of an engine's requests through vLLM's scheduler and KV manager.

The engine core is vLLM's own, with the pages that a model's layers ask for under a
turbo dtype: layers of attention, some with a sliding window, or hybrids. In place of a
GPU, an executor makes tokens up. Prompts begin alike, so that blocks are found again.
More requests come than the cache has room for, so that some are preempted, and some are
aborted at any time. The engine is emptied after each tenth. The checks then are:

* Every request has ended, and the scheduler knows none of them.
* All blocks are free again.
* The process has no more objects or resident memory than after the first tenth, except
  for a fraction of an object per request.
* Requests were preempted, and tokens were found in the prefix cache.

It prints one JSON object per model, and ends with status 1 if a check fails. It needs
no GPU. With 200,000 requests, a model with only attention takes less than five minutes.
A hybrid takes 15, because its blocks, and so its prompts, have 30 times as many tokens.
"""

import argparse
import gc
import heapq
import os
import random
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import CONFIGS, Report
from turbo_plan.kv_capacity import build, start_parallel_state, supported_layouts
from turbo_process.log import emit
from turbo_process.runner import engine_variables, exit_when_told, run_for_row
from vllm_turbo_cpu_standins.settings import ENGINE_ARGS

from vllm import EngineArgs, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# Contexts of a model with only attention, of one with sliding windows, and of a hybrid,
# whose blocks are long.
MODELS = {"llama-8b": 8192, "gpt-oss-20b": 8192, "qwen3.6-35b-a3b": 32768}
TENTHS = 10
# Bytes of a cache that is larger than any here, and the blocks of it that exist.
MEMORY, BLOCKS = 100 << 30, 256
# Different beginnings of prompts, and the blocks of the longest common one.
STARTS, BLOCKS_ALIKE = 24, 4
TOKEN = 100
# Steps in a row without a scheduled token, after which the engine counts as stuck.
IDLE_STEPS = 100
# The allowed growth since the first tenth: objects that come and go, objects for each
# request, and memory.
OBJECTS, OBJECTS_A_REQUEST = 200, 0.01
GROWN_MIB = 32


class StubExecutor(Executor):
    """Builds a model without weights, and makes up the tokens of each step."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        build(self.vllm_config)
        # Tokens of the prompt, by request.
        self.prompts: dict[str, int] = {}
        self.output = EMPTY_MODEL_RUNNER_OUTPUT
        self.preemptions = 0

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict | None = None,
        non_block: bool = False,
    ) -> Any:
        match method:
            case "get_kv_cache_spec":
                with set_current_vllm_config(self.vllm_config):
                    return [get_kv_cache_spec(self.vllm_config)]
            case "get_supported_kv_cache_layouts":
                return [supported_layouts(self.vllm_config)]
            case "determine_available_memory":
                return [MEMORY]
            case "compile_or_warm_up_model":
                return []
            case "set_kv_cache_layout" | "initialize_from_config" | "shutdown":
                return [None]
        raise NotImplementedError(f"no worker has to {method}")

    def execute_model(
        self, scheduler_output: "SchedulerOutput", non_block: bool = False
    ) -> Any:
        """Gives a token to each request whose known tokens are all computed."""
        for name in scheduler_output.finished_req_ids:
            self.prompts.pop(name, None)
        self.preemptions += len(scheduler_output.preempted_req_ids or ())
        scheduled = scheduler_output.num_scheduled_tokens
        names, tokens = [], []

        def step(name: str, computed: int, known: int) -> None:
            names.append(name)
            tokens.append([TOKEN] if computed + scheduled[name] >= known else [])

        for new in scheduler_output.scheduled_new_reqs:
            self.prompts[new.req_id] = len(new.prompt_token_ids or ())
            known = len(new.prefill_token_ids or new.prompt_token_ids or ())
            step(new.req_id, new.num_computed_tokens, known)
        cached = scheduler_output.scheduled_cached_reqs
        for name, computed, generated in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens
        ):
            step(name, computed, self.prompts[name] + generated)
        self.output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
        )
        # The first half of a step has no tokens yet, if a second half follows.
        return finish(None if names else EMPTY_MODEL_RUNNER_OUTPUT, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return finish(self.output, non_block)

    def check_health(self) -> None:
        """Does nothing, because there is no worker that could fail."""


def finish(output: ModelRunnerOutput | None, non_block: bool) -> Any:
    if not non_block:
        return output
    future: Future[ModelRunnerOutput | None] = Future()
    future.set_result(output)
    return future


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """An engine core, and the counts so far."""

    def __init__(self, model: str, args: argparse.Namespace) -> None:
        self.args, self.random = args, random.Random(args.seed)
        self.core = EngineCore(self.config(model), StubExecutor, log_stats=True)
        self.scheduler = self.core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.block_size = self.scheduler.block_size
        self.counts = dict.fromkeys(
            ("added", "finished", "aborted", "aborted_streams")
            + ("prompt_tokens", "cached_tokens", "steps"),
            0,
        )
        # Request -> whether it has a token.
        self.alive: dict[str, bool] = {}
        self.idle_steps = 0
        # The steps in which a request is aborted.
        self.aborts: list[int] = []
        self.params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            for count in range(1, args.tokens + 1)
        ]
        most_alike, own = BLOCKS_ALIKE * self.block_size, 2 * self.block_size
        self.starts = [self.tokens(most_alike) for _ in range(STARTS)]
        # A prompt's own tokens are a part of these, at a random place.
        self.noise = self.tokens(64 * own)

    def config(self, model: str) -> Any:
        args = self.args
        config = EngineArgs(
            str(CONFIGS / model),
            skip_tokenizer_init=True,
            kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=MODELS[model],
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            num_gpu_blocks_override=BLOCKS,
            enable_prefix_caching=True,
            async_scheduling=True,
            distributed_executor_backend=StubExecutor,
            **ENGINE_ARGS,
        ).create_engine_config()
        with set_current_vllm_config(config):
            start_parallel_state()
        return config

    def stop(self) -> None:
        """Lets this process have another engine."""
        self.core.shutdown()
        cleanup_dist_env_and_memory()

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(count)]

    def add(self) -> None:
        """Adds a request that shares its first blocks with some others."""
        name = str(self.counts["added"])
        start = self.random.choice(self.starts)
        alike = self.block_size * self.random.randint(0, BLOCKS_ALIKE)
        own = self.random.randint(1, 2 * self.block_size)
        place = self.random.randrange(len(self.noise) - own)
        prompt = start[:alike] + self.noise[place : place + own]
        request = EngineCoreRequest(
            name, prompt, None, self.random.choice(self.params), None,
            time.time(), None, None, None,
        )  # fmt: skip
        self.core.add_request(*self.core.preprocess_add_request(request))
        self.alive[name] = False
        if self.random.random() < self.args.aborted:
            wait = self.random.randint(0, 2 * self.args.tokens)
            heapq.heappush(self.aborts, self.counts["steps"] + wait)
        self.counts["added"] += 1
        self.counts["prompt_tokens"] += len(prompt)

    def abort_some(self) -> None:
        """Aborts a waiting or running request for each whose step has come."""
        while self.aborts and self.aborts[0] <= self.counts["steps"] and self.alive:
            heapq.heappop(self.aborts)
            name = self.random.choice(list(self.alive))
            self.core.abort_requests([name])
            self.counts["aborted"] += 1
            self.counts["aborted_streams"] += self.alive.pop(name)

    def step(self) -> None:
        outputs, executed = self.core.step_fn()
        self.counts["steps"] += 1
        self.idle_steps = 0 if executed else self.idle_steps + 1
        for answer in (outputs or {}).values():
            if answer.scheduler_stats is not None:
                stats = answer.scheduler_stats
                self.counts["cached_tokens"] += stats.prefix_cache_stats.hits
            for output in answer.outputs:
                if output.request_id not in self.alive:
                    continue
                self.alive[output.request_id] = True
                if output.finished:
                    del self.alive[output.request_id]
                    self.counts["finished"] += 1

    def run_tenth(self, number: int) -> dict[str, int]:
        """Runs a tenth of the requests to their ends; returns the engine's state."""
        last = self.args.requests * (number + 1) // TENTHS
        while (self.counts["added"] < last or self.alive) and not self.is_stuck():
            while self.counts["added"] < last and len(self.alive) < self.args.at_once:
                self.add()
            self.abort_some()
            self.step()
        while self.has_work() and not self.is_stuck():
            self.step()
        gc.collect()
        return {
            "objects": sys.getallocatedblocks(),
            "resident_bytes": resident_bytes(),
            "free_blocks": self.pool.get_num_free_blocks(),
            "known_requests": self.known_requests(),
        }

    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.core.batch_queue)

    def is_stuck(self) -> bool:
        return self.idle_steps > IDLE_STEPS

    def known_requests(self) -> int:
        """Returns how many requests the scheduler, KV manager and executor know."""
        managers = self.manager.coordinator.single_type_managers
        known = {*self.scheduler.requests, *self.core.model_executor.prompts}
        for manager in managers:
            known |= {*manager.req_to_blocks, *manager.num_cached_block}
        # The executor hears of the last ended requests in the next step.
        return len(known - self.scheduler.finished_req_ids)

    def run(self) -> dict[str, Any]:
        free, start = self.pool.get_num_free_blocks(), time.perf_counter()
        tenths = [self.run_tenth(number) for number in range(TENTHS)]
        kinds = [type(g.kv_cache_spec).__name__ for g in self.groups()]
        return self.counts | {
            "preemptions": self.core.model_executor.preemptions,
            "groups": kinds,
            "block_size": self.block_size,
            "blocks": self.pool.num_gpu_blocks,
            "most_blocks_lost": free - min(t["free_blocks"] for t in tenths),
            "most_known_requests": max(t["known_requests"] for t in tenths),
            "objects": [tenth["objects"] for tenth in tenths],
            "resident_bytes": [tenth["resident_bytes"] for tenth in tenths],
            "seconds": time.perf_counter() - start,
        }

    def groups(self) -> list[Any]:
        return self.scheduler.kv_cache_config.kv_cache_groups


def growth(values: list[int]) -> int:
    """Returns the largest growth of a later tenth over the first."""
    return max(values[1:]) - values[0]


def complaints(row: dict[str, Any]) -> list[str]:
    """Returns the faults of a row."""
    grown = growth(row["objects"])
    grown_mib = growth(row["resident_bytes"]) / 2**20
    lost = row["most_blocks_lost"]
    known = row["most_known_requests"]
    unended = row["added"] - row["finished"] - row["aborted"]
    checks = {
        f"{unended} requests did not end": unended != 0,
        f"{known} requests are known that ended": known != 0,
        f"{lost} blocks are lost": lost != 0,
        f"{grown} objects were added": (
            grown > OBJECTS + OBJECTS_A_REQUEST * row["added"]
        ),
        f"{grown_mib:.1f} MiB of memory were added": grown_mib > GROWN_MIB,
        "no waiting request was aborted": row["aborted"] == row["aborted_streams"],
        "no stream was aborted": row["aborted_streams"] == 0,
        "no request was preempted": row["preemptions"] == 0,
        "no block was found again": row["cached_tokens"] == 0,
    }
    return [text for text, wrong in checks.items() if wrong]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="(all)"
    )
    parser.add_argument("--kv-cache-dtype", default="turbo4")
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--at-once", type=int, default=192, help="waiting or running")
    parser.add_argument("--tokens", type=int, default=64, help="generated at most")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=32768)
    parser.add_argument(
        "--aborted", type=float, default=0.1, help="share of aborted requests"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=1800, help="s per model")
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if args.child:
        emit(**Soak(args.models[0], args).run())
        return 0
    exit_when_told()
    report, failed = Report(args.output), False
    given = sys.argv[1:]
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            row = {"model": model, "kv_cache_dtype": args.kv_cache_dtype} | run_for_row(
                [sys.executable, __file__, *given, "--models", model, "--child"],
                Path(folder) / "log",
                engine_variables(on_cpu=True),
                args.time_limit,
            )
        if "wrong" not in row:
            row["wrong"] = complaints(row)
        failed |= bool(row["wrong"])
        report.row(**row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
