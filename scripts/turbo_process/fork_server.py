# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs Python files in processes that are forked from one that has imported vLLM.

Usage: python fork_server.py. To import vLLM takes as long as a small engine runs, and
Triton's interpreter and much of vLLM's state belong to a process: so it is imported
once, and each engine has a process still. It is for CPUs: what has looked at a GPU
cannot be forked.

A line of input is an object: `argv`, a file and its arguments, `log`, where its output
goes, and `variables`, more of its environment; what is imported has seen the server's.
The process leads a group of its own. Its id and, when it has ended, its status are the
lines of output.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

# What an engine imports when it starts.
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
    # In the background it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(stream, target)


def main() -> None:
    requests = os.fdopen(os.dup(0))
    # What else is printed is not an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in MODULES:
        importlib.import_module(name)
    # An engine collects garbage eight times, and melts what was frozen. That takes as
    # long as what it computes if it is all that was imported.
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        # By both, for either may be the first to need the group.
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
