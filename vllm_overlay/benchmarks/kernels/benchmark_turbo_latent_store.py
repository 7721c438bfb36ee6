# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stores of MLA: packed latents and rotary keys, compared to vLLM's own caches.

Each way is captured in a CUDA graph and replayed with a cold L2 cache, the ways in
turn. The output is one JSON object a line, for each number of tokens and way:

* ``bf16``, ``fp8``: ``concat_and_cache_mla``.
* ``cuda``: the CUDA kernel as it is served.
* ``cuda_parts_1``, ``cuda_parts_4``: the CUDA kernel with one or four lanes for a scale
  group, for any number of tokens.
* ``triton``: the Triton kernel.

The bytes of all kernels must be the reference's.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from benchmark_turbo_decode import Report, run_facts
from turbo_decode_timing import capture, measure, measure_device, spread

DEFAULT_TOKENS = (1, 16, 64, 128, 256, 512, 768, 1024, 2048, 8192)
# The most tokens that are compared to the reference, which is slow.
CHECKED_TOKENS = 2048


class Stores:
    """The ways to store a number of tokens, at different slots in random order.

    Attributes:
        packed: (num_blocks, N, C) uint8, full of 0xFF, the cache of the packed ways.

    """

    def __init__(self, num_tokens: int, args: argparse.Namespace) -> None:
        from vllm.v1.attention.ops.turbo.latent.format import LatentFormat

        size, device = args.head_size, torch.device("cuda")
        self.layout = LatentFormat.from_cache_dtype(args.cache_dtype, size)
        rows = torch.randn(num_tokens, size, device=device).to(torch.bfloat16)
        # As in a model: latents are a tensor of their own, and rotary keys are a view.
        self.kv_c = rows[:, : self.layout.rank].contiguous()
        self.k_pe = rows[:, self.layout.rank :] if self.layout.rope else None
        num_blocks = -(-2 * num_tokens // args.block_size)
        order = torch.randperm(num_blocks * args.block_size, device=device)
        self.slots = order[:num_tokens]
        shape = (num_blocks, args.block_size)
        self.packed = torch.full(
            (*shape, self.layout.slot_size), 0xFF, dtype=torch.uint8, device=device
        )
        self.bf16 = torch.zeros(*shape, size, dtype=torch.bfloat16, device=device)
        self.fp8 = torch.zeros(*shape, size, dtype=torch.uint8, device=device)
        self.one = torch.ones((), device=device)

    def concat(self, cache: torch.Tensor, dtype: str) -> None:
        from vllm import _custom_ops as ops

        k_pe = self.k_pe
        if k_pe is None:
            k_pe = self.kv_c[:, :0]
        ops.concat_and_cache_mla(self.kv_c, k_pe, cache, self.slots, dtype, self.one)

    def pack(self, store: Callable[..., None]) -> None:
        from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall

        tokens = self.slots, self.kv_c, self.k_pe, self.layout
        store(LatentStoreCall(self.packed, *tokens))

    def packed_ways(self) -> dict[str, Callable[[], None]]:
        from vllm.v1.attention.ops.turbo.cuda import latent_store as cuda_store
        from vllm.v1.attention.ops.turbo.triton import latent_store as triton_store

        ways = {"cuda": cuda_store.store, "triton": triton_store.store}
        for parts in (1, 4):
            ways[f"cuda_parts_{parts}"] = partial(cuda_store.store, parts=parts)
        return {name: partial(self.pack, store) for name, store in ways.items()}

    def all_ways(self) -> dict[str, Callable[[], None]]:
        return {
            "bf16": partial(self.concat, self.bf16, "auto"),
            "fp8": partial(self.concat, self.fp8, "fp8"),
            **self.packed_ways(),
        }

    def check(self) -> None:
        """Compare the packed ways' bytes to the reference's.

        Raises:
            AssertionError: They differ, so that their times would mean nothing.

        """
        from vllm.v1.attention.ops.turbo.reference import latent as reference

        expected = torch.full_like(self.packed, 0xFF)
        self.packed, kept = expected, self.packed
        self.pack(reference.store)
        self.packed = kept
        for name, way in self.packed_ways().items():
            self.packed.fill_(0xFF)
            way()
            assert torch.equal(self.packed, expected), f"{name}: other bytes"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(DEFAULT_TOKENS))
    parser.add_argument("--cache-dtype", default="turbo4")
    parser.add_argument(
        "--head-size", type=int, default=576, help="latent and rotary coordinates"
    )
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    return parser


@torch.inference_mode()
def main() -> int:
    args = build_parser().parse_args()
    from vllm.utils.torch_utils import set_random_seed

    set_random_seed(0)
    report = Report(args.output, run_facts(args))
    device_facts = measure_device(args.rounds)
    failed = False
    for num_tokens in args.tokens:
        row = {"cache_dtype": args.cache_dtype, "head_size": args.head_size}
        row |= {"tokens": num_tokens}
        try:
            stores = Stores(num_tokens, args)
            if num_tokens <= CHECKED_TOKENS:
                stores.check()
            graphs = {name: capture(way) for name, way in stores.all_ways().items()}
            for name, times in measure(graphs, args.rounds).items():
                report.row(**row, way=name, **spread(times), **device_facts)
        except Exception:
            report.error(**row)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
