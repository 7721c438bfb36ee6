# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kills a server under load and starts it again: errors may come, wrong answers not.

`vllm serve` is first asked for facts one request at a time. Then clients ask for the
same facts all the time, half of them for streams. Meanwhile the server is killed again
and again: all its processes at once, or only its engine, or by SIGTERM. The checks at
the end are:

* Each kill was felt: requests failed, or their streams broke off.
* After each start there were answers again.
* Answers, and the tokens of broken streams, equal those of the quiet run up to the
  first position where its two likeliest tokens are no more than equality.TIE apart.
* Requests had a recent window, if `--window` asks for one.

It prints one JSON object, and ends with status 1 if a check fails.
"""

import argparse
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from common import Report
from env import has_gpu
from quickstart import free_port, wait_until_up
from soak_common import build_parser as common_parser
from soak_common import common_faults, decided_tokens, make_prompts
from soak_transfers import transfer_config
from turbo_equality.modes import DRAFTING
from turbo_equality.run import soaked_cache, window_lengths
from turbo_process.runner import engine_variables, exit_when_told, running, signal_group
from turbo_quality.cases import HEAD
from vllm_turbo_cpu_standins.settings import SERVE_ARGS

NAME = "served"
# The ways to end a server; "told" is SIGTERM.
ENDS = ("all", "engine", "told")
# Seconds that a client waits for a byte, and after an error.
CLIENT_S, PAUSE_S = 600, 0.05
# Seconds in which a server ends by itself after its engine was killed, and after
# SIGTERM. With a request under way, vLLM 0.33 does not end after SIGTERM: it waits for
# the request's connection, whose engine is gone. Kubernetes kills it after 30 s.
END_S, GRACE_S = 120, 30


class Broken(Exception):
    """A request failed, or its stream broke off after some tokens."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(f"after {len(tokens)} tokens")
        self.tokens = tokens


def ask(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the choice of a whole answer.

    Raises:
        Broken: If there is no such answer.

    """
    tokens: list[int] = []
    reason = None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CLIENT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Broken(tokens)
        if not body.get("stream"):
            choice = json.loads(response.read())["choices"][0]
            if choice["finish_reason"] == "length":
                return choice
        for line in response:
            event = line.decode().strip().removeprefix("data: ")
            if event == "[DONE]" and reason == "length":
                return {"token_ids": tokens}
            # An event that is no JSON, or has no choice, is an error.
            choice = json.loads(event)["choices"][0] if event else {}
            tokens += choice.get("token_ids") or []
            reason = choice.get("finish_reason") or reason
    except (OSError, http.client.HTTPException, ValueError, LookupError):
        pass
    finally:
        connection.close()
    raise Broken(tokens)


class Clients:
    """Threads that ask all the time, and counts of the answers."""

    def __init__(self, port: int, args: argparse.Namespace) -> None:
        self.port, self.args = port, args
        self.prompts = make_prompts(args, (0.25, 0.75))
        self.decided: list[list[int]] = []
        names = ("answers", "errors", "broken_streams", "positions", "unequal")
        self.counts = dict.fromkeys(names, 0)
        self.unequal: list[dict[str, Any]] = []
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.threads: list[threading.Thread] = []

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.args.tokens

    def body(self, index: int, **options: Any) -> dict[str, Any]:
        return {
            "model": NAME,
            "prompt": self.prompts[index],
            "max_tokens": self.args.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        } | options

    def ask_quietly(self) -> None:
        """Asks each prompt alone, and notes the tokens that no rounding decides."""
        for index in range(len(self.prompts)):
            choice = ask(self.port, self.body(index, logprobs=2))
            likeliest = (x.values() for x in choice["logprobs"]["top_logprobs"])
            self.decided.append(decided_tokens(choice["token_ids"], likeliest))

    def compare(self, index: int, tokens: list[int], is_whole: bool) -> None:
        """Counts an answer, or the beginning of one."""
        decided = self.decided[index]
        if not is_whole:
            decided = decided[: len(tokens)]
        with self.lock:
            self.counts["answers" if is_whole else "errors"] += 1
            self.counts["broken_streams"] += bool(tokens) and not is_whole
            self.counts["positions"] += len(decided)
            if tokens[: len(decided)] != decided:
                self.counts["unequal"] += 1
                self.unequal.append({"prompt": index, "tokens": tokens})

    def ask_on(self, seed: int) -> None:
        choices = random.Random(seed)
        while not self.ended.is_set():
            index = choices.randrange(len(self.prompts))
            body = self.body(index, stream=choices.random() < 0.5)
            try:
                self.compare(index, ask(self.port, body)["token_ids"], True)
            except Broken as error:
                self.compare(index, error.tokens, False)
                time.sleep(PAUSE_S)

    def start(self) -> None:
        for number in range(self.args.clients):
            thread = threading.Thread(target=self.ask_on, args=(number,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def wait_for(self, name: str, more: int, server: subprocess.Popen | None) -> int:
        """Waits for `more` of a count while a server runs; returns how many came."""
        first = self.counts[name]
        deadline = time.monotonic() + CLIENT_S
        while self.counts[name] < first + more and time.monotonic() < deadline:
            if server is not None and server.poll() is not None:
                break
            time.sleep(0.01)
        return self.counts[name] - first


def kill(server: subprocess.Popen, how: str) -> bool:
    """Ends a server in one of the ways; returns whether no process is left."""
    if how == "all":
        return signal_group(server, signal.SIGKILL, END_S)
    if how == "told":
        if signal_group(server, signal.SIGTERM, GRACE_S):
            return True
        return signal_group(server, signal.SIGKILL, END_S)
    children = psutil.Process(server.pid).children(recursive=True)
    engines = [each for each in children if "EngineCore" in " ".join(each.cmdline())]
    assert engines, "the server has no process of an engine"
    for engine in engines:
        engine.kill()
    # Signal 0 only asks whether the group exists.
    return signal_group(server, 0, END_S)


def command_of(port: int, longest: int, args: argparse.Namespace) -> list[str]:
    cache = soaked_cache(args)
    options: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": NAME,
        "kv-cache-dtype": cache["kv_cache_dtype"],
        "attention-config": json.dumps(cache["attention_config"]),
        "dtype": "float32" if args.on_cpu else "bfloat16",
        "block-size": cache["block_size"],
        "max-model-len": longest,
        "max-num-seqs": args.max_num_seqs,
        "hf-overrides": json.dumps(HEAD),
    }
    if args.drafts:
        drafts = DRAFTING[args.drafts].speculative_config
        options["speculative-config"] = json.dumps(drafts)
    if transfer := transfer_config(0.0, args.offload, args.on_cpu):
        options["kv-transfer-config"] = json.dumps(transfer)
    # With a given size, other processes' memory does not change the cache.
    options["kv-cache-memory-bytes"] = "64M" if args.on_cpu else "1G"
    if not args.on_cpu:
        options["gpu-memory-utilization"] = args.gpu_memory_utilization
    vllm = Path(sys.executable).with_name("vllm")
    words = [str(word) for name, value in options.items() for word in (name, value)]
    words[::2] = [f"--{name}" for name in words[::2]]
    return [str(vllm), "serve", str(args.model), *args.serve_args, *words]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Starts and kills servers under load, and returns the counts."""
    port = free_port()
    clients = Clients(port, args)
    command = command_of(port, clients.longest, args)
    variables = engine_variables(args.on_cpu)
    start, kills = time.perf_counter(), []
    with ExitStack() as stack:
        stack.callback(clients.ended.set)
        for number in range(args.kills + 1):
            log = args.logs / f"server-{number}.log"
            server = stack.enter_context(running(command, log, variables))
            wait_until_up(server, port, log)
            if number == 0:
                clients.ask_quietly()
                clients.start()
            answers = clients.wait_for("answers", args.answers, server)
            if number == args.kills:
                kills.append({"how": None, "answers": answers})
                break
            how = ENDS[number % len(ENDS)]
            before = clients.counts["errors"]
            is_gone = kill(server, how)
            clients.wait_for("errors", 1, None)
            errors = clients.counts["errors"] - before
            kills.append(
                {"how": how, "answers": answers, "errors": errors, "is_gone": is_gone}
            )
        clients.stop()
    return clients.counts | {
        "kills": kills,
        "recent_window": sorted(window_lengths(args.logs / "server-0.log")),
        "first_unequal": clients.unequal[:3],
        "seconds": time.perf_counter() - start,
    }


def complaints(row: dict[str, Any], least: int) -> list[str]:
    """Returns the faults of a row; each start needs at least `least` answers."""
    kills = row["kills"]
    checks = {
        **common_faults(row),
        "no position was compared": row["positions"] == 0,
        "no stream broke off": row["broken_streams"] == 0,
        "a server did not answer": any(each["answers"] < least for each in kills),
        "a kill was not felt": any(not each["errors"] for each in kills[:-1]),
        "a server did not end": any(not each["is_gone"] for each in kills[:-1]),
    }
    return [text for text, wrong in checks.items() if wrong]


def build_parser() -> argparse.ArgumentParser:
    parser = common_parser(__doc__, cases=2, max_num_seqs=64)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--answers", type=int, default=300, help="before each kill")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/turbo-soak-server"))
    return parser


def main() -> int:
    args = build_parser().parse_args()
    args.on_cpu = not has_gpu()
    args.serve_args = SERVE_ARGS if args.on_cpu else ()
    args.lengths = args.lengths or [512, 777, 1500]
    exit_when_told()
    report = Report(args.output)
    kinds = ("kv_cache_dtype", "window", "drafts", "offload")
    row = {kind: getattr(args, kind) for kind in kinds} | run(args)
    row["wrong"] = complaints(row, args.answers)
    report.row(**row)
    return 1 if row["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
