# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layers with several tokens for each token of the request, and a sliding window.

Voxtral Realtime's causal encoder has them. Its backend wraps the cache dtype's backend.
"""

from fractions import Fraction

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models.whisper_causal import (
    WhisperCausalAttentionWithBlockPooling,
)
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo.serving.startup import check_layer, describe_cache

from ..backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    SCALE,
    all_paths,
    make_vllm_config,
    prefill_modes,
    set_path,
    with_drafts,
)
from ..batch_utils import PADDING, Batch
from ..utils import BF16, DEVICE

POOL, NAME = 4, "encoder.layers.0.attn"
# (query length, context length) in the request's tokens: decodes, streamed chunks, a
# prefix hit, a first chunk.
BATCHES = {
    "decodes": [(1, 7), (1, 0), (1, 40)],
    "mixed": [(1, 7), (1, 30), (2, 9), (5, 12), (20, 3), (4, 0)],
    "first chunks": [(9, 0), (3, 0)],
}


def make_layer(
    config: VllmConfig, sliding_window: int = 21
) -> WhisperCausalAttentionWithBlockPooling:
    """The encoder's attention layer, which has as many KV heads as query heads."""
    with set_current_vllm_config(config), set_default_torch_dtype(BF16):
        return WhisperCausalAttentionWithBlockPooling(
            NUM_HEADS,
            HEAD_SIZE,
            SCALE,
            num_kv_heads=NUM_HEADS,
            cache_config=config.cache_config,
            per_layer_sliding_window=sliding_window,
            prefix=NAME,
            block_pool_size=POOL,
        )


def make_builder(config: VllmConfig, layer: WhisperCausalAttentionWithBlockPooling):
    spec = layer.get_kv_cache_spec(config)
    builder_cls = layer.get_attn_backend().get_builder_cls()
    return builder_cls(spec, [NAME], config, DEVICE)


def requests_metadata(batch: Batch) -> CommonAttentionMetadata:
    """The runner's metadata of the batch, in the requests' tokens."""
    common = batch.common
    assert common.seq_lens_cpu_upper_bound is not None
    slots = common.slot_mapping[: common.num_actual_tokens : POOL] // POOL
    padding = torch.full((PADDING,), -1, device=DEVICE)
    return common.replace(
        query_start_loc=common.query_start_loc // POOL,
        query_start_loc_cpu=common.query_start_loc_cpu // POOL,
        seq_lens=common.seq_lens // POOL,
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound // POOL,
        num_actual_tokens=common.num_actual_tokens // POOL,
        max_query_len=common.max_query_len // POOL,
        max_seq_len=common.max_seq_len // POOL,
        slot_mapping=torch.cat([slots, padding]),
    )


def make_batch(impl: TurboAttentionImpl, requests: list[tuple[int, int]]) -> Batch:
    """A batch as the layer sees it: ``POOL`` tokens for each token of a request."""
    tokens = [(POOL * query, POOL * context) for query, context in requests]
    return Batch.make(impl, tokens, POOL * BLOCK_SIZE)


@prefill_modes
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@all_paths
def test_batches(folder, mode, requests, path):
    config = make_vllm_config(folder, turbo_prefill=mode)
    layer = make_layer(config)
    impl = layer.impl
    set_path(impl, path)
    batch = make_batch(impl, requests)
    batch.free_hidden_blocks(21)
    metadata = make_builder(config, layer).build(0, requests_metadata(batch))
    num_decodes = sum(length == 1 for length, _ in requests)
    assert metadata.num_decodes == num_decodes
    assert metadata.num_decode_tokens == POOL * num_decodes
    batch.serve(impl, metadata)


@pytest.mark.parametrize("drafts", [0, 2])
@all_paths
def test_decodes_by_lengths_of_the_device(folder, drafts, path):
    """A replayed CUDA graph reads lengths from tensors on the device, not the lengths
    that the host had at the capture.
    """
    config = make_vllm_config(folder)
    config = with_drafts(config, drafts)
    layer = make_layer(config)
    impl = layer.impl
    set_path(impl, path)
    builder = make_builder(config, layer)
    length = 1 + drafts
    captured = make_batch(impl, [(length, 50), (length, 50)])
    metadata = builder.build(0, requests_metadata(captured))
    assert metadata.decode_query_len == POOL * length
    assert metadata.decode_start_loc is None
    batch = make_batch(impl, [(length, 3), (length, 33)])
    captured.common.block_table_tensor.zero_()
    columns = batch.table.shape[1]
    captured.common.block_table_tensor[:, :columns] = batch.table
    builder.build(0, requests_metadata(batch))
    batch.serve(impl, metadata)


def test_spec(folder):
    """A request's token has ``POOL`` slots, each with the usual number of bytes."""
    config = make_vllm_config(folder)
    layer = make_layer(config)
    check_layer(NAME, layer, config)
    spec = layer.get_attn_backend().customize_spec(layer.get_kv_cache_spec(config))
    assert spec.tokens_per_state == Fraction(1, POOL)
    slot_size = layer.impl.runner.layout.slot_size
    assert spec.state_content_bytes == slot_size
    assert spec.page_size_bytes == POOL * spec.block_size * NUM_HEADS * slot_size
    told = describe_cache([layer.impl])
    assert f" {POOL * NUM_HEADS * slot_size} bytes a token and layer" in told
    assert " 3.76 times fewer" in told


def test_limits_are_the_layers(folder):
    """Scratch is for the layer's tokens, and the window is compared in them."""
    config = make_vllm_config(folder)
    requests = config.model_config.max_model_len
    runner = make_layer(config, requests + 1).impl.runner
    assert runner.scoring.sliding_window == requests + 1
    step = config.scheduler_config.max_num_batched_tokens
    assert runner.max_num_tokens == POOL * step
    assert runner.max_query_len == POOL
    config.compilation_config.static_forward_context.clear()
    layer = make_layer(config, POOL * requests)
    assert layer.impl.runner.scoring.sliding_window is None
    # The runner reorders requests by the requests' tokens.
    assert make_builder(config, layer).reorder_batch_threshold == 1


def test_no_tail(folder):
    """No tail: its block would be in the request's tokens."""
    config = make_vllm_config(folder)
    config.attention_config.turbo_window = "auto"
    make_layer(config)
    assert list(config.compilation_config.static_forward_context) == [NAME]


@pytest.mark.parametrize("skipped", ["0", "sliding_window"])
def test_skipped_layers_are_refused(folder, skipped):
    """The backend is chosen before vLLM looks up the layer's own dtype."""
    config = make_vllm_config(folder)
    config.cache_config.kv_cache_dtype_skip_layers = [skipped]
    message = "--kv-cache-dtype turbo4 .*: pooled blocks of a layer in the model's"
    with pytest.raises(ValueError, match=message):
        make_layer(config)
