# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layers whose extends a CUDA kernel serves, with a record of calls."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from vllm.config import VllmConfig

from ..backend_utils import (
    NUM_HEADS,
    make_builder,
    make_impl,
    make_vllm_config,
    reserve_scratch,
    set_path,
    with_drafts,
)
from ..batch_utils import Batch, requests_of_a_step
from ..utils import FP16, gaussian

# As long as the longest extend that benchmarks measure.
LONGEST = 700
scorings = pytest.mark.parametrize("scoring", ["window", "cap", "sinks", "all"])


def scoring_options(name: str) -> dict[str, Any]:
    """Windows that are shorter and longer than the raw tokens, soft caps, and sinks."""
    sinks = gaussian(NUM_HEADS, seed=4)
    return {
        "window": {"sliding_window": 10},
        "cap": {"logits_soft_cap": 2.0},
        "sinks": {"sinks": sinks},
        "all": {"sliding_window": 30, "logits_soft_cap": 2.0, "sinks": sinks},
    }[name]


class ExtendLayer:
    """A layer that CUDA's kernels serve; subclasses record its ``calls`` of a run."""

    def __init__(self, config: VllmConfig, **options: Any) -> None:
        self.config, self.impl = config, make_impl(config, **options)
        set_path(self.impl, "cuda")
        self.runner, self.calls = self.impl.runner, []

    @classmethod
    def make(
        cls, folder: Path, mode: str = "raw", dtype=FP16, num_drafts=0, **options: Any
    ) -> Self:
        config = make_vllm_config(
            folder, "turbo4", dtype, mode, max_num_batched_tokens=2048
        )
        return cls(with_drafts(config, num_drafts), **options)

    @classmethod
    def beside_drafts(cls, folder: Path, num_drafts: int, length: int) -> Self:
        """A layer that has served an extend beside decodes with drafts."""
        layer = cls.make(folder, num_drafts=num_drafts)
        lens = (num_drafts + 1, 1, num_drafts, length)
        layer.check([(count, 40) for count in lens])
        return layer

    @classmethod
    def sharing_a_cache(cls, folder: Path) -> Self:
        """A layer that has served extends with another layer's K and V."""
        layer = cls.make(folder, kv_sharing_target_layer_name="layers.0.attn")
        batch = Batch.make(layer.impl, [(1, 31), (33, 40), (2, 33)])
        assert layer.runner.shares_cache
        cls.make(folder, "stored").run(batch)
        batch.check(layer.impl, layer.run(batch))
        return layer

    def run(self, batch: Batch) -> torch.Tensor:
        """The output, (T, Hq, D)."""
        self.calls.clear()
        self.step = make_builder(self.config, self.impl).build(0, batch.common)
        return batch.run(self.impl, self.step, "cuda")

    def check(self, requests: list[tuple[int, int]]) -> None:
        batch = Batch.make(self.impl, requests)
        batch.check(self.impl, self.run(batch))

    def check_broken(
        self, break_batch: Callable[[Batch], None], broken: int
    ) -> torch.Tensor:
        """Break one of two requests, which changes no bit of the other's output.

        Returns:
            The broken request's output.

        """
        requests = [(20, 40), (18, 40)]
        sound = self.run(Batch.make(self.impl, requests)).split([20, 18])
        break_batch(batch := Batch.make(self.impl, requests))
        found = self.run(batch).split([20, 18])
        assert torch.equal(found[1 - broken], sound[1 - broken])
        assert all(output.isfinite().all() for output in sound)
        return found[broken]

    def run_steps(
        self, monkeypatch: pytest.MonkeyPatch, counts: list[int], **stand_ins: Any
    ) -> int:
        """Run steps with the scratch that a profile run reserves.

        Returns:
            The largest number of calls of a step. The stand-ins of kernels add the
            number of tokens of each call to ``counts``.

        """
        kernels = self.runner.kernels._replace(store=lambda *_: None, **stand_ins)
        self.runner.kernels, most = kernels, 0
        reserve_scratch(self.impl, monkeypatch)
        generator = torch.Generator().manual_seed(0)
        for _ in range(12):
            requests = list(requests_of_a_step(generator, LONGEST))
            counts.clear()
            self.run(Batch.make(self.impl, requests))
            assert sum(counts) == sum(length for length, _ in requests)
            most = max(most, len(counts))
        return most


def break_tokens(x: torch.Tensor) -> None:
    """Set every other token to NaN, and the rest to infinity."""
    x[0::2], x[1::2] = math.nan, math.inf


def break_raw_tokens(batch: Batch, broken: int) -> None:
    """Break all raw tokens of a request, for ``ExtendLayer.check_broken``."""
    for x in (batch.query, batch.key, batch.value):
        break_tokens(x.split([20, 18, len(x) - 38])[broken])
