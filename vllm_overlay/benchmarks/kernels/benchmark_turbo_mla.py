# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MLA with the turbo KV cache, compared to vLLM's other KV caches on Hopper.

Each arm must first attend correctly on a small batch. Then its parts are captured in
CUDA graphs and replayed with a cold L2 cache, the arms in turn. The output is one JSON
object a line, for each arm and part:

* ``attention``: absorbed, from queries to outputs in the coordinates of latents, merge
  of splits included. FlashAttention and FlashMLA get their schedules, which vLLM
  computes once a step; the quantisation of FlashMLA's fp8 query is not counted.
* ``store``: the step's latents and rotary keys into the cache.
* ``prefill_store``: latents and rotary keys of a prompt's chunk of
  ``--prefill-tokens`` tokens into the cache.
* ``gather``: a chunk of ``--gather-tokens`` tokens of contexts, dequantised for
  prefill, if there are so many.

bf16 and bf16_flashmla are FLASH_ATTN_MLA and FLASHMLA, fp8 is FLASHMLA, and the
``_triton`` arms are TRITON_MLA. The turbo arms run the kernels that would be served,
which are CUDA's if these can be built; their ``_triton`` arms always run Triton's.
turbo4_slices attends with the CUDA kernels of compute capability 10.0 and 12.0, and
turbo4_slices_8x with those of 8.0 to 8.9, which also run on later GPUs.
turbo4_warpgroups attends with Hopper's products of warpgroups whose columns are query
rows, whatever their number, and turbo4_rows with those whose rows they are. The
``_listed`` arms attend to lists of 2048 tokens, as in sparse MLA, and fp8ds_listed is
FLASHMLA_SPARSE. An arm that cannot run here ends as a row with its error.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark_turbo_decode import Report, choose_correct, fill, run_facts
from turbo_decode_timing import capture, measure, measure_device, spread
from turbo_mla_arms import (
    BLOCK_SIZE,
    DTYPE,
    RANK,
    SIZE,
    Arm,
    Batch,
    Chunk,
    FlashAttentionArm,
    FlashMLAArm,
    Shape,
    TritonArm,
)
from turbo_mla_listed import ListedFlashMLAArm, ListedTurboArm
from turbo_mla_packed import PLANS, TurboArm

TURBO_DTYPES = ("turbo4", "turbo3")
# An arm's name begins with the name of its cache. Arms with the same cache share it.
ARMS: dict[str, Callable[..., Arm]] = {
    "bf16": FlashAttentionArm,
    "bf16_flashmla": FlashMLAArm,
    "bf16_triton": TritonArm,
    "fp8": partial(FlashMLAArm, fp8=True),
    "fp8_triton": partial(TritonArm, fp8=True),
    **{dtype: partial(TurboArm, cache_dtype=dtype) for dtype in TURBO_DTYPES},
    "turbo4_mean": partial(TurboArm, cache_dtype="turbo4", has_mean=True),
    **{
        f"{dtype}_triton": partial(TurboArm, cache_dtype=dtype, kernels="triton")
        for dtype in TURBO_DTYPES
    },
    **{
        f"turbo4_{name}": partial(TurboArm, cache_dtype="turbo4", kernels=name)
        for name in PLANS
    },
    "fp8ds_listed": ListedFlashMLAArm,
    "turbo4_listed": partial(ListedTurboArm, cache_dtype="turbo4"),
    "turbo4_triton_listed": partial(
        ListedTurboArm, cache_dtype="turbo4", kernels="triton"
    ),
}
DEFAULT_SHAPES = (
    *(f"32x32768x{rows}" for rows in ("8", "16", "20", "32", "64", "20x4", "128")),
    "128x4096x16",
    "128x4096x20",
    "1x131072x16",
    "1x131072x20",
)
# Lengths of the gate's sequences: short, around a step's end, of several splits.
GATE_LENS = (4, 63, 64, 65, 700, 1029)
# The gate's bound of the relative error of quantised latents.
QUANTISATION_ERROR = 0.2


def exact(
    query: torch.Tensor, rows: torch.Tensor, num_seen: int, scale: float
) -> torch.Tensor:
    """The fp32 output, (Hq, L), of a token's attention to a sequence's first rows."""
    rows = rows[:num_seen].float()
    weights = (query.float() @ rows.T * scale).softmax(-1)
    return weights @ rows[:, :RANK]


def gate(make_arm: Callable[..., Arm], shape: Shape, args: argparse.Namespace) -> None:
    """Check an arm against fp32 attention to its cache's dequantised content.

    Raises:
        AssertionError: The arm is wrong, so that its timing would mean nothing.

    """
    batch = Batch(shape, list(GATE_LENS), args.device)
    arm = make_arm(batch)
    slots = torch.cat([batch.slots(i) for i in range(len(GATE_LENS))])
    given = batch.random(sum(GATE_LENS), SIZE)
    arm.write(given[:, :RANK], given[:, RANK:], slots)
    chunk = Chunk(batch, sum(GATE_LENS) * len(GATE_LENS))
    held = torch.full_like(given, float("nan"))
    arm.gather(chunk, held)
    far = (held - given).float().norm() / given.float().norm()
    # NaN fails this comparison and the one below.
    assert far <= QUANTISATION_ERROR, f"latents off by {far:.3g}"
    output = arm.latents(arm.attention())
    begin = 0
    for i, length in enumerate(GATE_LENS):
        rows = held[begin : begin + length]
        begin += length
        for j in range(shape.query_len):
            token = i * shape.query_len + j
            num_seen = length - shape.query_len + j + 1
            expected = exact(batch.query[token], rows, num_seen, shape.scale)
            error = (output[token] - expected).norm()
            bound = arm.relative_error * expected.norm()
            assert error <= bound, f"{length} tokens: {error:.3g} > {bound:.3g}"


def parts_of(arm: Arm, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The parts of an arm that are timed, by name."""
    batch = arm.batch
    parts: dict[str, Callable[[], Any]] = {
        "store": arm.store,
        "attention": arm.attention,
    }
    if chunk := batch.chunk(args.prefill_tokens):
        parts["prefill_store"] = partial(arm.write, *chunk)
    num_tokens = batch.shape.batch * batch.shape.context
    if not arm.num_read and 0 < args.gather_tokens <= num_tokens:
        context = Chunk(batch, args.gather_tokens)
        output = torch.empty(context.num_tokens, SIZE, dtype=DTYPE, device=batch.device)
        parts["gather"] = partial(arm.gather, context, output)
    return parts


def count_bytes(arm: Arm, part: str, args: argparse.Namespace) -> int | None:
    """Bytes that a part reads and writes; None if they do not bound its time."""
    shape, row_bytes = arm.batch.shape, SIZE * DTYPE.itemsize
    if part == "attention":
        num_tokens = min(shape.context, arm.num_read or shape.context)
        return shape.batch * num_tokens * arm.token_bytes
    if part == "prefill_store":
        return args.prefill_tokens * (row_bytes + arm.token_bytes)
    if part == "gather":
        return args.gather_tokens * (row_bytes + arm.token_bytes)
    return None


def time_shape(
    shape: Shape,
    makers: dict[str, Callable[..., Arm]],
    device_facts: dict[str, float],
    args: argparse.Namespace,
    report: Report,
) -> None:
    """Time the arms on one shape, and report a row for each of their parts."""
    batch = Batch(shape, [shape.context] * shape.batch, args.device)
    caches: dict[str, torch.Tensor] = {}
    arms: dict[str, Arm] = {}
    # Kept, because the graphs read and write the parts' tensors.
    parts: dict[str, dict[str, Callable[[], Any]]] = {}
    graphs: dict[tuple[str, str], torch.cuda.CUDAGraph] = {}
    for name, make_arm in makers.items():
        base = name.split("_")[0]
        try:
            arm = make_arm(batch, cache=caches.get(base))
            if base not in caches:
                fill(arm)
            parts[name] = parts_of(arm, args)
            graphs |= {(name, part): capture(run) for part, run in parts[name].items()}
        except Exception:
            report.error(shape=str(shape), arm=name)
            continue
        caches[base], arms[name] = arm.cache, arm
    for (name, part), times in measure(graphs, args.rounds).items():
        row: dict[str, Any] = {"shape": str(shape), "arm": name, "part": part}
        row |= spread(times)
        num_bytes = count_bytes(arms[name], part, args)
        if num_bytes is not None:
            rate = num_bytes / row["median_us"] * 1e-3
            row |= {"bytes": num_bytes, "gb_per_s": round(rate, 1)}
        if isinstance(arms[name], TurboArm):
            row["kernels"] = arms[name].kernels.name
        report.row(**row, **device_facts)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=Shape.parse,
        default=[Shape.parse(text) for text in DEFAULT_SHAPES],
        metavar="SHAPE",
        help="batch x context x heads: 32x32768x16; with several query tokens of each: "
        "32x32768x20x4",
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--prefill-tokens", type=int, default=8192, help="of a chunk; 0: none"
    )
    parser.add_argument(
        "--gather-tokens", type=int, default=65536, help="of contexts; 0: none"
    )
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument(
        "--check-only", action="store_true", help="run the correctness gates alone"
    )
    return parser


@torch.inference_mode()
def main() -> int:
    args = build_parser().parse_args()
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_random_seed

    args.device, args.block_size = current_platform.device_type, BLOCK_SIZE
    set_random_seed(0)
    report = Report(args.output, run_facts(args))
    device_facts = {} if args.check_only else measure_device(args.rounds)
    makers = {name: ARMS[name] for name in args.arms}
    correct: dict[tuple[int, int], dict[str, Callable[..., Arm]]] = {}
    for shape in args.shapes:
        heads = shape.num_heads, shape.query_len
        if heads not in correct:
            correct[heads] = choose_correct(makers, gate, shape, args, report)
        if not args.check_only:
            time_shape(shape, correct[heads], device_facts, args, report)
            torch.accelerator.empty_cache()
    return 0 if all(len(found) == len(args.arms) for found in correct.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
