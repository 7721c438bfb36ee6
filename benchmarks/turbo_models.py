# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode time and attention of models of other kinds than Llama, by cache dtype.

It differs from turbo_engine.py in that nothing is prefilled: vLLM's
DecodeBenchConnector says that a prompt is cached, and fills its blocks with a constant
(packed ones with zeros). A decode step costs the same with such keys as with others. So
contexts of any length fit into minutes. With --layers a model keeps only its first
layers, and its rows also have the number of all. The rows are:

* `startup`: time to build the engine, and how many tokens its cache holds.
* `decode`: time per output token of a sequence (TPOT), as in turbo_engine.py.
* `prefill`: time to one token of a prompt of the longest shape, which is computed.
* `attention`: microseconds of a decode step in which a kernel of attention runs (store,
  decode, merge, and their like for other caches); those in which any kernel runs; and
  each kernel's by name. They come from profiles of their own. A kernel that is launched
  before the one ahead has ended counts from its launch, so for short steps the
  difference of the second figure between arms is more exact. The first step, in which
  the connector fills states and recent windows, is subtracted.
* `follow_up`, with `--parts prefix`: chats of the shape's number and length are
  answered, and go on with each of `--turns` tokens. The row has the tokens of the
  prompts that the prefix cache held, those that had been computed, and the seconds
  until each chat had its first token. Nothing is filled here.

With `--quantization awq` the weights have 4 bits, and are dummies as well. vLLM takes
Marlin's kernels for them on a GPU. An arm that does not start has a row with its
`error`.

vLLM's simulation of routers draws the experts of each token. A router of dummy weights
would depend on the attention, so that arms would load different experts.
"""

import argparse
import gzip
import json
import os
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import follow_ups
from common import CONFIGS
from model_config import cut_layers, with_awq
from turbo_engine import Engine, build_parser, run_arms, turn, used_mib
from turbo_process.log import emit
from turbo_process.runner import exit_when_told

# The last shape has a short context, and shows the cost of a step beside attention.
SHAPES = ((16, 32768), (64, 4096), (16, 128))
FILLED_PARTS, PREFIX = ("decode", "prefill", "attention"), "prefix"
PROFILED_STEPS = 8
KERNELS_SHOWN = 24
NAME_LENGTH = 100
ATTENTION_US, KERNELS_US = "attention_us", "kernels_us"
# Kernels that store keys and values, quantise queries, attend, and join splits.
ATTENTION = re.compile(
    r"turbo::|(^|_)(store|decode|extend|merge|isolate|window|rotate_query|"
    r"weigh_by_sinks)_kernel|flash|unified_attention|reduce_segments|reshape_and_cache|"
    r"prepare_varlen|scaled_fp8_quant|_attn_packed|cache_int4|hadamard|per_token_head|"
    r"_latent_kernel|concat_and_cache_mla|mla_(combine|metadata)"
)
# Kernels of states that also have "flash" or "decode" in their names.
NOT_ATTENTION = re.compile(r"delta_rule|mamba|ssm|conv1d|(^|_)moe", re.IGNORECASE)


def is_attention(name: str) -> bool:
    return bool(ATTENTION.search(name)) and not NOT_ATTENTION.search(name)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of spans of (start, end).

    The span of a kernel that is launched early includes its wait for the one before.
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def kernels_of(trace: Path) -> list[tuple[str, float, float]]:
    """Returns (name, start, end) in us of a trace's kernels."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [
        (event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "kernel"
    ]


def kernel_times(kernels: list[tuple[str, float, float]]) -> Counter[str]:
    """Returns microseconds by a kernel's name, ATTENTION_US or KERNELS_US."""
    times: Counter[str] = Counter()
    for name, start, end in kernels:
        times[name[:NAME_LENGTH]] += end - start
    attention = [(start, end) for name, start, end in kernels if is_attention(name)]
    times[ATTENTION_US] = covered(attention)
    times[KERNELS_US] = covered((start, end) for _, start, end in kernels)
    return times


def attention_row(
    first: list[tuple[str, float, float]],
    whole: list[tuple[str, float, float]],
    steps: int,
) -> dict[str, Any]:
    """Returns the row of the steps after the first.

    Args:
        first: Kernels of the first step.
        whole: Kernels of the first step and of `steps` more.
        steps: The number of steps after the first.

    """
    times = kernel_times(whole)
    times.subtract(kernel_times(first))
    totals = {name: times.pop(name) / steps for name in (ATTENTION_US, KERNELS_US)}
    shown = dict(times.most_common(KERNELS_SHOWN))
    shown |= {name: us for name, us in times.items() if is_attention(name)}
    return {
        "part": "attention",
        "steps": steps,
        **totals,
        "by_kernel_us": {name: us / steps for name, us in shown.items()},
    }


class FilledEngine(Engine):
    """An engine whose prompts count as cached."""

    def __init__(self, arm: str, args: argparse.Namespace, traces: Path) -> None:
        self.traces = traces
        connector = {
            "kv_connector": "FillUnlessToldConnector",
            "kv_connector_module_path": "fill_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"startup_fill": True},
        }
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_activities": ["CUDA"],
            "torch_profiler_with_stack": False,
        }
        args.engine_args = {
            "kv_transfer_config": connector,
            "profiler_config": profiler,
            "enable_prefix_caching": False,
        } | args.engine_args
        super().__init__(arm, args)

    def decode(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Returns the row of decode time."""
        tpots = []
        for _ in range(self.args.repeats):
            one, _ = self.generate(prompts, 1)
            whole, _ = self.generate(prompts, 1 + self.args.steps)
            tpots.append((whole - one) / self.args.steps * 1e3)
        return {
            "part": "decode",
            "tpot_ms": statistics.median(tpots),
            "all_tpot_ms": tpots,
            "steps": self.args.steps,
        }

    def prefill(self) -> dict[str, Any]:
        """Returns the row of the longest prompt, which is computed."""
        from fill_connector import COMPUTED

        seconds = []
        for _ in range(1 + self.args.repeats):
            prompt = self.prompts(1, self.longest)
            seconds.append(self.generate(prompt, 1, COMPUTED)[0])
        # The first run compiles.
        return {
            "shape": f"1x{self.longest}",
            "part": "prefill",
            "seconds": statistics.median(seconds[1:]),
            "all_seconds": seconds[1:],
        }

    def profile(
        self, prompts: list[list[int]], tokens: int
    ) -> list[tuple[str, float, float]]:
        """Returns the kernels of so many tokens."""
        self.llm.start_profile()
        self.generate(prompts, tokens)
        self.llm.stop_profile()
        (trace,) = self.traces.glob("*.json.gz")
        kernels = kernels_of(trace)
        trace.unlink()
        return kernels

    def attention(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Returns the row of two profiles."""
        first, whole = (self.profile(prompts, 1 + n) for n in (0, PROFILED_STEPS))
        return attention_row(first, whole, PROFILED_STEPS)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of all shapes."""
        parts = self.args.parts
        for batch, context in self.args.shapes if "decode" in parts else ():
            prompts = self.prompts(batch, context)
            self.generate(prompts, 4)
            yield {"shape": f"{batch}x{context}"} | self.decode(prompts)
        if "prefill" in parts:
            yield self.prefill()
        # A profiler that ran may slow what comes after it.
        for batch, context in self.args.shapes if "attention" in parts else ():
            row = self.attention(self.prompts(batch, context))
            yield {"shape": f"{batch}x{context}"} | row

    def warm_up(self) -> None:
        self.generate(self.prompts(2, min(self.longest, 128)), 4)


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the configuration of the model that is measured.

    Raises:
        ValueError: If it cannot be made from the named one.
    """
    config = cut_layers(
        json.loads((args.model / "config.json").read_text()), args.layers
    )
    return with_awq(config) if args.quantization == "awq" else config


def measure_arm(arm: str, args: argparse.Namespace) -> None:
    """Measures one arm; the rows go to the standard output."""
    with tempfile.TemporaryDirectory() as name:
        folder, traces = Path(name) / args.model.name, Path(name) / "traces"
        folder.mkdir()
        traces.mkdir()
        (folder / "config.json").write_text(json.dumps(model_config(args)))
        args.model = folder
        engine: FilledEngine | follow_ups.ChatEngine
        if args.parts == [PREFIX]:
            engine = follow_ups.ChatEngine(arm, args)
        else:
            engine = FilledEngine(arm, args, traces)
        emit(
            part="startup",
            seconds=engine.startup_s,
            kv_cache_tokens=engine.cache_config.kv_cache_size_tokens,
            block_size=engine.cache_config.block_size,
            prefix_caching=engine.cache_config.enable_prefix_caching,
            prefix_match_unit=engine.cache_config.prefix_match_unit,
            gpu_memory_utilization=args.gpu_memory_utilization,
            max_num_seqs=engine.max_num_seqs,
            used_mib=used_mib(),
        )
        engine.warm_up()
        with turn(args, arm):
            for row in engine.rows():
                emit(**row)
            engine.llm.llm_engine.engine_core.shutdown()


def parse_args() -> argparse.Namespace:
    parser = build_parser()
    parser.description = __doc__.splitlines()[0]
    parser.set_defaults(model=CONFIGS / "gemma-3-27b", shapes=None)
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument(
        "--parts", nargs="+", choices=(*FILLED_PARTS, PREFIX), default=FILLED_PARTS
    )
    parser.add_argument("--quantization", choices=("awq",), help="of the weights")
    parser.add_argument(
        "--turns",
        nargs="+",
        type=int,
        default=follow_ups.TURNS,
        metavar="TOKENS",
        help="tokens of a chat's next turns, for --parts prefix",
    )
    parser.add_argument(
        "--prefix-match-unit", type=int, help="tokens, for --parts prefix of hybrids"
    )
    args = parser.parse_args()
    if PREFIX in args.parts and args.parts != [PREFIX]:
        parser.error("prefix has an engine of its own: measure --parts prefix alone")
    if args.shapes is None:
        args.shapes = follow_ups.SHAPES if PREFIX in args.parts else SHAPES
    if not args.shapes or args.throughput:
        parser.error("--shapes only are measured, and one of them at least")
    try:
        model_config(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> int:
    args = parse_args()
    if args.child:
        measure_arm(args.child, args)
        return 0
    exit_when_told()
    os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    config = json.loads((args.model / "config.json").read_text())
    facts = {
        "model": args.model.name,
        "layers": args.layers or config["num_hidden_layers"],
        "of_layers": config["num_hidden_layers"],
        "quantization": model_config(args).get("quantization_config"),
    }
    return run_arms(args, facts)


if __name__ == "__main__":
    sys.exit(main())
