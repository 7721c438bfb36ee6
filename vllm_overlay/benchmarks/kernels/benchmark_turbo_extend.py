# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of several query tokens a sequence to cached context, as in prefix hits.

Each way is captured in a CUDA graph and replayed with a cold L2 cache, the ways in
turn. The output is one JSON object a line, for each shape, number of query tokens and
way. A shape's lengths include the query tokens. The ways:

* ``bf16``: FlashAttention 3, which reads pages in bf16.
* ``extend``: the CUDA kernels that read packed pages, in the calls that a step has. The
  rotation of queries and the merge are included. FlashAttention attends to the query
  tokens if the merge would have more than ``MAX_MERGED_TOKENS``.
* ``outputs``: only the kernel that ends in outputs, where there is one.
* ``merged``: only the kernel whose partial results are merged, where both exist.
* ``warps``: with ``--warps``, the kernel that serves on GPUs other than Hopper.
* ``warps 4,8,1``: with ``--plans 4,8,1``, the same kernel with another plan.
* ``one_by_one``: ``merged``, but the merge attends to all query tokens; up to 128.
* ``prefill``: packed pages are dequantised in pieces, and FlashAttention attends to
  these. The rotations of queries and outputs are included.
* ``extend offset``, ``prefill offset`` and so on: with ``--offset``, the same of a
  layer whose K loses an offset, such as its mean.

The query tokens are stored before, and attended to as computed. The ways over packed
pages must agree. Numbers of query tokens that exceed ``--max-tokens`` with a shape, or
leave no context, are left out.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from benchmark_turbo_decode import Report, fill, run_facts
from turbo_decode_arms import Arm, Batch, Shape, TurboArm
from turbo_decode_peers import FlashAttentionArm
from turbo_decode_timing import capture, measure, measure_device, spread

DEFAULT_SHAPES = ("64x4096x32x8x128", "16x32768x32x8x128", "1x65536x32x8x128")
DEFAULT_QUERY_LENS = (8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048)
# The largest number of query tokens that ``one_by_one`` is timed with.
MOST_ONE_BY_ONE = 128
# The bound of the relative difference between ways over packed pages. They round
# queries, keys and weights differently.
AGREEMENT = 0.02


def allocate(
    specs: list[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> list[torch.Tensor]:
    """Uninitialised tensors of the shapes and dtypes."""
    return [torch.empty(size, dtype=dtype, device=device) for size, dtype in specs]


class Elsewhere(NamedTuple):
    """A kind of GPU other than Hopper, whose kernel is run here.

    Attributes:
        shared_bytes: Bytes of shared memory that a block can have there.
        plan: The numbers of an ``ExtendPlan``; empty for the plan that serves.

    """

    shared_bytes: int
    plan: tuple[int, ...] = ()

    def extend_attention(self, *args: Any, **options: Any) -> None:
        """Attend as serving does on such a GPU."""
        from vllm.v1.attention.ops.turbo.cuda import extend_mma, family

        def plan_for(*arguments: Any) -> extend_mma.ExtendPlan:
            return extend_mma.ExtendPlan(*self.plan)

        with (
            mock.patch.object(extend_mma, "capability_of", lambda device: None),
            mock.patch.object(
                family, "shared_memory", lambda device: self.shared_bytes
            ),
            mock.patch.object(
                extend_mma, "plan_for", plan_for if self.plan else extend_mma.plan_for
            ),
        ):
            extend_mma.extend_attention(*args, **options)


class ExtendArm(TurboArm):
    """Packed pages, which the extend kernel reads in as many calls as a step has.

    Args:
        batch: The step.
        cache_dtype: The preset.
        cache: The cache of another arm, to share; None for a new one.
        max_merged_tokens: The most query tokens of a sequence that the merge attends
            to; None for any number.
        to_outputs: Whether to use the kernel that ends in outputs, where there is one;
            None: as served.
        elsewhere: A kind of GPU whose kernel to run; None: this GPU's.
        has_key_offset: Whether an offset is taken off K.

    """

    def __init__(
        self,
        batch: Batch,
        cache_dtype: str,
        cache: torch.Tensor | None = None,
        max_merged_tokens: int | None = None,
        to_outputs: bool | None = False,
        elsewhere: Elsewhere | None = None,
        has_key_offset: bool = False,
    ) -> None:
        from vllm.utils.platform_utils import num_compute_units
        from vllm.v1.attention.ops.turbo.formats.output_scratch import OutputScratch
        from vllm.v1.attention.ops.turbo.interface import Partials
        from vllm.v1.attention.ops.turbo.layer.flash import get_flash_attn
        from vllm.v1.attention.ops.turbo.planning import decode as planning
        from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan
        from vllm.v1.attention.ops.turbo.planning.scratch import (
            DecodeScratch,
            LayerShape,
            RawScratch,
        )

        super().__init__(
            batch, cache_dtype, "cuda", cache=cache, has_key_offset=has_key_offset
        )
        if elsewhere is not None:
            self.kernels = self.kernels._replace(
                extend_attention=elsewhere.extend_attention
            )
        shape, device = batch.shape, torch.device(batch.device)
        layer = LayerShape(
            shape.num_heads, shape.num_kv_heads, shape.head_size, batch.query.dtype
        )
        starts = batch.query_start_loc().tolist()
        lens = [end - begin for begin, end in zip(starts, starts[1:])]
        longest, num_tokens = max(lens), starts[-1]
        may_end = to_outputs is not False and self.kernels.extend_outputs is not None
        most = planning.MAX_CALL_TOKENS
        if may_end:
            most = planning.MAX_OUTPUT_CALL_TOKENS
        calls = planning.find_extends(lens, lens, longest, num_tokens, most)
        spans = RequestSpan.of_extends(
            [(first, starts[first : last + 1]) for first, last in calls], device
        )
        planner = planning.DecodePlanner(
            layer,
            # With one multiprocessor, any number of query tokens ends in outputs.
            1 if to_outputs else num_compute_units(),
            self.kernels.num_decode_splits,
            self.kernels.num_extend_splits,
            max_merged_tokens,
            may_end,
        )
        none = RequestSpan(0, 0, 0, 0, 1, None)
        self.plan = planner.plan(none, spans, batch.block_table, batch.seq_lens)
        specs = DecodeScratch.specs(layer, num_tokens, self.plan.num_partials)
        _, *partials = allocate(specs, device)
        self.partials = Partials(*partials)
        self.raw = None
        if self.plan.num_raw_tokens > 0:
            specs = RawScratch.specs(layer, self.plan.num_raw_tokens)
            self.raw = RawScratch(*allocate(specs, device))
        self.outputs = None
        if may_end:
            specs = self.kernels.output_scratch(
                self.layout,
                shape.num_kv_heads,
                num_compute_units(),
                self.plan.num_raw_tiles,
            )
            self.outputs = OutputScratch(*allocate(specs, device))
        self.flash_attn = get_flash_attn(shape.head_size)

    def attention(self) -> None:
        from vllm.v1.attention.ops.turbo.interface import (
            AttentionCall,
            Partials,
            RawTokens,
            RotatedQuery,
            Scoring,
            StoreCall,
        )
        from vllm.v1.attention.ops.turbo.layer.raw_tokens import attend_to_raw_tokens

        batch, num_rotated = self.batch, self.plan.num_rotated_tokens
        self.kernels.store(
            StoreCall(
                self.cache,
                batch.slot_mapping[:0],
                batch.key[:0],
                batch.value[:0],
                self.layout,
                batch.query[:num_rotated],
                RotatedQuery(*(x[:num_rotated] for x in self.rotated_query)),
                self.scale,
            )
        )
        scoring = Scoring(self.scale, key_offset=self.offsets)
        for call in self.plan.calls:
            own, count = call.tokens, call.num_partials
            raw = RawTokens(
                batch.query[own], batch.key[own], batch.value[own], self.scale
            )
            attention = AttentionCall(
                self.cache,
                self.layout,
                call.batch,
                scoring,
                batch.output[own],
                batch.query[own],
                raw,
            )
            if call.ends_in_outputs:
                self.kernels.extend_outputs(attention, self.outputs)
                continue
            if call.attends_before:
                raw = attend_to_raw_tokens(
                    raw, call.batch, self.raw, self.flash_attn, scoring
                )
                attention = attention._replace(raw=raw)
            query = RotatedQuery(*(x[own] for x in self.rotated_query))
            partials = Partials(*(x[:count] for x in self.partials))
            self.kernels.extend_attention(query, attention, partials)


class PrefillArm(TurboArm):
    """Packed pages, which are dequantised for FlashAttention."""

    def __init__(
        self,
        batch: Batch,
        cache_dtype: str,
        cache: torch.Tensor | None = None,
        has_key_offset: bool = False,
    ) -> None:
        from vllm.v1.attention.ops.turbo.layer.flash import get_flash_attn
        from vllm.v1.attention.ops.turbo.planning import prefill as prefill_plan
        from vllm.v1.attention.ops.turbo.planning.scratch import (
            LayerShape,
            PrefillScratch,
        )

        super().__init__(
            batch, cache_dtype, "cuda", cache=cache, has_key_offset=has_key_offset
        )
        shape, dtype = batch.shape, batch.query.dtype
        layer = LayerShape(shape.num_heads, shape.num_kv_heads, shape.head_size, dtype)
        limits = prefill_plan.prefill_limits(layer, stored=False)
        planner = prefill_plan.PrefillPlanner(False, limits, torch.device(batch.device))
        self.plan = planner.plan(
            batch.query_start_loc().cpu(), batch.seq_lens.cpu(), batch.block_table
        )
        specs = PrefillScratch.specs(
            layer, self.plan.max_buffered_tokens(), limits.piece_tokens
        )
        self.scratch = PrefillScratch(*allocate(specs, torch.device(batch.device)))
        self.flash_attn = get_flash_attn(shape.head_size)

    def attention(self) -> None:
        from vllm.v1.attention.ops.turbo.interface import Scoring
        from vllm.v1.attention.ops.turbo.layer.prefill import prefill_attention
        from vllm.v1.attention.ops.turbo.layer.prefill_sources import PrefillCall

        batch = self.batch
        call = PrefillCall(
            batch.query,
            batch.key,
            batch.value,
            self.cache,
            self.layout,
            Scoring(self.scale, key_offset=self.offsets),
            self.scratch,
            batch.output,
            self.flash_attn,
        )
        prefill_attention(call, self.plan)


def check(arms: dict[str, Arm]) -> None:
    """Compare the ways over packed pages, and those with an offset among themselves.

    Raises:
        AssertionError: The ways differ, so that their times would mean nothing.

    """
    outputs = {}
    for name in arms.keys() - {"bf16"}:
        arms[name].batch.output.fill_(float("nan"))
        arms[name].attention()
        outputs[name] = arms[name].batch.output.float()
    for name, output in outputs.items():
        expected = outputs["prefill offset" if name.endswith("offset") else "prefill"]
        error = (output - expected).norm() / expected.norm()
        # NaN fails this comparison.
        assert error <= AGREEMENT, f"{name} and prefill differ by {error:.3g}"


def time_queries(
    shape: Shape,
    query_len: int,
    caches: dict[str, torch.Tensor],
    device_facts: dict[str, float],
    args: argparse.Namespace,
    report: Report,
) -> None:
    """Time the ways with a number of query tokens a sequence; report a row for each."""
    from vllm.v1.attention.ops.turbo.cuda.merge import MAX_MERGED_TOKENS

    batch = Batch(shape, shape.seq_lens, args.block_size, args.device, query_len)
    most = MAX_MERGED_TOKENS
    arms: dict[str, Arm] = {
        "bf16": FlashAttentionArm(batch, False, False, cache=caches.get("bf16")),
        "extend": ExtendArm(
            batch, args.cache_dtype, caches.get("turbo"), most, to_outputs=None
        ),
    }
    cache = arms["extend"].cache
    if arms["extend"].outputs is not None:
        for name, to_outputs in (("outputs", True), ("merged", False)):
            arms[name] = ExtendArm(batch, args.cache_dtype, cache, most, to_outputs)
    if args.warps:
        plans = {"warps": ()} | {
            f"warps {','.join(map(str, plan))}": plan for plan in args.plans
        }
        for name, plan in plans.items():
            elsewhere = Elsewhere(args.warps, plan)
            arms[name] = ExtendArm(
                batch, args.cache_dtype, cache, most, elsewhere=elsewhere
            )
    if most < query_len <= MOST_ONE_BY_ONE:
        arms["one_by_one"] = ExtendArm(batch, args.cache_dtype, cache)
    arms["prefill"] = PrefillArm(batch, args.cache_dtype, cache=cache)
    if args.offset:
        ends = {"extend": None, "outputs": True, "merged": False}
        for name in ends.keys() & arms.keys():
            arms[f"{name} offset"] = ExtendArm(
                batch, args.cache_dtype, cache, most, ends[name], has_key_offset=True
            )
        arms["prefill offset"] = PrefillArm(
            batch, args.cache_dtype, cache, has_key_offset=True
        )
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
    parser.add_argument(
        "--max-tokens", type=int, default=16384, help="query tokens of a step"
    )
    parser.add_argument(
        "--warps",
        type=int,
        metavar="BYTES",
        help="time the kernel of other GPUs than Hopper's, too, whose blocks have so "
        "many bytes of shared memory: 101376 as those of 8.6, 8.9 and 12.0",
    )
    parser.add_argument(
        "--plans",
        nargs="+",
        type=lambda text: tuple(map(int, text.split(","))),
        default=[],
        help="with --warps, time these plans, too",
    )
    parser.add_argument(
        "--offset", action="store_true", help="time ways with an offset of K as well"
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
    parser = build_parser()
    args = parser.parse_args()
    if args.plans and not args.warps:
        parser.error("--plans are of the kernel that --warps has timed")
    from vllm.utils.torch_utils import set_random_seed

    args.device = "cuda"
    set_random_seed(0)
    report = Report(args.output, run_facts(args))
    device_facts = {} if args.profile else measure_device(args.rounds)
    failed = False
    for shape in args.shapes:
        caches: dict[str, torch.Tensor] = {}
        for query_len in args.query_lens:
            lens = shape.seq_lens
            if len(lens) * query_len > args.max_tokens or query_len >= min(lens):
                continue
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
