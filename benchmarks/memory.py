# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that an engine's account at its start has all memory that it takes later.

Each arm is an engine in a process of its own, with dummy weights, vLLM's default share
of the GPU and the longest context of the model, or a context of a million tokens. It
answers a full batch with short and long prompts, most of which hit a prefix of one very
long prompt somewhere. For a turbo dtype beside bf16, the checks are:

* PyTorch's reserved memory has grown since the start by no more than the activations
  that the profile run left room for. Since the first full step it has not grown. MLA's
  prefills of cached contexts take some of it later, so MLA has bf16's growth as bound.
* No more of the device is taken than in bf16, except for one granule of PyTorch's at
  the start and one of the driver's since then.
* vLLM counts the tokens that the blocks hold, without those that recent windows take.
  There are as many blocks as the memory for them has room for.
* The dtype takes little more than bf16 beside the cache, and its workspace is small.

Without room for a context in bf16, a turbo dtype's row is not compared with bf16's.

A row names the steps after which the driver held more memory beside PyTorch's. It takes
granules when it loads a kernel that has not been launched before.

With --kernels a row names the kernels that are first launched after the first full
step, which the driver loads then. A turbo dtype may add none to bf16's. The profiler
that watches them takes memory itself.

It prints one JSON object per arm, and ends with status 1 if a check fails.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import CONFIGS, Report, plain_tokens
from env import has_gpu
from turbo_process.log import emit
from turbo_process.runner import engine_variables, exit_when_told, run_for_row
from vllm_turbo_cpu_standins.settings import ENGINE_ARGS

# vLLM's refusal of a context that the cache cannot hold.
NO_ROOM = re.compile(r"To serve at least [^\n]*?larger than the available [^\n]*?\)")
MIB = 2**20
BASELINE = "auto"
# The most that a turbo dtype may take beside the cache more than bf16, and as scratch.
MAX_EXTRA_MIB = 400
MAX_WORKSPACE_MIB = 256
# PyTorch's and the driver's allocators take whole segments.
SLACK_MIB = 2
# Tokens after a prefix: around the passes of the kernels for prefix hits, and beyond.
SUFFIXES = (1, 7, 16, 17, 32, 33, 100, 1000)
# The share of the long prompt that a request begins with.
SHARES = (1.0, 0.5, 0.1, 0.01, 0.0)
LINE = re.compile(r"KV cache \w+: .*; ([\d.]+) MiB of workspace")


def worker_memory(worker: Any) -> dict[str, int]:
    """Returns a worker's account of its memory, in bytes; {} on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, _ = torch.cuda.mem_get_info()
    return {
        "reserved": torch.cuda.memory_reserved(),
        "taken": worker.init_snapshot.free_memory - free,
        "requested": int(worker.requested_memory),
        "activations": int(worker.peak_activation_memory),
        "for_cache": int(worker.available_kv_cache_memory_bytes),
    }


def watch_steps(worker: Any) -> None:
    """Lets a worker note the steps after which the driver holds more than before."""
    import torch

    if not torch.cuda.is_available():
        return

    def held() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    execute = worker.execute_model
    before: dict[str, Any] = {"held": held(), "step": {}, "number": 0}
    worker.grown_after = grown = []

    def note() -> None:
        now = held()
        if now > before["held"]:
            grown.append(before["step"] | {"mib": (now - before["held"]) / MIB})
        before["held"] = now

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        note()
        tokens = scheduled.num_scheduled_tokens
        before["number"] += 1
        before["step"] = {
            "step": before["number"],
            "requests": len(tokens),
            "tokens": sum(tokens.values()),
            "longest": max(tokens.values(), default=0),
        }
        return execute(scheduled, *args, **kwargs)

    worker.execute_model = execute_model
    worker.note_step = note


def steps_seen(worker: Any) -> list[dict[str, Any]]:
    """Returns the steps that a worker has noted; none on a CPU."""
    if not hasattr(worker, "note_step"):
        return []
    worker.note_step()
    return worker.grown_after


@contextmanager
def launched(names: set[str]) -> Iterator[None]:
    """Adds the names of the kernels that run on the GPU in the block."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
    events = profiler.events() or []
    names |= {event.name for event in events if event.device_type == DeviceType.CUDA}


def prompts_of(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Returns the long prompt, then a full batch: shares of it with suffixes."""
    rng = random.Random(args.seed)
    tokens = plain_tokens(vocab_size)
    long = rng.choices(tokens, k=args.longest - max(args.suffixes))
    batch = []
    for i in range(args.max_num_seqs):
        share = int(SHARES[i % len(SHARES)] * len(long))
        suffix = args.suffixes[i // len(SHARES) % len(args.suffixes)]
        batch.append(long[:share] + rng.choices(tokens, k=suffix))
    return [long, *batch]


def measure_arm(dtype: str, max_model_len: int, args: argparse.Namespace) -> None:
    """Runs an arm's engine, and prints its measurements."""
    from vllm import LLM, SamplingParams

    options = dict(ENGINE_ARGS if args.on_cpu else {"enforce_eager": True})
    if dtype == BASELINE and args.baseline_backend:
        options["attention_config"] = {"backend": args.baseline_backend}
    overrides = {"max_position_embeddings": max_model_len}
    first, later = set[str](), set[str]()
    watched = ExitStack()
    if args.kernels:
        watched.enter_context(launched(first))
    start = time.perf_counter()
    llm = LLM(
        str(args.model),
        kv_cache_dtype=dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        hf_overrides=overrides,
        **options,
    )
    startup_s = time.perf_counter() - start
    config = llm.llm_engine.vllm_config
    vocab_size = config.model_config.get_vocab_size()
    params = SamplingParams(
        temperature=0.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )

    def memory() -> dict[str, int]:
        return llm.collective_rpc(worker_memory)[0]

    def generate(prompts: list[list[int]]) -> int:
        batch = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(batch, params, use_tqdm=False)
        return sum(output.num_cached_tokens or 0 for output in outputs)

    rng = random.Random(args.seed + 1)
    llm.collective_rpc(watch_steps)
    seen = {"start": memory()}
    # One step of all tokens and then one of all sequences.
    length = args.max_num_batched_tokens // args.max_num_seqs
    tokens = plain_tokens(vocab_size)
    generate([rng.choices(tokens, k=length) for _ in range(args.max_num_seqs)])
    seen["full_step"] = memory()
    watched.close()
    if args.kernels:
        watched.enter_context(launched(later))
    start = time.perf_counter()
    long, *batch = prompts_of(args, vocab_size)
    generate([long])
    # The second time, all whole blocks hit.
    cached = [generate(batch) for _ in range(2)]
    seen["end"] = memory()
    run_s = time.perf_counter() - start
    watched.close()
    cache = config.cache_config
    emit(
        startup_s=startup_s,
        run_s=run_s,
        use_mla=config.model_config.use_mla,
        cached_tokens=cached,
        memory=seen,
        driver_grew_after=llm.collective_rpc(steps_seen)[0],
        blocks=cache.num_gpu_blocks,
        block_size=cache.block_size,
        tokens=cache.kv_cache_size_tokens,
        **planned(llm),
        **({"new_kernels": sorted(later - first)} if args.kernels else {}),
    )


def planned(llm: Any) -> dict[str, int]:
    """Returns the planner's account: the bytes of a block in all layers, and the number
    of blocks for a request's recent window.
    """
    from vllm.utils.math_utils import cdiv
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    cache = scheduler.kv_cache_config
    # Groups of layers take turns in the same bytes.
    total = max(tensor.offset + tensor.size for tensor in cache.kv_cache_tensors)
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    window_blocks = sum(
        cdiv(
            spec.max_memory_usage_bytes(llm.llm_engine.vllm_config),
            spec.page_size_bytes,
        )
        for spec in specs
        if isinstance(spec, CircularBufferSpec)
    )
    return {
        "bytes_a_block": total // cache.num_blocks,
        "window_blocks": window_blocks,
    }


def tokens_held(row: dict[str, Any]) -> int:
    """Returns the tokens that the blocks hold, in requests of the longest length."""
    length = row["max_model_len"]
    blocks_a_request = -(-length // row["block_size"]) + row["window_blocks"]
    return int(row["blocks"] / blocks_a_request * length)


def run_arm(dtype: str, max_model_len: int, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one arm in a process, and returns its row."""
    log = args.logs / f"memory-{dtype}-{max_model_len}.log"
    row: dict[str, Any] = {"kv_cache_dtype": dtype, "max_model_len": max_model_len}
    row |= run_for_row(
        [sys.executable, __file__, *sys.argv[1:], "--child", dtype, str(max_model_len)],
        log,
        # The measurements need the worker in its engine's process.
        engine_variables(args.on_cpu) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        args.arm_timeout,
    )
    if "wrong" in row:
        return row
    line = LINE.search(log.read_text(errors="replace"))
    if line:
        row["workspace_mib"] = float(line[1])
    return row


def grown_mib(row: dict[str, Any], first: str, what: str) -> float:
    """Returns the growth of a part of the memory up to the end, in MiB."""
    return (row["memory"]["end"][what] - row["memory"][first][what]) / MIB


def driver_grown_mib(row: dict[str, Any]) -> float:
    """Returns the growth of the driver's memory beside PyTorch's, in MiB."""
    return grown_mib(row, "start", "taken") - grown_mib(row, "start", "reserved")


def over_requested_mib(row: dict[str, Any]) -> float:
    """Returns the device's taken memory beyond the requested share, in MiB.

    Memory for the cache that is smaller than a block is left over, and counts as taken.
    """
    end = row["memory"]["end"]
    left_over = end["for_cache"] - row["blocks"] * row["bytes_a_block"]
    return (end["taken"] + left_over - end["requested"]) / MIB


def complaints(row: dict[str, Any], baseline: dict[str, Any] | None) -> list[str]:
    """Returns the faults of a turbo dtype's row, beside bf16's row, which is None if
    bf16 has no room for such a context.
    """
    if "workspace_mib" not in row:
        return ["no line at the start"]
    held = tokens_held(row)
    wrong = []
    if held != row["tokens"]:
        wrong.append(f"the blocks hold {held} tokens, vLLM says {row['tokens']}")
    if (
        row["cached_tokens"][1] <= row["cached_tokens"][0]
        or not row["cached_tokens"][0]
    ):
        wrong.append("prefixes were not hit")
    if not row["memory"]["end"]:
        return wrong
    end = row["memory"]["end"]
    room = end["for_cache"] // row["bytes_a_block"]
    if room != row["blocks"]:
        wrong.append(f"there is room for {room} blocks, and {row['blocks']} were made")
    row["over_requested_mib"] = over_requested_mib(row)
    for what in ("reserved", "taken"):
        row[f"{what}_grown_mib"] = grown_mib(row, "start", what)
        row[f"{what}_grown_since_full_step_mib"] = grown_mib(row, "full_step", what)
    late = 0.0
    if baseline is not None and row.get("use_mla"):
        # Prefills project cached context up. The profile run counted this memory, but
        # steps without such context do not take it.
        late = max(late, grown_mib(baseline, "full_step", "reserved"))
    checks = {
        "memory was reserved after the first full step": (
            row["reserved_grown_since_full_step_mib"],
            late,
        ),
        "more was reserved than the profile run left for activations": (
            row["reserved_grown_mib"],
            end["activations"] / MIB,
        ),
        "the workspace is too large": (row["workspace_mib"], MAX_WORKSPACE_MIB),
    }
    if baseline is not None:
        other = baseline["memory"]["end"]
        row["extra_mib"] = (other["for_cache"] - end["for_cache"]) / MIB
        over = row["over_requested_mib"] - over_requested_mib(baseline)
        grown = driver_grown_mib(row) - driver_grown_mib(baseline)
        checks |= {
            "more was reserved after the start than in bf16": (
                row["reserved_grown_mib"],
                grown_mib(baseline, "start", "reserved") + SLACK_MIB,
            ),
            "more of the device is taken than in bf16": (
                over - max(grown, 0),
                SLACK_MIB,
            ),
            "the driver takes more after the start than in bf16": (grown, SLACK_MIB),
            "more is taken beside the cache than in bf16": (
                row["extra_mib"],
                MAX_EXTRA_MIB,
            ),
        }
    for text, (found, limit) in checks.items():
        if found > limit:
            wrong.append(f"{text}: {found:.1f} MiB, not {limit:.1f}")
    if baseline is not None:
        late = set(row.get("new_kernels", [])) - set(baseline.get("new_kernels", []))
        wrong += [
            f"first launched after the first full step: {x}" for x in sorted(late)
        ]
    return wrong


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CONFIGS / "llama-8b")
    parser.add_argument("--dtypes", nargs="+", default=["turbo4"])
    parser.add_argument("--baseline-backend", help="bf16's backend (vLLM's choice)")
    parser.add_argument(
        "--max-model-lens", nargs="+", type=int, default=[131072, 1 << 20]
    )
    parser.add_argument(
        "--longest", type=int, default=200_000, help="tokens of the longest prompt"
    )
    parser.add_argument("--suffixes", nargs="+", type=int, default=SUFFIXES)
    parser.add_argument("--tokens", type=int, default=16, help="generated per request")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="for a CPU")
    parser.add_argument("--kernels", action="store_true", help="name new GPU kernels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arm-timeout", type=float, default=200.0, help="seconds")
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/turbo-memory"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    args.on_cpu = not has_gpu()
    if args.kernels and args.on_cpu:
        parser.error("--kernels needs a GPU: leave it out")
    if args.child:
        dtype, max_model_len = args.child[0], int(args.child[1])
        args.longest = min(max_model_len - args.tokens, args.longest)
        measure_arm(dtype, max_model_len, args)
        return 0
    exit_when_told()
    report = Report(args.output)
    well = True
    for max_model_len in args.max_model_lens:
        baseline: dict[str, Any] | None = run_arm(BASELINE, max_model_len, args)
        refusal = NO_ROOM.search(str(baseline.get("wrong")))
        if refusal:
            baseline["wrong"] = [refusal[0]]
        report.row(**baseline)
        if refusal:
            baseline = None
        for dtype in args.dtypes:
            row = run_arm(dtype, max_model_len, args)
            if "wrong" not in row:
                row["wrong"] = (
                    ["bf16 has failed"]
                    if baseline and "wrong" in baseline
                    else complaints(row, baseline)
                )
            well = well and not row["wrong"]
            report.row(**row)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
