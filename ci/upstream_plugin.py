# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A pytest plugin that gives caches of vLLM's tests the dtype $UPSTREAM_CACHE_DTYPE.

A test that leaves the cache dtype to the model gets this one. Its layers have the
dtype's pages, as the backend's `customize_spec` makes them, unless they name a dtype or
have heads that the dtype does not serve. "auto" changes nothing, and is the control.

The file $UPSTREAM_OUTCOMES gets each test's outcome, its reason, and whether a cache of
the test had such pages.
"""

import functools
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

# Outcomes of a test's parts; the last one in this order counts.
RANKS = ("passed", "skipped", "failed")
outcomes: dict[str, list[Any]] = {}
# The running test, and the tests whose caches got the dtype's pages.
current = ""
packed: set[str] = set()


def choose_dtype(dtype: str) -> None:
    """Lets configurations without a cache dtype have this one."""
    from vllm.config import CacheConfig

    construct = CacheConfig.__init__

    @functools.wraps(construct)
    def construct_with_dtype(self: CacheConfig, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("cache_dtype", "auto") == "auto":
            kwargs["cache_dtype"] = dtype
        construct(self, *args, **kwargs)

    CacheConfig.__init__ = construct_with_dtype


def pack_pages(dtype: str) -> None:
    """Lets layers of full and of sliding-window attention have the dtype's pages."""
    import torch

    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
    from vllm.v1.attention.ops.turbo.format import HEAD_SIZES

    kinds = (interface.FullAttentionSpec, interface.SlidingWindowSpec)
    mode = interface.get_kv_quant_mode(dtype)
    finish = interface.AttentionSpec.__post_init__

    def is_plain(spec: interface.AttentionSpec) -> bool:
        return (
            type(spec) in kinds
            and isinstance(spec.dtype, torch.dtype)
            and spec.dtype.is_floating_point
            and spec.dtype.itemsize > 1
            and spec.head_size == spec.head_size_v
            and spec.head_size in HEAD_SIZES
            and spec.kv_quant_mode == interface.KVQuantMode.NONE
            and spec.state_content_bytes is None
            and spec.num_head_slots is None
            and spec.page_size_padded is None
        )

    def finish_packed(self: interface.AttentionSpec) -> None:
        finish(self)
        if not is_plain(self):
            return
        for name, value in (("dtype", torch.uint8), ("kv_quant_mode", mode)):
            object.__setattr__(self, name, value)
        content = TurboAttentionBackend.customize_spec(self).state_content_bytes
        object.__setattr__(self, "state_content_bytes", content)
        packed.add(current)

    interface.AttentionSpec.__post_init__ = finish_packed


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "skip_global_cleanup: vLLM's")
    dtype = os.environ["UPSTREAM_CACHE_DTYPE"]
    if dtype != "auto":
        choose_dtype(dtype)
        pack_pages(dtype)


def pytest_collection_finish() -> None:
    """Hides all earlier objects from vLLM's collection of garbage after each test.

    Otherwise it takes nearly a second per test.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def pytest_runtest_logstart(nodeid: str) -> None:
    global current
    current = nodeid


def note(nodeid: str, outcome: str, reason: str) -> None:
    former = outcomes.get(nodeid, ["passed", "", False])
    if RANKS.index(outcome) >= RANKS.index(former[0]):
        former = [outcome, reason, False]
    outcomes[nodeid] = [*former[:2], nodeid in packed]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if not report.passed:
        note(report.nodeid, report.outcome, reason_of(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note(report.nodeid, report.outcome, reason_of(report))


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the reason of a failure or a skip, on one line; "" after a success."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext.strip()
    return " ".join(text.split())[:300]


def pytest_sessionfinish() -> None:
    Path(os.environ["UPSTREAM_OUTCOMES"]).write_text(json.dumps(outcomes))
