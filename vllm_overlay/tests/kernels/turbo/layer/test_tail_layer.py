# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The layer of a tail: when it exists, its blocks and its cost."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.attention.backends.turbo_tail import (
    TurboTail,
    TurboTailBackend,
    tail_choice,
)
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.core.kv_cache_planning import get_kv_cache_configs, get_kv_cache_groups
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from ..backend_utils import make_engine_config, make_vllm_config, with_drafts
from ..utils import BF16

NUM_LAYERS = 4
MAIN, TAIL = "layers.0.attn", "layers.0.attn.recent_window"


def make_config(
    folder: Path, tail: int | str = "auto", dtype: str = "turbo4", **arguments: Any
) -> VllmConfig:
    """An engine's configuration of a Llama with heads of 128, as a user makes it."""
    make_vllm_config(folder, head_dim=128)
    attention = {"turbo_window": tail} | arguments.pop("attention_config", {})
    arguments = {"max_model_len": 2048, "attention_config": attention} | arguments
    return make_engine_config(folder, dtype, **arguments)


def add_layers(
    config: VllmConfig,
    num_layers: int = 1,
    sliding_windows: tuple[int | None, ...] = (),
    chunk: int | None = None,
) -> dict[str, Any]:
    """Register layers as models do; return all registered layers by name.

    Args:
        config: The engine's configuration.
        num_layers: Number of layers.
        sliding_windows: The layers' sliding windows, in turn; None for no window.
        chunk: Tokens of a chunk of chunked local attention; None for no chunks.

    """
    windows = itertools.cycle(sliding_windows or (None,))
    with set_current_vllm_config(config), set_default_torch_dtype(BF16):
        for i, sliding_window in zip(range(num_layers), windows):
            arguments: dict[str, Any] = {
                "num_heads": 4,
                "head_size": 128,
                "scale": 128**-0.5,
                "num_kv_heads": 2,
                "cache_config": config.cache_config,
                "prefix": f"layers.{i}.attn",
            }
            if chunk is None:
                Attention(per_layer_sliding_window=sliding_window, **arguments)
            else:
                ChunkedLocalAttention(attention_chunk_size=chunk, **arguments)
    return config.compilation_config.static_forward_context


@pytest.fixture(autouse=True)
def second_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have model runner V2, which GPUs run, on any machine."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def test_without_a_tail_nothing_is_made(folder: Path):
    for config in (make_config(folder, 0), make_config(folder, "auto", "auto")):
        assert list(add_layers(config)) == [MAIN]


@pytest.mark.parametrize(
    "dtype, block_size, tokens",
    [("turbo4", 64, 23), ("turbo4", 16, 5), ("k4v3", 64, 20), ("turbo3", 64, 18)],
)
def test_block(folder: Path, dtype: str, block_size: int, tokens: int):
    config = make_config(folder, "auto", dtype, block_size=block_size)
    layers = add_layers(config)
    assert list(layers) == [MAIN, TAIL]
    specs = get_kv_cache_spec(config)
    main, tail = specs[MAIN], specs[TAIL]
    assert type(main) is FullAttentionSpec and type(tail) is CircularBufferSpec
    assert tail.page_size_bytes == main.page_size_bytes
    # With another dtype, vLLM would clear every new block.
    assert (tail.dtype, tail.kv_quant_mode) == (main.dtype, main.kv_quant_mode)
    assert tail.max_num_blocks_per_req(config, 2048) == 1
    assert not tail.prefix_cacheable
    assert layers[TAIL].num_tokens == tokens
    assert layers[MAIN].impl.tail is layers[TAIL]


def test_tokens_that_are_asked_for(folder: Path):
    config = make_config(folder, 7, block_size=64)
    tail = add_layers(config)[TAIL]
    assert tail.get_kv_cache_spec(config) is not None
    assert tail.num_tokens == 7


def test_drafts_take_rows(folder: Path):
    config = with_drafts(make_config(folder, "auto", block_size=64), 3)
    tail = add_layers(config)[TAIL]
    assert tail.get_kv_cache_spec(config) is not None
    assert tail.num_tokens == 24 - tail.query_len
    assert tail.query_len >= 4


def test_drafters_have_none(folder: Path):
    config = make_config(folder, "auto", block_size=64)
    layers = add_layers(config)
    for layer in layers.values():
        layer.is_draft_layer = True
    assert list(get_kv_cache_spec(config)) == [MAIN]
    assert layers[MAIN].impl.tail.of_step() is None


def test_chunked_local_layers_have_none(folder: Path):
    """A chunk is a request for these layers, but a request has only one block."""
    config = make_config(folder, 7, block_size=64)
    tail = add_layers(config, chunk=128)[TAIL]
    assert isinstance(tail, TurboTail)
    specs = get_kv_cache_spec(config)
    assert list(specs) == [MAIN] and type(specs[MAIN]) is ChunkedLocalAttentionSpec
    assert tail.num_tokens == 0 and tail.of_step() is None


def test_pages_are_as_large_as_the_layers(folder, monkeypatch):
    """Pages are as large as the layer's, even if these end in padding."""
    config = make_config(folder, block_size=64)
    layers = add_layers(config)
    spec = layers[MAIN].get_kv_cache_spec(config)
    padded = replace(spec, page_size_padded=spec.page_size_bytes + 4096)
    monkeypatch.setattr(layers[MAIN], "get_kv_cache_spec", lambda config: padded)
    tail = layers[TAIL].get_kv_cache_spec(config)
    assert tail.page_size_bytes == padded.page_size_bytes


def test_more_than_a_block_has_room_for(folder: Path):
    config = make_config(folder, 24, block_size=64)
    tail = add_layers(config)[TAIL]
    with pytest.raises(ValueError, match="turbo_window=24 .* room for 23 .*block-size"):
        tail.get_kv_cache_spec(config)


def test_a_block_without_room(folder: Path):
    """Drafts take all rows of a block."""
    config = with_drafts(make_config(folder, "auto", block_size=16), 6)
    layers = add_layers(config)
    assert list(get_kv_cache_spec(config)) == [MAIN]
    assert layers[MAIN].impl.tail.of_step() is None


@pytest.mark.parametrize(
    "sliding_window, wanted, num_drafts, tokens",
    [
        (128, "auto", 0, 23),
        (128, 7, 0, 7),
        (24, "auto", 0, 23),
        (20, "auto", 0, 19),
        # A full layer has 23. All queries see 19 of a sliding window.
        (20, 23, 0, 19),
        (20, 7, 0, 7),
        (20, "auto", 3, 16),
    ],
)
def test_sliding_window(folder, sliding_window, wanted, num_drafts, tokens):
    """Each of the step's tokens sees all of the tail and of the step."""
    config = make_config(folder, wanted, block_size=64)
    config = with_drafts(config, num_drafts)
    layers = add_layers(config, 1, (sliding_window,))
    specs, tail = get_kv_cache_spec(config), layers[TAIL]
    assert type(specs[MAIN]) is SlidingWindowSpec
    assert type(specs[TAIL]) is CircularBufferSpec
    assert tail.num_tokens == tokens
    assert tail.num_tokens + tail.query_len <= sliding_window
    assert num_drafts < tail.query_len
    tail.bind_kv_cache(torch.zeros(3, 2, 64, 136, dtype=torch.uint8))
    assert tail.format.num_rows == min(24, sliding_window)


def test_sliding_windows_of_few_tokens(folder: Path):
    for i, args in enumerate([("auto", 16, 0), (7, 16, 0), ("auto", 17, 16)]):
        (folder / str(i)).mkdir()
        wanted, sliding_window, num_drafts = args
        config = make_config(folder / str(i), wanted, block_size=128)
        config = with_drafts(config, num_drafts)
        layers = add_layers(config, 1, (sliding_window,))
        assert list(get_kv_cache_spec(config)) == [MAIN]
        tail = layers[MAIN].impl.tail
        assert tail is None or tail.num_tokens == 0


@pytest.mark.parametrize(
    "sliding_windows, counts",
    [((128,) * 5 + (None,), [5, 1, 6]), ((128, None), [1, 1, 2])],
    ids=["5:1", "1:1"],
)
def test_groups(folder, sliding_windows, counts):
    """Tails of both kinds of layers share groups, because they are alike."""
    config = make_config(folder, block_size=64)
    config.cache_config.kv_cache_layout = "LBHNC"
    add_layers(config, 12, sliding_windows)
    groups = get_kv_cache_groups(config, get_kv_cache_spec(config))
    kinds = [type(group.kv_cache_spec) for group in groups]
    found = (SlidingWindowSpec, FullAttentionSpec, CircularBufferSpec)
    assert [kinds.count(kind) for kind in found] == counts


# Arguments of an engine by the reason; ``hindered`` makes the other changes.
CASES: dict[str, dict[str, Any]] = {
    "turbo_prefill is stored": {"attention_config": {"turbo_prefill": "stored"}},
    "model runner V1": {},
    "hybrid KV cache manager is disabled": {"disable_hybrid_kv_cache_manager": True},
    "context parallelism": {},
    "hybrid model": {},
}


def hindered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reason: str, tail: int | str
) -> VllmConfig:
    config = make_config(folder, tail, **CASES[reason])
    if reason == "model runner V1":
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    if reason == "context parallelism":
        config.parallel_config.decode_context_parallel_size = 2
    if reason == "hybrid model":
        monkeypatch.setattr(type(config.model_config), "is_hybrid", True)
    return config


def test_each_reason_has_a_case():
    for known in refusals.TAIL_FEATURES:
        assert sum(case in known for case in CASES) == 1, known


@pytest.mark.parametrize("reason", CASES)
def test_where_there_can_be_none(folder, monkeypatch, reason):
    assert tail_choice(hindered(folder, monkeypatch, reason, "auto")) == 0
    assert tail_choice(hindered(folder, monkeypatch, reason, 0)) == 0
    with pytest.raises(ValueError, match=f"turbo_window=8 .*{reason}.* Use auto or 0"):
        tail_choice(hindered(folder, monkeypatch, reason, 8))


@pytest.mark.parametrize("others", [[], ["FLASH_ATTN"]])
def test_block_size(folder: Path, others: list[str]):
    """The default block size has room for a tail; a size that a user sets stays."""
    backends = [TurboAttentionBackend, TurboTailBackend]
    backends += [AttentionBackendEnum[name].get_class() for name in others]
    config = make_config(folder)

    def preferred() -> int:
        return Platform._preferred_block_size_for_backends(backends, 16, config)

    assert not config.cache_config.user_specified_block_size
    assert preferred() == 64
    config.cache_config.user_specified_block_size = True
    assert preferred() == 16


def test_sizes_of_hybrid_pages_are_not_refused(folder: Path):
    """Hybrid models may make blocks longer by any number of tiles."""
    config = make_config(folder)
    with set_current_vllm_config(config):
        assert TurboTailBackend.supports_block_size(80)
        assert not TurboTailBackend.supports_block_size(48)


def capacity(folder: Path, tail: int | str) -> int:
    """Number of tokens that fit 16 GiB, in requests of 8192 tokens."""
    folder.mkdir(exist_ok=True)
    config = make_config(folder, tail, block_size=64)
    config.model_config.max_model_len = 8192
    config.cache_config.kv_cache_layout = "LBHNC"
    add_layers(config, 32)
    specs = get_kv_cache_spec(config)
    groups = get_kv_cache_groups(config, specs)
    assert len(groups) == (1 if tail == 0 else 2)
    (planned,) = get_kv_cache_configs(config, [specs], [2**34], groups)
    return get_kv_cache_capacity(config, planned)[0]


def test_capacity(folder: Path):
    """A tail costs one block of 64 tokens for each request of 8192."""
    with_tail = capacity(folder / "a", "auto") / capacity(folder / "b", 0)
    assert 1 > with_tail > 0.985


def test_a_tail_is_bound_to_its_blocks(folder: Path):
    config = make_config(folder, block_size=64)
    tail = add_layers(config)[TAIL]
    assert isinstance(tail, TurboTail)
    assert tail.get_kv_cache_spec(config) is not None
    assert tail.of_step() is None
    tail.bind_kv_cache(torch.zeros(3, 2, 64, 136, dtype=torch.uint8))
    assert tail.format is not None
    assert tail.format.num_rows == tail.num_tokens + tail.query_len
