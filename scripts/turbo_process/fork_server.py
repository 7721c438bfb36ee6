# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs Python files in processes that are forked from one that has imported vLLM.

Usage: python fork_server.py. The import of vLLM takes as long as a small engine runs.
Triton's interpreter and much of vLLM's state belong to a process. So vLLM is imported
once, and each engine still has a process of its own. This is for CPUs: a process that
has used a GPU cannot be forked.

A line of input is a JSON object: `argv`, a file and its arguments; `log`, the path of
its output; and `variables`, additions to the environment, which imported modules have
not seen. The process leads a group of its own. Two lines of output are its id and, at
its end, its status.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

# Modules that an engine imports when it starts.
MODULES = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.attention.backends.turbo_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)


def begin_child(log: str) -> None:
    """Gives this forked process a log for its output, and no input."""
    # A process in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(stream, target)


def main() -> None:
    requests = os.fdopen(os.dup(0))
    # Other prints are no answers, and go to the standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in MODULES:
        importlib.import_module(name)
    # An engine collects garbage eight times, and unfreezes first. With all imported
    # modules to look at, that takes as long as the engine's own work.
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        # Both processes do this, because either may be the first to need the group.
        os.setpgid(child, child)
        if not child:
            begin_child(request["log"])
            os.environ.update(request["variables"])
            sys.argv = request["argv"]
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
            return
        print(child, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)


if __name__ == "__main__":
    main()
