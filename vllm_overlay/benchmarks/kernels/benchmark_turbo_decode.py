# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention over the turbo KV cache, compared to vLLM's other KV caches.

Each arm must first attend correctly on a small batch. Then its parts of a decode step
are captured in CUDA graphs and replayed with a cold L2 cache, the arms in turn. The
output is one JSON object a line, for each arm and part:

* ``attention``: from the query to the output, merge of the splits included.
  FlashAttention and FlashInfer get their schedules, which vLLM computes once a step;
  the ``_unplanned`` arms let FlashAttention choose the splits by itself.
* ``store``: the step's K and V into the cache. turbo also rotates q in it; the
  quantisation of the fp8 arm's q is not counted.
* ``step``: both, one after the other.
* ``layers``: ``LAYERS`` times a kernel that makes the query, as in a model, and a step.
  From the second layer on, the cache that is read is warm.
* ``cold_layers``: the same, but each layer has a cold L2 cache, as after a model's
  weights. The kernels' instructions and tables are cold also. ``layer_us`` is the time
  of a layer without the emptying of the cache.
* ``prefill_store``: the K and V of a prompt's chunk of ``--prefill-tokens`` tokens into
  the cache, if it has room for them. Its bytes are those read and written.

The turbo arms run the kernels that would be served, which are CUDA's if these can be
built. Their variants:

* ``_triton``: always Triton's kernels.
* ``_offset``: an offset is taken off K, as for models that add a bias to it;
  ``_direction``: errors of K are orthogonal to a direction as well, which changes the
  store alone.
* ``_sliding``, ``_sliding128``: a query sees only the last 1024 or 128 tokens.
* ``_window``: there is a full recent window; the gate attends without it.
* ``_BLHNC``, ``_BHLNC``: other layers' pages lie between pages, or between heads.
* ``_serial``: no turbo kernel begins before the previous kernel has ended, as without
  programmatic dependent launch.
* ``_passes``: the decode kernel of all GPUs runs, even where Hopper's own would serve
  more than 16 queries of a KV head.
* ``_extend``: the kernel that extends contexts decodes.

bf16 and fp8 are FlashAttention 3, or FlashAttention 4 for heads of more than 256. Their
``_triton`` arms are vLLM's Triton backend. ``_flashinfer`` is XQA, which vLLM's
FlashInfer backend chooses on Hopper if it can reach NVIDIA's server, and
``_flashinfer_fa2`` is its choice otherwise. An arm that cannot run here ends as a row
with its error.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import regex as re
import torch
from turbo_decode_arms import DTYPE, OTHER_KERNELS, Arm, Batch, Shape, TurboArm
from turbo_decode_peers import (
    FlashAttentionArm,
    FlashInferArm,
    Nvfp4Arm,
    TritonArm,
    TurboQuantArm,
    XqaArm,
)
from turbo_decode_timing import Flush, capture, measure, measure_device, spread

TURBO_DTYPES = ("turbo4", "k4v3", "turbo3")
# Sliding windows in tokens, by the end of an arm's name.
SLIDING_WINDOWS = {"_sliding": 1024, "_sliding128": 128}
# Layouts of pages that end an arm's name; other arms have LBHNC.
CACHE_LAYOUTS = "BLHNC", "BHLNC"
# The number of layers in the parts ``layers`` and ``cold_layers``.
LAYERS = 8
# The key of a graph that belongs to no arm.
FLUSHES = "", "flushes"
# An arm's name begins with the name of its cache. Arms with the same cache share it.
ARMS: dict[str, Callable[..., Arm]] = {
    "bf16": partial(FlashAttentionArm, fp8=False, planned=True),
    "bf16_unplanned": partial(FlashAttentionArm, fp8=False, planned=False),
    "bf16_triton": partial(TritonArm, fp8=False),
    "bf16_flashinfer": partial(XqaArm, fp8=False),
    "bf16_flashinfer_fa2": FlashInferArm,
    "fp8": partial(FlashAttentionArm, fp8=True, planned=True),
    "fp8_unplanned": partial(FlashAttentionArm, fp8=True, planned=False),
    "fp8_triton": partial(TritonArm, fp8=True),
    "fp8_flashinfer": partial(XqaArm, fp8=True),
    "nvfp4": Nvfp4Arm,
    "turboquant_4bit_nc": partial(
        TurboQuantArm, cache_dtype="turboquant_4bit_nc"
    ),
    **{dtype: partial(TurboArm, cache_dtype=dtype) for dtype in TURBO_DTYPES},
    **{
        f"{dtype}_triton": partial(TurboArm, cache_dtype=dtype, kernels="triton")
        for dtype in TURBO_DTYPES
    },
    **{
        f"{dtype}{kernels and f'_{kernels}'}_{table}": partial(
            TurboArm,
            cache_dtype=dtype,
            kernels=kernels or "auto",
            has_key_offset=True,
            has_direction=table == "direction",
        )
        for dtype in TURBO_DTYPES
        for kernels in ("", "triton")
        for table in ("offset", "direction")
    },
    **{
        f"{dtype}_{layout}": partial(TurboArm, cache_dtype=dtype, cache_layout=layout)
        for dtype in TURBO_DTYPES
        for layout in CACHE_LAYOUTS
    },
    **{
        f"{dtype}_{name}": partial(
            TurboArm, cache_dtype=dtype, kernels="cuda", other_kernel=name
        )
        for dtype in TURBO_DTYPES
        for name in OTHER_KERNELS
    },
    **{
        f"{dtype}_window": partial(TurboArm, cache_dtype=dtype, has_tail=True)
        for dtype in TURBO_DTYPES
    },
    **{
        f"{dtype}{sliding}{serial}": partial(
            TurboArm,
            cache_dtype=dtype,
            kernels="cuda" if serial else "auto",
            sliding_window=SLIDING_WINDOWS.get(sliding),
            enable_pdl=not serial,
        )
        for dtype in TURBO_DTYPES
        for sliding in ("", *SLIDING_WINDOWS)
        for serial in ("", "_serial")
        if sliding or serial
    },
    **{
        f"{dtype}{sliding}": partial(
            FlashAttentionArm,
            fp8=dtype == "fp8",
            planned=True,
            sliding_window=window,
        )
        for dtype in ("bf16", "fp8")
        for sliding, window in SLIDING_WINDOWS.items()
    },
}  # fmt: skip
DEFAULT_SHAPES = (
    "32x32768x32x8x128",
    "128x4096x32x8x128",
    "1x131072x32x8x128",
    "1x131072+63x2048x32x8x128",
    "32x32768x16x2x256",
)
SWEEP_SHAPES = tuple(
    f"{batch}x{context}x32x8x128"
    for batch in (1, 32)
    for context in (1024, 4096, 16384, 65536, 131072)
)
# Lengths of the gate's sequences: short, around a block's end, of several splits.
GATE_LENS = (1, 63, 16, 17, 700, 1029)
# The gate's bound of the relative error of quantised K and V.
QUANTISATION_ERROR = 0.3
SEED_TOKENS = 4096


def gate(make_arm: Callable[..., Arm], shape: Shape, args: argparse.Namespace) -> None:
    """Check an arm against fp32 attention.

    Raises:
        AssertionError: The arm is wrong, so that its timing would mean nothing.

    """
    from vllm.v1.attention.ops.turbo.reference import attention

    batch = Batch(shape, list(GATE_LENS), args.block_size, args.device)
    arm = make_arm(batch)
    slots = [batch.slots(i) for i in range(len(GATE_LENS))]
    keys, values = zip(*map(batch.tokens, GATE_LENS))
    # A sequence at a time, because its first token has an offset of its own.
    for tokens in zip(keys, values, slots):
        arm.write(*tokens)
    batch.key.copy_(torch.stack([key[-1] for key in keys]))
    batch.value.copy_(torch.stack([value[-1] for value in values]))
    arm.store()
    arm.attention()
    for i, length in enumerate(GATE_LENS):
        query, output = batch.query[i : i + 1].cpu(), batch.output[i].cpu().float()
        key, value = arm.held(keys[i], values[i], slots[i])
        for held, given in ((key, keys[i]), (value, values[i])):
            far = (held - given.cpu()).norm() / given.cpu().norm()
            assert far <= QUANTISATION_ERROR, (
                f"{length} tokens: K or V off by {far:.3g}"
            )
        expected = arm.exact(query, key, value)[0]
        if arm.relative_error is not None:
            error = (output - expected).norm()
            bound = arm.relative_error * expected.norm()
        else:
            plain = attention(query.float(), key, value, arm.scale)[0][0]
            same_dtype = attention(query, key.to(DTYPE), value.to(DTYPE), arm.scale)
            error = (output - expected).abs().max()
            bound = 2 * (same_dtype[0][0].float() - plain).abs().max() + 1e-4
        # NaN fails this comparison.
        assert error <= bound, f"{length} tokens: error {error:.3g} > {bound:.3g}"


def fill(arm: Any) -> None:
    """Fill the whole cache with SEED_TOKENS random tokens, repeated."""
    batch, num_blocks = arm.batch, arm.cache.shape[0]
    seed_blocks = min(num_blocks, SEED_TOKENS // batch.block_size)
    num_tokens = seed_blocks * batch.block_size
    slots = torch.arange(num_tokens, device=batch.device)
    arm.write(*batch.tokens(num_tokens), slots)
    for first in range(seed_blocks, num_blocks, seed_blocks):
        blocks = arm.cache[first : first + seed_blocks]
        blocks.copy_(arm.cache[: blocks.shape[0]])


def run_facts(args: argparse.Namespace) -> dict[str, Any]:
    """The facts of the run, which are in every row."""
    import triton

    import vllm
    from vllm.platforms import current_platform

    commit = os.environ.get("COMMIT")
    if not commit:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True)
        commit = "unknown" if found.returncode else found.stdout.strip()
    return {
        "gpu": current_platform.get_device_name(),
        "commit": commit,
        "command": shlex.join(["python", *sys.argv]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm.__version__,
        "block_size": args.block_size,
        "rounds": args.rounds,
    }


class Report:
    """Writes rows as JSON lines, unbuffered, to standard output and to a file."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a") if path else None
        self.facts = facts

    def row(self, **fields: Any) -> None:
        line = json.dumps(fields | self.facts)
        for stream in (sys.stdout, self.file):
            if stream:
                print(line, file=stream, flush=True)

    def error(self, **fields: Any) -> None:
        """Report the exception that is being handled."""
        traceback.print_exc()
        lines = traceback.format_exc().strip().splitlines()
        self.row(**fields, error=lines[-1][:500])


def choose_arms(args: argparse.Namespace) -> dict[str, Callable[..., Arm]]:
    """Arms by name: those of ``--arms``, and variants of turbo arms on Triton."""
    arms = {name: ARMS[name] for name in args.arms}
    for dtype in [name for name in args.arms if name in TURBO_DTYPES]:
        for variant in args.variants:
            name = f"{dtype}[{','.join(map(str, variant))}]"
            arms[name] = partial(
                TurboArm, cache_dtype=dtype, kernels="triton", variant=variant
            )
    return arms


def make_filled(
    name: str, make_arm: Callable[..., Arm], batch: Batch, others: dict[str, Arm]
) -> Arm:
    """An arm with a full cache: its dtype's own arm's, if there is one."""
    base = others.get(re.split(r"[_\[]", name)[0])
    if base is not None and not name.endswith(CACHE_LAYOUTS):
        arm = make_arm(batch, cache=base.cache)
    else:
        arm = make_arm(batch)
        fill(arm)
    if isinstance(arm, TurboArm):
        arm.fill_tail()
    return arm


def run_step(arm: Arm) -> None:
    """Run a layer's attention in a step: store, then attend."""
    arm.store()
    arm.attention()


def run_layers(arm: Arm, flush: Callable[[], Any] | None = None) -> None:
    """Run the steps of ``LAYERS`` layers, each after a kernel that makes the query."""
    for _ in range(LAYERS):
        if flush is not None:
            flush()
        arm.batch.query.mul_(1.0)
        run_step(arm)


def run_flushes(query: torch.Tensor, flush: Callable[[], Any]) -> None:
    """Run the other work of ``run_layers``, without steps."""
    for _ in range(LAYERS):
        flush()
        query.mul_(1.0)


def count_bytes(arm: Arm, part: str, prefill_tokens: int) -> int | None:
    """Bytes of K and V that a part reads and writes; None if they do not bound it."""
    shape = arm.batch.shape
    if part == "attention":
        longest = getattr(arm, "sliding_window", None) or max(shape.seq_lens)
        tokens = sum(min(length, longest) for length in shape.seq_lens)
        return tokens * shape.num_kv_heads * arm.token_bytes
    if part == "prefill_store":
        token_bytes = 2 * shape.head_size * DTYPE.itemsize + arm.token_bytes
        return prefill_tokens * shape.num_kv_heads * token_bytes
    return None


def time_shape(
    shape: Shape,
    makers: dict[str, Callable[..., Arm]],
    device_facts: dict[str, float],
    args: argparse.Namespace,
    report: Report,
) -> None:
    """Time the arms on one shape, and report a row for each of their parts."""
    batch = Batch(shape, shape.seq_lens, args.block_size, args.device)
    chunk = batch.chunk(args.prefill_tokens)
    flush = Flush()
    arms: dict[str, Arm] = {}
    parts: dict[tuple[str, str], Callable[[], Any]] = {}
    graphs: dict[tuple[str, str], torch.cuda.CUDAGraph] = {}
    graphs[FLUSHES] = capture(partial(run_flushes, batch.query, flush))
    for name, make_arm in makers.items():
        try:
            arm = make_filled(name, make_arm, batch, arms)
            own: dict[str, Callable[[], Any]] = {
                "store": arm.store,
                "attention": arm.attention,
                "step": partial(run_step, arm),
                "layers": partial(run_layers, arm),
                "cold_layers": partial(run_layers, arm, flush),
            }
            if chunk is not None:
                own["prefill_store"] = partial(arm.write, *chunk)
            graphs |= {(name, part): capture(run) for part, run in own.items()}
        except Exception:
            report.error(shape=str(shape), arm=name)
            continue
        arms[name] = arm
        parts |= {(name, part): run for part, run in own.items()}
    if args.profile:
        profile(parts)
        return
    times_of = measure(graphs, args.rounds)
    flushes_us = spread(times_of.pop(FLUSHES))["median_us"]
    for (name, part), times in times_of.items():
        row: dict[str, Any] = {"shape": str(shape), "arm": name, "part": part}
        row |= spread(times)
        num_bytes = count_bytes(arms[name], part, args.prefill_tokens)
        if num_bytes is not None:
            rate = num_bytes / row["median_us"] * 1e-3
            row |= {
                "bytes": num_bytes,
                "gb_per_s": round(rate, 1),
                "percent_of_copy": round(100 * rate / device_facts["copy_gb_per_s"], 1),
            }
        if part == "attention":
            row["num_splits"] = getattr(arms[name], "num_splits", None)
        if part == "cold_layers":
            row["layer_us"] = round((row["median_us"] - flushes_us) / LAYERS, 2)
        if part == "prefill_store":
            row["tokens"] = args.prefill_tokens
        report.row(**row, **device_facts)


def profile(parts: dict[tuple[str, str], Callable[[], Any]]) -> None:
    """Run each arm's parts once while the profiler is on."""
    torch.cuda.profiler.start()
    for run in parts.values():
        run()
    torch.accelerator.synchronize()
    torch.cuda.profiler.stop()


def choose_correct(
    makers: dict[str, Callable[..., Any]],
    check: Callable[..., None],
    shape: Any,
    args: argparse.Namespace,
    report: Report,
) -> dict[str, Callable[..., Any]]:
    """The arms that attend correctly with a shape's heads, by name."""
    correct: dict[str, Callable[..., Any]] = {}
    for name, make_arm in makers.items():
        try:
            check(make_arm, shape, args)
        except Exception:
            report.error(shape=str(shape), arm=name, part="gate")
        else:
            correct[name] = make_arm
    if args.check_only:
        report.row(shape=str(shape), part="gate", correct=list(correct))
    return correct


def parse_variant(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if len(numbers) != 5:
        fields = "N,WARPS,STAGES,REGISTERS,SPLITS"
        raise argparse.ArgumentTypeError(f"{text!r} is not {fields}")
    return numbers


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=Shape.parse,
        default=[Shape.parse(text) for text in DEFAULT_SHAPES],
        metavar="SHAPE",
        help="batch x context x heads x KV heads x head size: 32x32768x32x8x128; "
        "of several lengths: 1x131072+63x2048x32x8x128",
    )
    parser.add_argument(
        "--sweep",
        dest="shapes",
        action="store_const",
        const=[Shape.parse(text) for text in SWEEP_SHAPES],
        help="the shapes of the pictures: batch 1 and 32, 1024 to 131072 tokens",
    )
    # Arms of other layouts take the memory of several layers. Other kernels are for
    # more queries of a KV head than the default shapes have.
    others = *CACHE_LAYOUTS, *OTHER_KERNELS
    default_arms = [name for name in ARMS if not name.endswith(others)]
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=default_arms)
    parser.add_argument(
        "--variants",
        nargs="+",
        type=parse_variant,
        default=[],
        metavar="N,WARPS,STAGES,REGISTERS,SPLITS",
        help="launches of Triton's turbo attention kernel to try besides the one "
        "served; REGISTERS 0: no limit; SPLITS 0: as served",
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--prefill-tokens", type=int, default=8192, help="of a chunk; 0: none"
    )
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument(
        "--check-only", action="store_true", help="run the correctness gates alone"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="run each part once and time nothing: for ncu --profile-from-start off",
    )
    return parser


@torch.inference_mode()
def main() -> int:
    args = build_parser().parse_args()
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_random_seed

    args.device = current_platform.device_type
    set_random_seed(0)
    report = Report(args.output, run_facts(args))
    is_timed = not (args.check_only or args.profile)
    device_facts = measure_device(args.rounds) if is_timed else {}
    makers = choose_arms(args)
    correct: dict[tuple[int, int, int], dict[str, Callable[..., Arm]]] = {}
    for shape in args.shapes:
        heads = shape.num_heads, shape.num_kv_heads, shape.head_size
        if heads not in correct:
            correct[heads] = choose_correct(makers, gate, shape, args, report)
        if not args.check_only:
            time_shape(shape, correct[heads], device_facts, args, report)
            torch.accelerator.empty_cache()
    return 0 if all(len(found) == len(makers) for found in correct.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
