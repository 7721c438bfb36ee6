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
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionBackend,
    TurboAttentionImpl,
)
from vllm.v1.attention.backends.turbo_window import window_choice
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches
from vllm.v1.attention.ops.turbo import interface, reference
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.layer.warm_up import small_windows
from vllm.v1.attention.ops.turbo.planning import prefill as planning
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from . import backend_utils
from .backend_utils import (
    BLOCK_SIZE,
    Batch,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    register,
    rounds_queries,
    set_path,
    set_scratch,
    with_drafts,
)
from .refusal_cases import make_spec
from .test_backend_extends import give_extends
from .utils import (
    BF16,
    CACHE_LAYOUTS,
    DEVICE,
    FP16,
    ON_GPU,
    assert_by_2x_rule,
    attention_of_rounded,
    gaussian,
    load_context,
    new_cache,
    requires_triton,
)

Case: TypeAlias = dict[str, Any]
# A value of a feature, and a value of another feature.
Pair: TypeAlias = frozenset[tuple[str, Any]]

CHUNK = 2 * BLOCK_SIZE
# The values of each feature; the first value is that of a layer without it.
FEATURES: dict[str, tuple[Any, ...]] = {
    "sees": ("all", "window", "chunk"),
    "prefill": ("raw", "stored"),
    "sinks": (False, True),
    "soft cap": (False, True),
    "key offset": (False, True),
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


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have several pieces and slices, and on a CPU short segments."""
    set_scratch(monkeypatch, piece_tokens=64)
    monkeypatch.setattr(planning, "LEAST_TOKENS", 48)
    if not ON_GPU:
        monkeypatch.setattr(interface, "OFFSET_SEGMENT", 64)
    return monkeypatch


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

    def __init__(self, folder: Path, case: Case, path: str, settings) -> None:
        self.case, self.path = case, path
        num_heads, num_kv_heads = case["heads"]
        for name, value in (
            ("NUM_HEADS", num_heads),
            ("NUM_KV_HEADS", num_kv_heads),
            ("HEAD_SIZE", case["head size"]),
            ("SCALE", case["head size"] ** -0.5),
        ):
            settings.setattr(backend_utils, name, value)
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
        self.impl = impl = make_impl(
            self.config,
            num_heads,
            num_kv_heads,
            17 if case["sees"] == "window" else None,
            sinks.to(case["dtype"]) if case["sinks"] else None,
            "layers.1.attn" if case["shared cache"] else None,
            2.0 if case["soft cap"] else None,
        )
        if case["key offset"]:
            shape = (2, num_kv_heads, case["head size"])
            impl.runner.key_offset = 0.5 * gaussian(*shape, seed=5)
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
        register(self.config, self.impl)
        backend = create_chunked_local_attention_backend(TurboAttentionBackend, CHUNK)
        spec = make_spec(
            ChunkedLocalAttentionSpec,
            block_size=BLOCK_SIZE,
            num_kv_heads=self.impl.num_kv_heads,
            head_size=self.case["head size"],
            attention_chunk_size=CHUNK,
        )
        names = ["layers.0.attn"]
        builder = backend.get_builder_cls()(spec, names, self.config, DEVICE)
        return builder.build(0, self.batch.common)

    def run(self) -> torch.Tensor:
        step = self.build()
        if not self.case["recent window"]:
            return self.batch.run(self.impl, step, self.path)
        runner, batch = self.impl.runner, self.batch
        runner.window_wanted = 8
        _, window = small_windows(runner, step, BLOCK_SIZE, torch.device(DEVICE))
        own = slice(0, batch.common.num_actual_tokens)
        tokens = batch.query[own], batch.key[own], batch.value[own]
        output = torch.zeros_like(tokens[0])
        runner.forward(*tokens, batch.cache, step, output, window)
        assert window.pages.any()
        return output

    def check(self, output: torch.Tensor) -> None:
        if self.case["sees"] != "chunk":
            self.batch.check(self.impl, output, self.ranges)
            return
        begin = 0
        for row, (num_queries, context) in enumerate(self.requests):
            self.check_chunks(output, row, begin, num_queries, context)
            begin += num_queries

    def check_chunks(
        self, output: torch.Tensor, row: int, begin: int, num_queries: int, context: int
    ) -> None:
        """Compare a request to attention of each token over its chunk.

        A decode's query is rounded as in ``Batch.check``.
        """
        batch, length = self.batch, context + num_queries
        runner = self.impl.runner
        layout = runner.layout
        key, value = load_context(batch.cache, batch.table[row], length, layout)
        own = slice(begin, begin + num_queries)
        shift = torch.zeros_like(key)
        if runner.key_offset is not None:
            # A chunk is a sequence of its own for the layer.
            segments = torch.arange(length) % CHUNK // interface.OFFSET_SEGMENT
            table = runner.key_offset
            shift = table[segments.clamp(max=len(table) - 1)].to(key)
        key += shift
        if not runner.stored:
            key[context:], value[context:] = batch.key[own], batch.value[own]
            shift[context:] = 0
        decode_lens = [n for n, _ in self.requests if n <= runner.max_query_len]
        is_decode = row < len(decode_lens) and runner.kernels is not None
        for first in range(context // CHUNK * CHUNK, length, CHUNK):
            last = min(first + CHUNK, length)
            queries = slice(begin + max(first - context, 0), begin + last - context)
            seen = batch.query[queries], key[first:last], value[first:last]
            target = None
            if is_decode:
                rotated = reference.rotate(seen[0])
                if rounds_queries(runner, decode_lens):
                    rotated = reference.round_query(rotated)
                num_newest = last - max(first, context)
                target = attention_of_rounded(
                    reference.inverse_rotate(rotated),
                    *seen,
                    0 if runner.stored else num_newest,
                    self.impl.scale,
                    shift[first:last],
                )
            assert_by_2x_rule(
                output[queries],
                *seen,
                self.impl.scale,
                self.case["dtype"],
                True,
                target,
            )


@requires_triton
@kernel_paths
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_case(tmp_path: Path, case: Case, path: str, settings):
    """Outputs are right, and the check fails if a feature of the case is left out."""
    layer = Layer(tmp_path, case, path, settings)
    output = layer.run()
    layer.check(output)
    runner = layer.impl.runner
    # An offset that all keys lack changes no softmax. A chunk is a sequence of its own.
    longest = max(sum(x) for x in layer.requests)
    seen = CHUNK if case["sees"] == "chunk" else longest
    is_common = runner.stored and seen <= interface.OFFSET_SEGMENT
    for name, has_it in (
        ("sinks", case["sinks"]),
        ("logits_soft_cap", case["soft cap"]),
        ("key_offset", case["key offset"] and not is_common),
        ("sliding_window", case["sees"] == "window"),
    ):
        if has_it:
            with settings.context() as patch:
                patch.setattr(runner, name, None)
                with pytest.raises(AssertionError, match="allowed"):
                    layer.check(output)
    with settings.context() as patch:
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
def test_refused_pairs_are_refused(tmp_path: Path, settings):
    """Each pair without a case is refused, or no layer has the argument."""
    taken = inspect.signature(ChunkedLocalAttention.__init__).parameters
    assert not {"sinks", "logits_soft_cap", "per_layer_sliding_window"} & set(taken)
    config = make_vllm_config(tmp_path, turbo_prefill="stored")
    config.attention_config.turbo_window = "auto"
    assert window_choice(config) == 0
    config = make_vllm_config(tmp_path)
    impl = make_impl(config, kv_sharing_target_layer_name="layers.1.attn")
    assert impl.runner.window_wanted == 0
    first = {name: values[0] for name, values in FEATURES.items()}
    both = first | {"soft cap": True, "key offset": True}
    with pytest.raises(AssertionError, match="capped scores with an offset"):
        Layer(tmp_path, both, "triton", settings).run()
    batch = Batch.make(make_impl(make_vllm_config(tmp_path)), REQUESTS)
    batch.common.mm_req_doc_ranges = {2: [IMAGE]}
    chunks, _ = make_local_attention_virtual_batches(CHUNK, batch.common, BLOCK_SIZE)
    assert chunks.mm_req_doc_ranges is None
