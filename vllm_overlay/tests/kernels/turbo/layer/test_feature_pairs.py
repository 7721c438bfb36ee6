# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each pair of features that a layer can have is in at least one small case.

Other modules test features alone and some together. Cases are chosen to cover each pair
that is served. Other pairs are refused, or no layer can have them.
"""

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from vllm.model_executor.layers.attention import ChunkedLocalAttention
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
)
from vllm.v1.attention.backends.turbo_tail import tail_choice
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches
from vllm.v1.attention.ops.turbo import interface, reference
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.layer.forward import forward
from vllm.v1.attention.ops.turbo.layer.warm_up import small_tails
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..backend_utils import (
    BLOCK_SIZE,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    set_path,
    with_drafts,
)
from ..batch_utils import Batch
from ..utils import (
    BF16,
    CACHE_LAYOUTS,
    DEVICE,
    FP16,
    gaussian,
    new_cache,
    requires_triton,
)
from .test_backend_extends import give_extends
from .test_chunked_local import CHUNK, build_chunked, check_chunks

Case: TypeAlias = dict[str, Any]
# A value of a feature, and a value of another feature.
Pair: TypeAlias = frozenset[tuple[str, Any]]

# The values of each feature; the first value is that of a layer without it.
FEATURES: dict[str, tuple[Any, ...]] = {
    "sees": ("all", "window", "chunk"),
    "prefill": ("raw", "stored"),
    "sinks": (False, True),
    "soft cap": (False, True),
    "key offset": (False, True),
    "query direction": (False, True),
    "recent window": (False, True),
    "shared cache": (False, True),
    "spans": (False, True),
    "drafts": (False, True),
    "extends": (False, True),
    "heads": ((4, 2), (3, 1), (4, 4)),
    "head size": (64, 128),
    "preset": ("turbo4", "turbo3", "k4v3"),
    "dtype": (FP16, BF16),
    "pages": (*CACHE_LAYOUTS, "padded"),
}
CHUNKED = ("sees", "chunk")
NOT_CHUNKED = "vLLM's layer of chunked local attention has no such argument"
# Pairs that no layer has, with the reason.
REFUSED: dict[Pair, str] = {
    frozenset({CHUNKED, ("sinks", True)}): NOT_CHUNKED,
    frozenset({CHUNKED, ("soft cap", True)}): NOT_CHUNKED,
    frozenset({CHUNKED, ("recent window", True)}): "a chunk has no block of its own",
    frozenset({CHUNKED, ("spans", True)}): "vLLM tells no ranges of chunks",
    frozenset({("soft cap", True), ("key offset", True)}): "scores are bent",
    frozenset({("recent window", True), ("prefill", "stored")}): "all is seen stored",
    frozenset(
        {("recent window", True), ("shared cache", True)}
    ): "another layer stores",
}
# The feature of each argument of a layer; None: it is no feature, or is refused, or
# other tests combine it with each feature.
ARGUMENTS: dict[str, str | None] = {
    "num_heads": "heads",
    "head_size": "head size",
    "num_kv_heads": "heads",
    "sliding_window": "sees",
    "kv_cache_dtype": "preset",
    "logits_soft_cap": "soft cap",
    "kv_sharing_target_layer_name": "shared cache",
    "sinks": "sinks",
    "scale": None,
    "alibi_slopes": None,
    "attn_type": None,
    "unsupported": None,
    # test_head_size_v.py has its cases.
    "head_size_v": None,
}
# Decodes, a prefill with an image after context, one after few tokens, a first chunk.
REQUESTS = [(1, 40), (1, 0), (20, 70), (5, 14), (33, 0)]
DRAFTED = [(3, 31), (1, 40), (2, 15), (20, 70), (5, 14), (33, 0)]
IMAGE = (72, 80)


def pairs_of(case: Case) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def all_pairs() -> set[Pair]:
    """The pairs that a layer can have."""
    values = [[(name, x) for x in found] for name, found in FEATURES.items()]
    pairs = (
        frozenset(pair)
        for one, other in itertools.combinations(values, 2)
        for pair in itertools.product(one, other)
    )
    return set(pairs) - set(REFUSED)


def covering_cases() -> Iterator[Case]:
    """Cases that cover each pair; a greedy choice adds the most new pairs to each."""
    missing = all_pairs()
    while missing:
        # A choice that is the same in every run.
        begin = min(missing, key=lambda pair: sorted(map(str, pair)))
        case = dict(begin)
        for name, values in FEATURES.items():
            if name in case:
                continue
            choices = [case | {name: value} for value in values]
            choices = [x for x in choices if not pairs_of(x) & set(REFUSED)]
            case = max(choices, key=lambda x: len(pairs_of(x) & missing))
        missing -= pairs_of(case)
        yield {name: case[name] for name in FEATURES}


CASES = list(covering_cases())


pytestmark = pytest.mark.usefixtures("small_pieces", "short_segments")


def in_pages(cache: torch.Tensor, kind: KVCacheLayout | str, layout) -> torch.Tensor:
    """A copy of a layer's cache, with this layout or with padded pages."""
    num_blocks, num_kv_heads, block_size, _ = cache.shape
    if isinstance(kind, KVCacheLayout):
        copy = new_cache(layout, num_blocks, num_kv_heads, block_size, kind)
    else:
        page = cache[0].numel()
        buffer = torch.full((num_blocks, page + 4096), 0xFF).to(DEVICE, torch.uint8)
        copy = buffer[:, :page].view(cache.shape)
    return copy.copy_(cache)


class Layer:
    """A layer of a case, and a batch for it."""

    def __init__(self, folder: Path, case: Case, path: str) -> None:
        self.case, self.path = case, path
        num_heads, num_kv_heads = case["heads"]
        config = make_vllm_config(
            folder,
            case["preset"],
            case["dtype"],
            case["prefill"],
            max_num_batched_tokens=512,
        )
        self.config = with_drafts(config) if case["drafts"] else config
        sinks = 4 * gaussian(num_heads, seed=4)
        sinks[0] = float("-inf")
        offset = 0.5 * gaussian(2, num_kv_heads, case["head size"], seed=5)
        direction = gaussian(2, num_kv_heads, case["head size"], dtype=FP16, seed=6)
        self.impl = impl = make_impl(
            self.config,
            num_heads,
            num_kv_heads,
            head_size=case["head size"],
            scale=case["head size"] ** -0.5,
            key_offset=offset if case["key offset"] else None,
            query_direction=direction if case["query direction"] else None,
            sliding_window=17 if case["sees"] == "window" else None,
            sinks=sinks.to(case["dtype"]) if case["sinks"] else None,
            kv_sharing_target_layer_name=(
                "layers.1.attn" if case["shared cache"] else None
            ),
            logits_soft_cap=2.0 if case["soft cap"] else None,
        )
        (give_extends if case["extends"] else set_path)(impl, path)
        self.requests = DRAFTED if case["drafts"] else REQUESTS
        self.batch = batch = Batch.make(impl, self.requests)
        layout = impl.runner.layout
        if impl.runner.shares_cache:
            tokens = batch.common.slot_mapping, batch.key, batch.value
            reference.store(StoreCall(batch.cache, *tokens, layout))
        batch.cache = in_pages(batch.cache, case["pages"], layout)
        if case["soft cap"]:
            batch.query *= 3
        image_row = next(i for i, x in enumerate(self.requests) if x == (20, 70))
        self.ranges = {image_row: [IMAGE]} if case["spans"] else None
        batch.common.mm_req_doc_ranges = self.ranges
        if case["sees"] == "window":
            batch.free_hidden_blocks(17)

    def build(self):
        if self.case["sees"] != "chunk":
            builder = make_builder(self.config, self.impl)
            builder.unclamped_window = None
            return builder.build(0, self.batch.common)
        return build_chunked(self.config, self.impl, self.batch)

    def run(self) -> torch.Tensor:
        step = self.build()
        expected = self.batch.cache.clone()
        if not self.case["shared cache"]:
            self.store(expected, step)
        output = self.serve(step)
        assert torch.equal(self.batch.cache, expected)
        return output

    def store(self, cache: torch.Tensor, step: Any) -> None:
        """Store the step's tokens by the reference."""
        runner, batch = self.impl.runner, self.batch
        tokens = step.slot_mapping, batch.key, batch.value, runner.layout
        offset = step.key_offset(runner.scoring.key_offset)
        direction = step.query_direction(runner.query_direction)
        call = StoreCall(cache, *tokens, key_offset=offset, query_direction=direction)
        reference.store(call)

    def serve(self, step: Any) -> torch.Tensor:
        if not self.case["recent window"]:
            return self.batch.run(self.impl, step, self.path)
        runner, batch = self.impl.runner, self.batch
        runner.tail_wanted = 8
        _, tail = small_tails(runner, step, BLOCK_SIZE, torch.device(DEVICE))
        own = slice(0, batch.common.num_actual_tokens)
        tokens = batch.query[own], batch.key[own], batch.value[own]
        output = torch.zeros_like(tokens[0])
        forward(runner, *tokens, batch.cache, step, output, tail)
        assert tail.pages.any()
        return output

    def check(self, output: torch.Tensor) -> None:
        if self.case["sees"] != "chunk":
            self.batch.check(self.impl, output, self.ranges)
        else:
            check_chunks(self.impl, self.batch, output)


@kernel_paths
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_case(folder, case, path, monkeypatch):
    """Outputs are right, and the check fails if a feature of the case is left out."""
    layer = Layer(folder, case, path)
    output = layer.run()
    layer.check(output)
    runner = layer.impl.runner
    # An offset that all keys lack changes no softmax. A chunk is a sequence of its own.
    longest = max(sum(x) for x in layer.requests)
    seen = CHUNK if case["sees"] == "chunk" else longest
    is_common = runner.stored and seen <= interface.OFFSET_SEGMENT
    for name, has_it in (
        ("sinks", case["sinks"]),
        ("soft_cap", case["soft cap"]),
        ("key_offset", case["key offset"] and not is_common),
        ("sliding_window", case["sees"] == "window"),
    ):
        if has_it:
            with monkeypatch.context() as patch:
                without = runner.scoring._replace(**{name: None})
                patch.setattr(runner, "scoring", without)
                with pytest.raises(AssertionError, match="allowed"):
                    layer.check(output)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "stored", not runner.stored)
        with pytest.raises(AssertionError, match="allowed"):
            layer.check(output)
    if layer.ranges is not None:
        layer.ranges = None
        with pytest.raises(AssertionError, match="allowed"):
            layer.check(output)


def test_each_pair_has_a_case():
    found = set().union(*map(pairs_of, CASES))
    assert found == all_pairs()


def test_arguments_are_features():
    """A new argument of layers must be added as a feature, or as none."""
    arguments = inspect.signature(TurboAttentionImpl.__init__).parameters
    assert set(arguments) - {"self"} == set(ARGUMENTS)
    assert set(ARGUMENTS.values()) - {None} <= set(FEATURES)


@requires_triton
def test_refused_pairs_are_refused(folder):
    """Each pair without a case is refused, or no layer has the argument."""
    taken = inspect.signature(ChunkedLocalAttention.__init__).parameters
    assert not {"sinks", "logits_soft_cap", "per_layer_sliding_window"} & set(taken)
    config = make_vllm_config(folder, turbo_prefill="stored")
    config.attention_config.turbo_window = "auto"
    assert tail_choice(config) == 0
    config = make_vllm_config(folder)
    impl = make_impl(config, kv_sharing_target_layer_name="layers.1.attn")
    assert impl.runner.tail_wanted == 0
    first = {name: values[0] for name, values in FEATURES.items()}
    both = first | {"soft cap": True, "key offset": True}
    with pytest.raises(AssertionError, match="capped scores with an offset"):
        Layer(folder, both, "triton").run()
    batch = Batch.make(make_impl(make_vllm_config(folder)), REQUESTS)
    batch.common.mm_req_doc_ranges = {2: [IMAGE]}
    chunks, _ = make_local_attention_virtual_batches(CHUNK, batch.common, BLOCK_SIZE)
    assert chunks.mm_req_doc_ranges is None
