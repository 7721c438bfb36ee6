# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Times of CUDA graphs, replayed in turn with a cold L2 cache."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
COPY_BYTES = 2 * 2**30
WARM_UP_CALLS = 3


class Flush:
    """Empties the L2 cache by reading. Written lines would be written back later."""

    def __init__(self) -> None:
        self.source = torch.zeros(FLUSH_BYTES // 4, device="cuda")
        self.sink = torch.empty((), device="cuda")

    def __call__(self) -> None:
        torch.sum(self.source, 0, out=self.sink)


def capture(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Compile, warm up and capture a function."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def measure(
    graphs: dict[Any, torch.cuda.CUDAGraph], rounds: int
) -> dict[Any, list[float]]:
    """Replay the graphs in turn, each with a cold L2 cache.

    Returns:
        Sorted microseconds of each graph's replays.

    """
    flush = Flush()
    order = random.Random(0)
    times: dict[Any, list[float]] = {name: [] for name in graphs}
    for number in range(rounds + 1):
        events = {}
        for name in order.sample(list(graphs), len(graphs)):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            flush()
            start.record()
            graphs[name].replay()
            end.record()
            events[name] = start, end
        torch.accelerator.synchronize()
        # The first round is a warm-up.
        for name, (start, end) in events.items() if number else ():
            times[name].append(start.elapsed_time(end) * 1e3)
    return {name: sorted(values) for name, values in times.items()}


def spread(times: list[float]) -> dict[str, float]:
    """Median and spread of sorted microseconds."""
    points = {"median_us": 0.5, "p10_us": 0.1, "p90_us": 0.9}
    last = len(times) - 1
    return {name: round(times[round(at * last)], 2) for name, at in points.items()}


def measure_device(rounds: int) -> dict[str, float]:
    """The rate of a device-to-device copy, and the measured time of a tiny graph."""
    source = torch.ones(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    tiny = torch.zeros(1, device="cuda")
    graphs = {
        # A kernel copies: a copy node may run on a copy engine, which is slower.
        "copy": capture(partial(torch.neg, source, out=target)),
        "floor": capture(tiny.zero_),
    }
    times = measure(graphs, rounds)
    del source, target
    torch.accelerator.empty_cache()
    copy_us, floor_us = (spread(times[name])["median_us"] for name in graphs)
    rate = 2 * COPY_BYTES / copy_us * 1e-3
    return {"copy_gb_per_s": round(rate, 1), "floor_us": floor_us}
