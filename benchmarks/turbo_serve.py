# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Times `vllm serve` under concurrent streamed chat requests of mixed lengths.

The model has dummy weights and a tokenizer of one token per byte. A stream counts only
if it ends properly, with the tokens that were asked for. It prints one JSON object per
line: the server's start, then each round of requests.
"""

import argparse
import http.client
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import CONFIGS, Report
from quickstart import QuickstartError, free_port, startup_lines, wait_until_up
from turbo_process.runner import engine_variables, exit_when_told, running
from turbo_seeded.model import write_json, write_tokenizer

MODEL_NAME = "served"
PROMPT_BYTES = (40, 400, 2000, 7000)
OUTPUT_TOKENS = (16, 64, 256)
REQUEST_TIMEOUT_S = 300


@dataclass
class Stream:
    """The figures of one request.

    Attributes:
        seconds: Seconds from its sending to its end.
        first_token_s: Seconds from its sending to its first text.
        prompt_tokens: Tokens of the prompt, by the server's count.
        output_tokens: Generated tokens, by the server's count.

    """

    seconds: float
    first_token_s: float
    prompt_tokens: int
    output_tokens: int


def write_model(config: Path, folder: Path) -> None:
    """Writes a model folder: the config, and a tokenizer of its vocabulary's size."""
    shutil.copy(config / "config.json", folder)
    vocab_size = json.loads((config / "config.json").read_text())["vocab_size"]
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab, special = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    # Every token that the model may choose has a text; special tokens come last.
    first_special = vocab_size - len(special)
    vocab |= {f"<{token}>": token for token in range(len(vocab), first_special)}
    for index, token in enumerate(special):
        token["id"] = first_special + index
    write_json(path, tokenizer)


def make_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns request bodies of mixed lengths, all prompts different."""
    choose = random.Random(seed)
    bodies = []
    for index in range(count):
        words = " ".join(str(choose.randrange(10**6)) for _ in range(1200))
        prompt = f"{index}: {words}"[: choose.choice(PROMPT_BYTES)]
        bodies.append(
            {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": choose.choice(OUTPUT_TOKENS),
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return bodies


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields a stream's events.

    Raises:
        RuntimeError: If it ends without its last event.

    """
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)
    raise RuntimeError("the stream broke off")


def send(port: int, body: dict[str, Any]) -> Stream:
    """Sends one request, and reads its stream to the end.

    Raises:
        RuntimeError: If the answer differs from the request.

    """
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=REQUEST_TIMEOUT_S
    )
    start = time.perf_counter()
    first_token_s = finish_reason = usage = None
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"{response.status}: {response.read().decode()[:300]}")
        for event in events(response):
            if "error" in event:
                raise RuntimeError(str(event["error"])[:300])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if first_token_s is None and choice["delta"].get("content"):
                    first_token_s = time.perf_counter() - start
                finish_reason = choice["finish_reason"] or finish_reason
    finally:
        connection.close()
    seconds = time.perf_counter() - start
    if usage is None or first_token_s is None:
        raise RuntimeError("a stream without usage or text")
    if (finish_reason, usage["completion_tokens"]) != ("length", body["max_tokens"]):
        raise RuntimeError(
            f"{usage['completion_tokens']} tokens, {finish_reason}, "
            f"instead of {body['max_tokens']}"
        )
    return Stream(
        seconds, first_token_s, usage["prompt_tokens"], usage["completion_tokens"]
    )


def run_round(port: int, count: int, seed: int) -> dict[str, Any]:
    """Sends requests at once, and returns a row."""
    bodies = make_requests(count, seed)
    errors: list[str] = []

    def attempt(body: dict[str, Any]) -> Stream | None:
        try:
            return send(port, body)
        except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
            errors.append(f"{type(error).__name__}: {error}")
            return None

    start = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        streams = [stream for stream in pool.map(attempt, bodies) if stream]
    seconds = time.perf_counter() - start
    row: dict[str, Any] = {
        "part": "requests",
        "sent": count,
        "completed": len(streams),
        "seconds": seconds,
        "requests_per_s": len(streams) / seconds,
        "prompt_tokens": sum(stream.prompt_tokens for stream in streams),
        "output_tokens_per_s": sum(s.output_tokens for s in streams) / seconds,
    }
    if streams:
        row["median_first_token_s"] = statistics.median(
            stream.first_token_s for stream in streams
        )
        row["median_tpot_ms"] = statistics.median(
            (s.seconds - s.first_token_s) / (s.output_tokens - 1) * 1e3 for s in streams
        )
    if errors:
        row["error"] = errors[0]
    return row


def benchmark(args: argparse.Namespace, folder: Path, report: Report) -> bool:
    """Serves the model and sends the rounds; returns whether every stream counts."""
    write_model(args.config, folder)
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder),
        "--kv-cache-dtype", args.kv_cache_dtype, "--load-format", "dummy",
        "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(args.max_model_len), *args.serve_args,
    ]  # fmt: skip
    common = {"kv_cache_dtype": args.kv_cache_dtype}
    start = time.perf_counter()
    well = True
    with running(command, args.log, engine_variables(on_cpu=False)) as server:
        wait_until_up(server, port, args.log)
        seconds = time.perf_counter() - start
        lines = startup_lines(args.log)
        report.row(part="startup", **common, seconds=seconds, log=lines)
        for number in range(args.rounds):
            row = run_round(port, args.requests, number)
            report.row(**common, round=number, **row)
            well = well and row["completed"] == args.requests
    return well


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIGS / "llama-8b")
    parser.add_argument("--kv-cache-dtype", default="turbo4")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--requests", type=int, default=32, help="sent at once")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument("--log", type=Path, default=Path("/tmp/turbo_serve.log"))
    parser.add_argument(
        "serve_args", nargs="*", help="after --: more arguments of vllm serve"
    )
    return parser


def main() -> int:
    args = build_parser().parse_args()
    exit_when_told()
    report = Report(args.output)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return 0 if benchmark(args, Path(folder), report) else 1
        except (OSError, QuickstartError) as error:
            report.row(kv_cache_dtype=args.kv_cache_dtype, error=str(error))
            return 1


if __name__ == "__main__":
    sys.exit(main())
