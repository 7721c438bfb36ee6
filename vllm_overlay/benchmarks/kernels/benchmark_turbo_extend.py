# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of several query tokens a sequence to cached context, as in prefix hits.

Each way is captured in a CUDA graph and replayed with a cold L2 cache, the ways in
turn. One JSON object a line, for each shape (the last tokens are part of a context),
number of query tokens and way:

* ``bf16``: FlashAttention 3, which reads pages in bf16.
* ``extend``: the CUDA kernel that reads packed pages, merge included.
* ``prefill``: packed pages are dequantised in pieces, and FlashAttention attends to
  these; rotations of queries and outputs included.

The query tokens are stored before, and attended to as computed. ``extend`` and
``prefill`` have to agree.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from benchmark_turbo_decode import Report, fill, run_facts
from turbo_decode_arms import Arm, Batch, Shape, TurboArm
from turbo_decode_peers import FlashAttentionArm
from turbo_decode_timing import capture, measure, measure_device, spread

DEFAULT_SHAPES = ("64x4096x32x8x128", "16x32768x32x8x128", "1x65536x32x8x128")
DEFAULT_QUERY_LENS = (2, 8, 16, 32, 64, 128)
# Between ways that round queries, keys and weights differently.
AGREEMENT = 0.02


class ExtendArm(TurboArm):
    """Packed pages, read by the extend kernel."""

    def __init__(
        self, batch: Batch, cache_dtype: str, cache: torch.Tensor | None = None
    ) -> None:
        from vllm.utils.platform_utils import num_compute_units
        from vllm.v1.attention.ops.turbo.interface import Partials

        super().__init__(batch, cache_dtype, "cuda", cache=cache)
        num_seqs, tokens = len(batch.seq_lens), batch.query.shape[0]
        splits = self.kernels.num_extend_splits(
            num_seqs, batch.shape.num_kv_heads, num_compute_units(), batch.query_len
        )
        heads = batch.shape.num_heads
        size = (tokens * splits, heads)
        self.num_splits = splits
        self.partials = Partials(
            torch.empty(*size, batch.shape.head_size, device=batch.device),
            torch.empty(size, device=batch.device),
        )
        self.attend = self.kernels.extend_attention
        self.query_len = batch.query_len


class PrefillArm(TurboArm):
    """Packed pages, dequantised for FlashAttention."""

    def __init__(
        self, batch: Batch, cache_dtype: str, cache: torch.Tensor | None = None
    ) -> None:
        from vllm.v1.attention.ops.turbo import prefill
        from vllm.v1.attention.ops.turbo.planning import prefill as prefill_plan
        from vllm.v1.attention.ops.turbo.planning.scratch import (
            LayerShape,
            PrefillScratch,
        )

        super().__init__(batch, cache_dtype, "cuda", cache=cache)
        shape, dtype = batch.shape, batch.query.dtype
        layer = LayerShape(shape.num_heads, shape.num_kv_heads, shape.head_size, dtype)
        limits = prefill_plan.prefill_limits(layer, stored=False)
        self.plan = prefill_plan.plan_prefill(
            batch.query_start_loc().cpu(),
            batch.seq_lens.cpu(),
            batch.block_table,
            False,
            limits,
            torch.device(batch.device),
        )
        specs = PrefillScratch.specs(
            layer, self.plan.max_buffered_tokens(), limits.piece_tokens
        )
        self.scratch = PrefillScratch(
            *(
                torch.empty(size, dtype=each, device=batch.device)
                for size, each in specs
            )
        )
        self.flash_attn = prefill.get_flash_attn(shape.head_size)

    def attention(self) -> None:
        from vllm.v1.attention.ops.turbo.prefill import prefill_attention

        batch = self.batch
        prefill_attention(
            batch.query,
            batch.key,
            batch.value,
            self.cache,
            self.plan,
            self.scale,
            self.layout,
            self.scratch,
            batch.output,
            self.flash_attn,
        )


def check(arms: dict[str, Arm]) -> None:
    """Compare the two ways over packed pages.

    Raises:
        AssertionError: If they do not agree; their times would mean nothing.

    """
    outputs = {}
    for name in ("extend", "prefill"):
        arms[name].batch.output.fill_(float("nan"))
        arms[name].attention()
        outputs[name] = arms[name].batch.output.float()
    error = (outputs["extend"] - outputs["prefill"]).norm() / outputs["prefill"].norm()
    # Written so that NaN fails.
    assert error <= AGREEMENT, f"extend and prefill differ by {error:.3g}"


def time_queries(
    shape: Shape,
    query_len: int,
    caches: dict[str, torch.Tensor],
    device_facts: dict[str, float],
    args: argparse.Namespace,
    report: Report,
) -> None:
    """Time the ways with so many query tokens a sequence; a row for each."""
    batch = Batch(shape, shape.seq_lens, args.block_size, args.device, query_len)
    arms: dict[str, Arm] = {
        "bf16": FlashAttentionArm(batch, False, False, cache=caches.get("bf16")),
        "extend": ExtendArm(batch, args.cache_dtype, cache=caches.get("turbo")),
    }
    cache = arms["extend"].cache
    arms["prefill"] = PrefillArm(batch, args.cache_dtype, cache=cache)
    if not caches:
        fill(arms["bf16"])
        fill(arms["extend"])
        caches |= {"bf16": arms["bf16"].cache, "turbo": cache}
    for arm in arms.values():
        arm.store()
    check(arms)
    row: dict[str, Any] = {"shape": str(shape), "cache_dtype": args.cache_dtype}
    row |= {"query_tokens": query_len}
    if args.profile:
        torch.cuda.profiler.start()
        arms["extend"].attention()
        torch.accelerator.synchronize()
        torch.cuda.profiler.stop()
        return
    graphs = {name: capture(arm.attention) for name, arm in arms.items()}
    for name, times in measure(graphs, args.rounds).items():
        report.row(**row, way=name, **spread(times), **device_facts)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=Shape.parse,
        default=[Shape.parse(text) for text in DEFAULT_SHAPES],
        metavar="SHAPE",
        help="sequences x tokens x heads x KV heads x head size",
    )
    parser.add_argument(
        "--query-lens", nargs="+", type=int, default=list(DEFAULT_QUERY_LENS)
    )
    parser.add_argument("--cache-dtype", default="turbo4")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="run the extend kernel once and time nothing, for "
        "ncu --profile-from-start off",
    )
    return parser


@torch.inference_mode()
def main() -> int:
    args = build_parser().parse_args()
    from vllm.utils.torch_utils import set_random_seed

    args.device = "cuda"
    set_random_seed(0)
    report = Report(args.output, run_facts(args))
    device_facts = {} if args.profile else measure_device(args.rounds)
    failed = False
    for shape in args.shapes:
        caches: dict[str, torch.Tensor] = {}
        for query_len in args.query_lens:
            try:
                time_queries(shape, query_len, caches, device_facts, args, report)
            except Exception:
                report.error(shape=str(shape), query_tokens=query_len)
                failed = True
        del caches
        torch.accelerator.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
