# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Bandwidth of vLLM's native offloading, by cache dtype, layout and block size.

One JSON object a line:

* `copy`, of the arm `copies`: vLLM's own worker moves the pages of `--copied-tokens`
  tokens, in random order, to pinned host memory (`store`) and back (`load`), after a
  check that the same bytes come back. The row has GB/s and tokens per second of a model
  of 32 layers with 8 KV heads of 128. `page_bytes` is the size of a contiguous piece: a
  layer's page of a block under LBHNC, the block of all layers under BLHNC and BHLNC,
  which are the same to a copy.
* `restore`, of an engine with dummy weights: seconds to the first token of a prompt of
  `--context` tokens, with pages from the host's memory (`restored_s`), with pages still
  on the GPU (`cached_s`), and computed (`computed_s`). `tokens_per_s` is the number of
  restored tokens over the time that restoring adds to `cached_s`.
* `ratio`: each dtype's largest rate in tokens per second, over bf16's, by part.

An engine's arm is DTYPE[@LAYOUT[@BLOCK]]: `turbo4@BLHNC@64`; `auto` is bf16.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from common import Report
from turbo_engine import build_parser, random_prompt, run_arms, turn
from turbo_process.log import emit
from turbo_process.runner import exit_when_told

COPIES = "copies"
LAYERS, KV_HEADS, HEAD_SIZE = 32, 8, 128
# Bytes of a token and KV head in one layer; turbo dtypes have their format's.
PLAIN_BYTES = {"auto": 4 * HEAD_SIZE, "fp8": 2 * HEAD_SIZE}
# Contiguous pieces of a block, by layout.
PIECES = {"LBHNC": LAYERS, "BLHNC": 1}
BLOCK_SIZES = (16, 64, 128)
ARMS = (COPIES, "auto", "turbo4", "turbo4@BLHNC@64")
# Limits of a copy, and of stores that go on after the answer.
TIMEOUT_S, SETTLING_S = 60.0, 1.0
RATES = {"copy": "load_tokens_per_s", "restore": "tokens_per_s"}


def slot_bytes(dtype: str) -> int:
    """Returns the bytes of a token and KV head in one layer."""
    if dtype in PLAIN_BYTES:
        return PLAIN_BYTES[dtype]
    from vllm.v1.attention.ops.turbo.format import TurboFormat

    return TurboFormat.from_cache_dtype(dtype, HEAD_SIZE).slot_size


class Copies:
    """Pages of one dtype, layout and block size, and the worker that moves them.

    Args:
        dtype: Cache dtype.
        layout: A key of PIECES.
        block_size: Tokens of a block.
        num_tokens: Tokens that are moved at once.

    """

    def __init__(
        self, dtype: str, layout: str, block_size: int, num_tokens: int
    ) -> None:
        import torch

        from vllm.platforms import current_platform
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
        )
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

        self.num_tokens = num_tokens
        self.num_blocks = num_tokens // block_size
        pieces = PIECES[layout]
        layer_bytes = block_size * KV_HEADS * slot_bytes(dtype)
        self.page_bytes = layer_bytes * LAYERS // pieces
        shape = (self.num_blocks, self.page_bytes)
        device = current_platform.device_type
        self.pages = [
            torch.randint(-128, 127, shape, dtype=torch.int8, device=device)
            for _ in range(pieces)
        ]
        tensors = [CanonicalKVCacheTensor(page, self.page_bytes) for page in self.pages]
        refs = [CanonicalKVCacheRef(i, self.page_bytes) for i in range(pieces)]
        self.worker = CPUOffloadingWorker(
            CanonicalKVCaches(tensors, [refs]),
            blocks_per_chunk=1,
            num_cpu_chunks=self.num_blocks,
        )
        self.gpu_blocks = torch.randperm(self.num_blocks).tolist()
        self.host_blocks = list(range(self.num_blocks))
        self.jobs = 0

    def move(self, is_store: bool) -> float:
        """Moves all pages, and returns the seconds by vLLM's own events."""
        from vllm.v1.kv_offload.base import GPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        gpu = GPULoadStoreSpec(self.gpu_blocks, (self.num_blocks,), (0,))
        host = CPULoadStoreSpec(self.host_blocks)
        self.jobs += 1
        if is_store:
            assert self.worker.submit_store(self.jobs, gpu, host)
        else:
            assert self.worker.submit_load(self.jobs, host, gpu)
        self.worker.wait({self.jobs})
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := self.worker.get_finished()):
            assert time.monotonic() < deadline, "a copy does not end"
        (result,) = found
        assert result.success and result.transfer_time is not None
        return result.transfer_time

    def check(self) -> None:
        """Makes sure that the same bytes come back."""
        import torch

        before = [page.clone() for page in self.pages]
        self.move(True)
        for page in self.pages:
            page.zero_()
        self.move(False)
        assert all(map(torch.equal, before, self.pages)), "other bytes came back"

    def row(self, rounds: int) -> dict[str, Any]:
        """Returns the medians of so many rounds."""
        self.check()
        seconds: dict[str, list[float]] = {"store": [], "load": []}
        for _ in range(rounds):
            for name, times in seconds.items():
                times.append(self.move(name == "store"))
        num_bytes = sum(page.numel() for page in self.pages)
        row: dict[str, Any] = {"page_bytes": self.page_bytes, "bytes": num_bytes}
        for name, times in seconds.items():
            median = statistics.median(times)
            row |= {
                f"{name}_ms": median * 1e3,
                f"{name}_gb_per_s": num_bytes / median * 1e-9,
                f"{name}_tokens_per_s": self.num_tokens / median,
            }
        return row


def copy_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each dtype, layout and block size."""
    for dtype in args.copied_dtypes:
        for layout in PIECES:
            for block_size in args.block_sizes:
                copies = Copies(dtype, layout, block_size, args.copied_tokens)
                row = copies.row(args.rounds)
                copies.worker.shutdown()
                yield {
                    "part": "copy",
                    "dtype": dtype,
                    "layout": layout,
                    "block_size": block_size,
                    "tokens": args.copied_tokens,
                } | row


def parse_arm(arm: str, block_size: int = 16) -> tuple[str, str, int]:
    """Returns an engine's cache dtype, layout and block size."""
    dtype, *rest = arm.split("@")
    layout, block = (*rest, *("LBHNC", block_size)[len(rest) :])
    return dtype, layout, int(block)


class OffloadingEngine:
    """An engine whose pages are copied to the host's memory as they are filled."""

    def __init__(self, arm: str, args: argparse.Namespace) -> None:
        self.dtype, self.layout, self.block_size = parse_arm(arm)
        os.environ["VLLM_KV_CACHE_LAYOUT"] = self.layout
        from vllm import LLM

        self.args = args
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": args.host_bytes},
        }
        options: dict[str, Any] = {
            "kv_cache_dtype": self.dtype,
            "block_size": self.block_size,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "max_model_len": args.context + 1,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "max_num_seqs": 4,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
            "kv_transfer_config": transfer,
        }
        self.llm = LLM(str(args.model), **(options | args.engine_args))
        vocab_size = self.llm.llm_engine.vllm_config.model_config.get_vocab_size()
        self.vocab_size = vocab_size

    def answer(self, seed: int) -> tuple[float, int]:
        """Returns the seconds to a prompt's first token, and its cached tokens."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        tokens = random_prompt(seed, self.args.context, self.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=tokens)
        start = time.perf_counter()
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        return time.perf_counter() - start, output.num_cached_tokens or 0

    def row(self) -> dict[str, Any]:
        """Returns the row of `args.repeats` prompts.

        Raises:
            RuntimeError: If pages came from another place than expected.

        """
        found: dict[str, list[float]] = {"computed": [], "restored": [], "cached": []}
        whole = (self.args.context - 1) // self.block_size * self.block_size
        # These prompts make the engine compile and allocate at first use.
        for seed in range(2):
            self.answer(seed)
            self.settle()
            self.answer(seed)
        for seed in range(2, 2 + self.args.repeats):
            for name, times in found.items():
                seconds, cached = self.answer(seed)
                times.append(seconds)
                if (cached >= whole) is not (name != "computed"):
                    raise RuntimeError(f"{name}: {cached} tokens were not computed")
                if name == "computed":
                    self.settle()
        medians = {name: statistics.median(times) for name, times in found.items()}
        added = medians["restored"] - medians["cached"]
        return {
            "part": "restore",
            "dtype": self.dtype,
            "layout": self.layout,
            "block_size": self.block_size,
            "tokens": whole,
            "tokens_per_s": whole / added,
            **{f"{name}_s": seconds for name, seconds in medians.items()},
            **{f"all_{name}_s": times for name, times in found.items()},
        }

    def settle(self) -> None:
        """Lets stores end, and empties the GPU's prefix cache."""
        time.sleep(SETTLING_S)
        # Only a step tells the engine that stores have ended.
        self.llm.generate([random_prompt(-1, 2, self.vocab_size)], use_tqdm=False)
        assert self.llm.reset_prefix_cache()


def measure_arm(arm: str, args: argparse.Namespace) -> None:
    """Measures one arm; the rows go to the standard output."""
    if arm == COPIES:
        with turn(args, arm):
            for row in copy_rows(args):
                emit(**row)
        return
    engine = OffloadingEngine(arm, args)
    with turn(args, arm):
        emit(**engine.row())
    engine.llm.llm_engine.engine_core.shutdown()


def ratios(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields, by part and dtype, the best rate over bf16's best one."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        rate = RATES.get(row.get("part", ""))
        if rate is None or "error" in row:
            continue
        key = row["part"], row["dtype"]
        if key not in best or best[key][rate] < row[rate]:
            best[key] = row
    for (part, dtype), row in best.items():
        base = best.get((part, "auto"))
        if base is not None and dtype != "auto":
            yield {
                "part": "ratio",
                "of": part,
                "dtype": dtype,
                "times_bf16": row[RATES[part]] / base[RATES[part]],
                "layout": row["layout"],
                "block_size": row["block_size"],
            }


def parse_args() -> argparse.Namespace:
    parser = build_parser()
    parser.description = __doc__.splitlines()[0]
    parser.set_defaults(arms=list(ARMS), shapes=(), repeats=3)
    parser.add_argument("--context", type=int, default=32768, help="of a prompt")
    parser.add_argument("--host-bytes", type=int, default=5 << 30)
    parser.add_argument("--copied-tokens", type=int, default=16384)
    parser.add_argument(
        "--copied-dtypes", nargs="+", default=["auto", "fp8", "turbo4", "k4v3"]
    )
    parser.add_argument("--block-sizes", nargs="+", type=int, default=BLOCK_SIZES)
    parser.add_argument("--rounds", type=int, default=10, help="of copies")
    args = parser.parse_args()
    if args.output is None:
        parser.error("--output is needed: the ratios are computed from its rows")
    for arm in args.arms:
        if arm != COPIES and parse_arm(arm)[1] not in (*PIECES, "BHLNC"):
            parser.error(f"no layout of {arm}")
    return args


def main() -> int:
    args = parse_args()
    if args.child:
        measure_arm(args.child, args)
        return 0
    exit_when_told()
    before = args.output.stat().st_size if args.output.exists() else 0
    status = run_arms(args, {"model": args.model.name})
    with args.output.open() as file:
        file.seek(before)
        rows = [json.loads(line) for line in file]
    report = Report(args.output)
    for row in ratios(rows):
        report.row(**row)
    return status


if __name__ == "__main__":
    sys.exit(main())
