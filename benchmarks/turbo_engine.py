# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Capacity, prefill, decode time and throughput of vLLM's engine, by cache dtype.

Each arm is an engine in a process of its own, with dummy weights and CUDA graphs.
One JSON object a line:

* `startup`: time to build the engine, and how many tokens its cache holds.
* `prefill`: time to one token for a batch of random prompts; `cached_tokens` says
  how much of it an earlier, larger batch had left in the prefix cache.
* `prefix_hit`: the same once more, when all of it is cached.
* `decode`: time per output token of a sequence (TPOT): the difference between many
  tokens and one, over the steps between.
* `memory`: memory of the device that all processes take, after the first requests and
  at the end; the `startup` row has it after the start.
* `throughput`, with --throughput: output tokens by wall time when all requests come at
  once. With --kv-cache-memory-bytes every arm's cache has the same size. Most shapes do
  not fit then, so it is a run of its own, with an empty --shapes.

With --together FOLDER the arms' engines start side by side, which needs memory for all
of them (--kv-cache-memory-bytes). They measure one after another, when all have started
and FOLDER has no file named hold.

An arm is a --kv-cache-dtype. `turbo4:stored` also sets turbo_prefill, `turbo4:triton`
turbo_kernel, `turbo4:window` turbo_window, which is otherwise 0, and `fp8:FLASHINFER`
the attention backend. `turbo4:defaults` has the recent window and K's means, which are
otherwise off. Means need a checkpoint (random_checkpoint.py): `--model FOLDER
--engine-args '{"load_format": "auto", "skip_tokenizer_init": false}'`.
`turbo4:first` is for a vLLM with the first turbo4 alone: `series.py pr --site`.
`nvfp4` selects FlashInfer by itself and needs it installed, with
nvcc and ninja, because kernels are compiled at the first start. vLLM forces
FlashAttention 2 on its own turboquant dtypes. If that is not installed, --site-copy
makes them run with FlashAttention 3, in a copy of vLLM.
"""

import argparse
import fcntl
import importlib.util
import json
import os
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import CONFIGS, Report, first_line, plain_tokens
from turbo_process.arm import TURBO_DTYPES
from turbo_process.log import emit, last_error, rows_of
from turbo_process.runner import engine_variables, exit_when_told, run_child

if TYPE_CHECKING:
    from vllm import RequestOutput

# Options behind a turbo dtype and a colon.
ATTENTION_OPTIONS: dict[str, dict[str, str]] = {
    **{option: {"turbo_prefill": option} for option in ("raw", "stored")},
    **{option: {"turbo_kernel": option} for option in ("auto", "cuda", "triton")},
    "window": {"turbo_window": "auto"},
    "defaults": {"turbo_window": "auto", "turbo_means": "auto"},
}
# The option for the first turbo4, which has none of these.
FIRST = "first"
FORCED_VERSION = "attention_config.flash_attn_version = 2\n"
WARM_UP_PROMPTS = 2
WARM_UP_TOKENS = 12288
# The largest first: the others then find it in the prefix cache.
SHAPES = ((1, 65536), (16, 32768), (64, 4096), (1, 2048))
SWEEP_SHAPES = (
    *((1, 65536), (16, 32768), (1, 32768), (64, 8192), (16, 8192), (1, 8192)),
    *((64, 4096), (64, 2048), (16, 2048), (1, 2048)),
)


def used_mib() -> int | None:
    """Returns the MiB taken on the first visible GPU; None without a driver."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    line = first_line("nvidia-smi", *query, f"--id={device}")
    return int(line) if line and line.isdigit() else None


def random_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(plain_tokens(vocab_size), k=length)


class Engine:
    """One arm's engine."""

    def __init__(self, arm: str, args: argparse.Namespace) -> None:
        from vllm import LLM

        cache_dtype, _, option = arm.partition(":")
        self.args = args
        shapes = [(context, args.steps + 1) for _, context in args.shapes]
        self.max_num_seqs = args.max_num_seqs
        if args.throughput:
            shapes.append(args.throughput[1:])
            self.max_num_seqs = max(self.max_num_seqs, args.throughput[0])
        self.longest = max(prompt for prompt, _ in shapes)
        options: dict[str, Any] = {
            "kv_cache_dtype": cache_dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "max_model_len": max(map(sum, shapes)),
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
        }
        if option.isupper():
            options["attention_backend"] = option
        elif cache_dtype in TURBO_DTYPES and option != FIRST:
            attention: dict[str, Any] = {"turbo_window": 0, "turbo_means": "off"}
            attention |= ATTENTION_OPTIONS.get(option, {})
            options["attention_config"] = attention
        start = time.perf_counter()
        self.llm = LLM(str(args.model), **(options | args.engine_args))
        self.startup_s = time.perf_counter() - start
        config = self.llm.llm_engine.vllm_config
        self.cache_config = config.cache_config
        self.vocab_size = config.model_config.get_vocab_size()

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        extra_args: dict[str, Any] | None = None,
    ) -> tuple[float, list["RequestOutput"]]:
        """Returns the seconds that a batch takes, and its outputs."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra_args,
        )
        batch = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(batch, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        for output in outputs:
            assert len(output.outputs[0].token_ids) == max_tokens
        return seconds, outputs

    def prompts(self, count: int, length: int, first_seed: int = 0) -> list[list[int]]:
        """Returns random prompts; shorter ones are prefixes of longer ones."""
        return [
            random_prompt(first_seed + i, length, self.vocab_size) for i in range(count)
        ]

    def warm_up(self) -> None:
        """Lets the engine compile at first use: chunks, prefix hits, decoding."""
        length = min(self.longest, WARM_UP_TOKENS)
        prompts = self.prompts(WARM_UP_PROMPTS, length, first_seed=1_000_000)
        for _ in range(2):
            self.generate(prompts, 4)

    def measure(self, batch: int, context: int) -> Iterator[dict[str, Any]]:
        """Yields the rows of one shape."""
        needed = batch * (context + self.args.steps + 1)
        held = self.cache_config.kv_cache_size_tokens
        if held is not None and needed > held:
            yield {"skipped": f"{needed} tokens do not fit: the cache holds {held}"}
            return
        prompts = self.prompts(batch, context)
        seconds, outputs = self.generate(prompts, 1)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        yield {"part": "prefill", "seconds": seconds, "cached_tokens": cached}
        hits, tpots = [], []
        for _ in range(self.args.repeats):
            hit, outputs = self.generate(prompts, 1)
            whole, _ = self.generate(prompts, 1 + self.args.steps)
            hits.append(hit)
            tpots.append((whole - hit) / self.args.steps * 1e3)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        yield {
            "part": "prefix_hit",
            "seconds": statistics.median(hits),
            "all_seconds": hits,
            "cached_tokens": cached,
        }
        yield {
            "part": "decode",
            "tpot_ms": statistics.median(tpots),
            "all_tpot_ms": tpots,
            "steps": self.args.steps,
        }

    def measure_throughput(self) -> dict[str, Any]:
        """Returns the row of --throughput."""
        requests, length, max_tokens = self.args.throughput
        prompts = self.prompts(requests, length, first_seed=2_000_000)
        seconds, _ = self.generate(prompts, max_tokens)
        return {
            "part": "throughput",
            "requests": requests,
            "input_tokens": length,
            "output_tokens": max_tokens,
            "seconds": seconds,
            "output_tokens_per_s": requests * max_tokens / seconds,
            "kv_cache_tokens": self.cache_config.kv_cache_size_tokens,
            "kv_cache_memory_bytes": self.args.kv_cache_memory_bytes,
        }


def started(args: argparse.Namespace, arm: str) -> Path:
    """Returns the file that exists once an arm's engine has started, or ended."""
    return args.together / arm.replace(":", "-")


@contextmanager
def turn(args: argparse.Namespace, arm: str) -> Iterator[None]:
    """Waits until all arms' engines have started, and no other one measures.

    While a file named `hold` is beside the arms' files, all wait.
    """
    if not args.together:
        yield
        return
    started(args, arm).touch()
    hold = args.together / "hold"
    while hold.exists() or not all(
        started(args, other).exists() for other in args.arms
    ):
        time.sleep(0.1)
    with (args.together / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure_arm(arm: str, args: argparse.Namespace) -> None:
    """Measures one arm; the rows go to the standard output."""
    engine = Engine(arm, args)
    cache_config = engine.cache_config
    emit(
        part="startup",
        seconds=engine.startup_s,
        kv_cache_tokens=cache_config.kv_cache_size_tokens,
        block_size=cache_config.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        max_num_seqs=engine.max_num_seqs,
        used_mib=used_mib(),
    )
    engine.warm_up()
    warm_mib = used_mib()
    with turn(args, arm):
        for batch, context in args.shapes:
            shape = f"{batch}x{context}"
            try:
                for row in engine.measure(batch, context):
                    emit(shape=shape, **row)
            except Exception as error:
                emit(shape=shape, error=f"{type(error).__name__}: {error}"[:500])
                raise
        if args.throughput:
            emit(**engine.measure_throughput())
        emit(part="memory", warm_mib=warm_mib, end_mib=used_mib())
        engine.llm.llm_engine.engine_core.shutdown()


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_site(target: Path) -> None:
    """Copies the installed vLLM, with FlashAttention 3 for turboquant dtypes."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise RuntimeError("vLLM is not installed")
    package = Path(spec.origin).parent
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        package, target / "vllm", ignore=ignored, copy_function=link_or_copy
    )
    path = target / "vllm" / "engine" / "arg_utils.py"
    text = path.read_text()
    if text.count(FORCED_VERSION) != 1:
        raise RuntimeError(f"{path} does not hold {FORCED_VERSION!r} once")
    # A write through the hard link would change the original.
    path.unlink()
    path.write_text(text.replace(FORCED_VERSION, FORCED_VERSION.replace("2", "3")))


def child_variables(arm: str, args: argparse.Namespace) -> dict[str, str]:
    """Returns the variables of an arm's process."""
    cache = os.environ.get("VLLM_CACHE_ROOT", "/tmp/vllm_cache")
    variables = engine_variables(on_cpu=False) | {"VLLM_CACHE_ROOT": cache}
    if arm.startswith("turboquant_") and args.site_copy:
        copy_site(args.site_copy)
        path = (str(args.site_copy), os.environ.get("PYTHONPATH"))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return variables


def run_arm(arm: str, args: argparse.Namespace, report: Report) -> bool:
    """Runs one arm in a process, and reports its rows; returns whether all ran."""
    log = args.logs / f"{arm.replace(':', '-')}.log"
    log.unlink(missing_ok=True)
    wrong: str | None = "stopped"
    rows: list[dict[str, Any]] = []
    try:
        wrong = run_child(
            [sys.executable, *sys.argv, "--child", arm],
            log,
            child_variables(arm, args),
            args.arm_timeout,
        )
    finally:
        if log.exists():
            text = log.read_text(errors="replace")
            gib = re.findall(r"Available KV cache memory: ([\d.]+) GiB", text)
            found = {"kv_cache_gib": float(gib[-1])} if gib else {}
            rows = rows_of(log)
            for row in rows:
                report.row(arm=arm, **row, **found)
    if wrong:
        report.row(arm=arm, error=f"{wrong}: {last_error(log)}")
    return not wrong and not any("error" in row for row in rows)


def run_arms(args: argparse.Namespace, facts: dict[str, Any] | None = None) -> int:
    """Runs and reports all arms; returns the exit status.

    Args:
        args: The command line's.
        facts: More facts of the run, for every row, even if an arm does not start.

    """
    report = Report(args.output)
    report.facts |= facts or {}

    def run(arm: str) -> bool:
        try:
            return run_arm(arm, args, report)
        except Exception as error:
            report.row(arm=arm, error=f"{type(error).__name__}: {error}"[:500])
            return False
        finally:
            if args.together:
                started(args, arm).touch()

    if args.together:
        shutil.rmtree(args.together, ignore_errors=True)
        args.together.mkdir(parents=True)
    with ThreadPoolExecutor(len(args.arms) if args.together else 1) as pool:
        return 0 if all(list(pool.map(run, args.arms))) else 1


def parse_shape(text: str) -> tuple[int, int]:
    batch, context = map(int, text.split("x"))
    return batch, context


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=CONFIGS / "llama-8b")
    parser.add_argument("--arms", nargs="+", default=["auto", "fp8", "turbo4"])
    parser.add_argument(
        "--shapes",
        nargs="*",
        type=parse_shape,
        default=SHAPES,
        metavar="BATCHxCONTEXT",
        help="the largest first: the others then find it in the prefix cache",
    )
    parser.add_argument(
        "--sweep",
        dest="shapes",
        action="store_const",
        const=SWEEP_SHAPES,
        help="the shapes of the pictures: batch 1, 16 and 64, 2048 to 65536 tokens",
    )
    parser.add_argument(
        "--throughput",
        nargs=3,
        type=int,
        metavar=("REQUESTS", "INPUT", "OUTPUT"),
        help="measure that, too: requests, and the tokens of each",
    )
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="of every arm")
    parser.add_argument("--steps", type=int, default=64, help="decode steps timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="more of LLM's, as JSON"
    )
    parser.add_argument("--together", type=Path, help="folder, made anew")
    parser.add_argument("--site-copy", type=Path, help="folder, made anew")
    parser.add_argument("--arm-timeout", type=float, default=280.0, help="seconds")
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/turbo-engine"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    if not args.shapes and not args.throughput:
        parser.error("nothing to measure: neither --shapes nor --throughput")
    if args.child:
        measure_arm(args.child, args)
        return 0
    exit_when_told()
    return run_arms(args)


if __name__ == "__main__":
    sys.exit(main())
