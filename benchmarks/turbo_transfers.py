# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefills on one engine and decodes on another, by dtype; NIXL moves the pages.

There are two GPUs. A producer is on the first, or on both, and a consumer on the last,
or on both. They share a GPU that both need. It prints one JSON object per line:

* `answers`, for each pair of tensor-parallel sizes: a seeded model with several KV
  heads goes on from the producer's pages. `right` of `compared` tokens equal those of
  the consumer alone, up to a position where the best token wins by no more than
  rounding.
* `gap`, for a model with dummy weights and one GPU each: milliseconds from the
  producer's last token to the consumer's first (`gap_ms`), and NIXL's own count of a
  request's bytes and milliseconds.
* `ratio`: bytes and gap of an arm over those of bf16 (`auto`), with their bounds.

An arm of the gaps is DTYPE[@LAYOUT[@BLOCK]], as in turbo_offload.py. UCX_TLS names the
transports of UCX. With --together FOLDER all arms' engines start side by side, which
needs memory for all. Each then measures alone, when FOLDER has no file named hold.

The exit status is 0 if all answers are right and all ratios are within their bounds.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from subprocess import Popen
from threading import Barrier, Lock, Thread
from typing import Any

from common import CONFIGS, Report
from quickstart import free_port
from turbo_engine import random_prompt
from turbo_equality.run import SEVERAL_GPUS_VARIABLES
from turbo_offload import parse_arm
from turbo_process.log import what_happened
from turbo_process.runner import engine_variables, exit_when_told, running
from turbo_seeded.model import build_parser as model_parser
from turbo_seeded.model import write_model

Row = dict[str, Any]

CHILD = Path(__file__).with_name("transfer_child.py")
PAIRS = ("1-1", "1-2", "2-1")
# The largest ratios to bf16.
BOUNDS = {"bytes": 0.27, "gap_ms": 0.5}
# Log-probabilities that rounding may bring into another order.
TIE = 0.05
PROMPT_LENGTHS = (65, 128, 300, 511)
ANSWER_TOKENS = 16
SEEDED = ("--kv-heads", "4", "--heads", "8", "--head-range", "0.15")
# NIXL waits five seconds for a first reply, and a busy machine may need more.
ATTEMPTS = 5
CONNECTOR, START_TIMEOUT_S = "NixlConnector", 240.0


class Half:
    """One of the two engines, in a process of its own."""

    def __init__(self, connection: Connection, process: Popen, log: Path) -> None:
        self.connection = connection
        self.process = process
        self.log = log

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Returns the engine's next message.

        Raises:
            RuntimeError: If it ends, or sends nothing in time.

        """
        deadline = time.monotonic() + timeout_s
        while not self.connection.poll(0.2):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"an engine ended: {what_happened(self.log)}")
        return self.connection.recv()

    def ask(self, timeout_s: float = 120.0, **call: Any) -> dict[str, Any]:
        """Returns the child's `answer` to a call."""
        self.connection.send(call)
        return self.receive(timeout_s)


def visible(role: str, size: int) -> str:
    """Returns the GPUs of an engine."""
    if size == 2:
        return "0,1"
    return "0" if role == "producer" else "1"


def options_of(role: str, size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns `LLM`'s arguments, without the model and the cache's dtype."""
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": f"kv_{role}",
        "kv_buffer_device": "cuda",
        "kv_load_failure_policy": "fail",
    }
    return {
        "block_size": args.block_size,
        "tensor_parallel_size": size,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        # Both engines fit on a shared GPU.
        "gpu_memory_utilization": 0.45,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
        "kv_transfer_config": transfer,
    } | args.engine_args


@contextmanager
def half(
    role: str,
    size: int,
    options: dict[str, Any],
    args: argparse.Namespace,
    log: Path,
    layout: str = "LBHNC",
) -> Iterator[tuple[Half, dict[str, Any]]]:
    """Yields an engine, and its account of itself."""
    variables = engine_variables(on_cpu=False) | SEVERAL_GPUS_VARIABLES
    variables |= {"VLLM_KV_CACHE_LAYOUT": layout}
    variables |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    variables |= {"CUDA_VISIBLE_DEVICES": visible(role, size)}
    options = options_of(role, size, args) | options
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "socket")
        with Listener(address) as listener:
            command = [sys.executable, CHILD, address, json.dumps(options)]
            with running(command, log, variables) as process:
                accepted: list[Connection] = []
                waiting = Thread(
                    target=lambda: accepted.append(listener.accept()), daemon=True
                )
                waiting.start()
                while not accepted:
                    if process.poll() is not None:
                        raise RuntimeError(f"no engine: {what_happened(log)}")
                    time.sleep(0.1)
                found = Half(accepted[0], process, log)
                yield found, found.receive(START_TIMEOUT_S)
                found.connection.send(None)
                process.wait(60)


@contextmanager
def pair(
    sizes: tuple[int, int],
    options: dict[str, Any],
    args: argparse.Namespace,
    name: str,
    **more: Any,
) -> Iterator[tuple[Half, Half, dict[str, Any]]]:
    """Yields a producer, a consumer, and the consumer's account of itself.

    One starts after the other, because each measures the GPU's free memory.
    """
    with ExitStack() as stack:
        halves = []
        for role, size in zip(("producer", "consumer"), sizes):
            log = args.logs / f"{name}-{role}.log"
            started = stack.enter_context(half(role, size, options, args, log, **more))
            halves.append(started)
        (producer, _), (consumer, said) = halves
        yield producer, consumer, said


def hand_over(
    producer: Half,
    consumer: Half,
    prompts: list[list[int]],
    max_tokens: int,
    **call: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the results of the producer and of the consumer.

    Raises:
        RuntimeError: If the pages do not arrive.

    """
    asked = [{"do_remote_decode": True} for _ in prompts]
    made = producer.ask(prompts=prompts, max_tokens=1, transfers=asked)
    taken = consumer.ask(
        prompts=prompts, max_tokens=max_tokens, transfers=made["transfers"], **call
    )
    if "error" in taken["reasons"]:
        raise RuntimeError(f"pages did not come along: {what_happened(consumer.log)}")
    return made, taken


def warm_up(producer: Half, consumer: Half, prompt: list[int]) -> None:
    """Lets the two find each other.

    Raises:
        RuntimeError: If ATTEMPTS attempts fail.

    """
    for attempt in range(ATTEMPTS):
        try:
            hand_over(producer, consumer, [prompt], 2)
            return
        except RuntimeError:
            if attempt == ATTEMPTS - 1:
                raise


def compared(own: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of equal tokens, and of those that no rounding decides."""
    right = total = 0
    for i, (tokens, others) in enumerate(zip(own["tokens"], theirs["tokens"])):
        for n, (token, other) in enumerate(zip(tokens, others)):
            if min(own["margins"][i][n], theirs["margins"][i][n]) <= TIE:
                break
            total += 1
            right += token == other
            if token != other:
                break
    return right, total


def answers_row(name: str, dtype: str, model: Path, args: argparse.Namespace) -> Row:
    """Returns the row of a pair of tensor-parallel sizes."""
    first, second = map(int, name.split("-"))
    options = {
        "model": str(model),
        "kv_cache_dtype": dtype,
        "max_model_len": 1024,
        "attention_config": {"turbo_prefill": "stored"} if dtype != "auto" else {},
    }
    log = f"{dtype}-{name}"
    with pair((first, second), options, args, log) as (producer, consumer, _):
        # Bytes, which are the seeded model's token ids.
        choose = random.Random(0)
        prompts = [choose.choices(range(32, 127), k=n) for n in PROMPT_LENGTHS]
        ask = partial(consumer.ask, prompts=prompts, max_tokens=ANSWER_TOKENS)
        alone = ask(with_margins=True)
        warm_up(producer, consumer, prompts[0])
        _, taken = hand_over(
            producer, consumer, prompts, ANSWER_TOKENS, with_margins=True
        )
    right, total = compared(alone, taken)
    return {
        "part": "answers",
        "dtype": dtype,
        "block_size": args.block_size,
        "tensor_parallel_sizes": name,
        "right": right,
        "compared": total,
        "tokens": ANSWER_TOKENS * len(prompts),
    }


def gap_row(arm: str, args: argparse.Namespace, start: Barrier, turn: Lock) -> Row:
    """Returns the row of an arm's bytes and times.

    Args:
        arm: DTYPE[@LAYOUT[@BLOCK]].
        args: The command line's.
        start: The barrier of arms whose engines start side by side.
        turn: A lock that an arm holds while it measures.

    """
    dtype, layout, block_size = parse_arm(arm, args.block_size)
    options = {
        "model": str(args.model),
        "load_format": "dummy",
        "kv_cache_dtype": dtype,
        "block_size": block_size,
        "max_model_len": args.context + 8,
    }
    log = f"{arm}-gap"
    with pair((1, 1), options, args, log, layout=layout) as (producer, consumer, said):
        start.wait(START_TIMEOUT_S)
        while args.together and (args.together / "hold").exists():
            time.sleep(0.1)
        with turn:
            found = gaps(producer, consumer, said["vocab_size"], args)
    facts = {"dtype": dtype, "layout": layout, "block_size": block_size}
    return {"part": "gap", "arm": arm, "context": args.context} | facts | found


def gaps(
    producer: Half, consumer: Half, vocab_size: int, args: argparse.Namespace
) -> Row:
    """Returns the bytes and times of requests that one engine hands to another."""
    make = partial(random_prompt, length=args.context)
    warm_up(producer, consumer, make(seed=0, vocab_size=vocab_size))
    settle = partial(consumer.ask, prompts=[[1, 2, 3]], max_tokens=2)
    before, times = settle()["counters"], []
    for seed in range(1, 1 + args.rounds):
        prompt = make(seed=seed, vocab_size=vocab_size)
        made, taken = hand_over(producer, consumer, [prompt], 1)
        times.append((taken["end"] - made["end"]) * 1e3)
    after = settle()["counters"]
    counted = {name: (after[name] - before[name]) / args.rounds for name in after}
    return {
        "gap_ms": statistics.median(times),
        "all_gap_ms": times,
        "bytes": counted["bytes"],
        "descriptors": counted["descriptors"],
        "nixl_ms": counted["seconds"] * 1e3,
    }


def gap_rows(args: argparse.Namespace) -> list[Row]:
    """Returns the rows of all arms."""
    side_by_side = len(args.arms) if args.together else 1
    start, turn = Barrier(side_by_side), Lock()

    def row(arm: str) -> Row:
        try:
            return gap_row(arm, args, start, turn)
        except Exception:
            # The other arms must not wait for this one.
            start.abort()
            raise

    with ThreadPoolExecutor(side_by_side) as pool:
        return list(pool.map(row, args.arms))


def ratio_rows(rows: list[Row]) -> Iterator[Row]:
    """Yields the ratios of the rows of gaps to bf16's."""
    base = next((row for row in rows if row["arm"] == "auto"), None)
    for row in rows:
        if base is None or row is base:
            continue
        for name, bound in BOUNDS.items():
            ratio = row[name] / base[name]
            yield {
                "part": "ratio",
                "of": name,
                "arm": row["arm"],
                "block_size": row["block_size"],
                "times_bf16": ratio,
                "bound": bound,
                "is_met": ratio <= bound,
            }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=CONFIGS / "llama-8b")
    parser.add_argument("--parts", nargs="+", default=["answers", "gap"])
    parser.add_argument("--pairs", nargs="*", choices=PAIRS, default=PAIRS)
    parser.add_argument("--dtype", default="turbo4", help="cache dtype of answers")
    parser.add_argument("--arms", nargs="+", default=["auto", "turbo4"])
    parser.add_argument("--together", type=Path, help="folder, as turbo_engine.py's")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=8 << 30)
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/turbo-transfers"))
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    exit_when_told()
    report = Report(args.output)
    ucx_tls = os.environ.get("UCX_TLS", "all")
    report.facts |= {"connector": CONNECTOR, "ucx_tls": ucx_tls}
    is_right = True
    if "answers" in args.parts:
        with tempfile.TemporaryDirectory() as name:
            model = Path(name) / "seeded"
            write_model(model, model_parser().parse_args([name, *SEEDED]))
            for sizes in args.pairs:
                row = answers_row(sizes, args.dtype, model, args)
                report.row(**row)
                is_right &= row["right"] == row["compared"] > 0
    if "gap" in args.parts:
        rows = gap_rows(args)
        for row in rows:
            report.row(model=args.model.name, **row)
        for ratio in ratio_rows(rows):
            report.row(model=args.model.name, **ratio)
            is_right &= ratio["is_met"]
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
