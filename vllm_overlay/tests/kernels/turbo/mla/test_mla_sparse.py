# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The sparse MLA layer of vLLM with turbo pages: outputs, slots and memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.models.deepseek_v32.attention import DeepseekV32Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.sparse_utils import (
    triton_convert_req_index_to_global_index,
)
from vllm.v1.attention.backends.mla.turbo_mla_metadata import (
    MAX_CONTEXT_ROWS,
    TurboMLAMetadataBuilder,
)
from vllm.v1.attention.backends.mla.turbo_mla_sparse import (
    TurboMLASparseBackend,
    TurboMLASparseMetadataBuilder,
    find_slots,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops.turbo.interface import MAX_KV_SPLITS
from vllm.v1.attention.ops.turbo.keys.text_pass import TextPass
from vllm.v1.attention.ops.turbo.planning import scratch
from vllm.v1.attention.ops.turbo.reference import latent as reference
from vllm.v1.attention.ops.turbo.serving.connectors import (
    MLA_CONNECTORS,
    SPARSE_MLA_CONNECTORS,
)
from vllm.v1.attention.ops.turbo.serving.startup import describe_latent_cache
from vllm.v1.attention.ops.turbo.triton.latent_kernels import TritonLatentKernels
from vllm.v1.worker.workspace import lock_workspace

from ..backend_utils import prefill_modes
from ..serving.refusal_cases import transfer_config
from ..serving.test_refusals import refused
from ..upstream.test_upstream_sparse_mla import (
    HIDDEN,
    ROPE,
    latents_of,
    make_v32_config,
    make_v32_layer,
    run_v32,
)
from ..utils import ON_GPU, gaussian, requires_triton
from .latent_utils import latent_presets
from .mla_utils import (
    NUM_HEADS,
    MLABatch,
    make_mla_builder,
    make_mla_config,
    make_mla_layer,
)
from .test_latent_mean import NUM_TEXT, NUM_TOKENS, expected_outputs

# The error of fp32 in outputs of magnitude one.
TOLERANCE = 2e-5
TOPK = 40
# A prefill of no more tokens than TOPK attends densely.
BATCHES = {
    "decodes": [(1, 31), (1, 0), (1, 95), (1, 64)],
    "prefills": [(TOPK + 1, 0), (7, 64)],
    "short prefills": [(TOPK, 0), (7, 33), (2, 0)],
    "mixed": [(1, 33), (1, 70), (7, 90), (TOPK + 30, 0)],
    "mixed with short": [(1, 33), (1, 70), (7, 20), (TOPK, 0)],
}
pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="fp32 layers are for CPUs"),
    pytest.mark.usefixtures("rank_config"),
]


def make_sparse_config(
    folder: Path, *arguments: Any, topk: int = TOPK, **changes: Any
) -> VllmConfig:
    """The configuration of a DeepSeek-V2 with one layer and an indexer."""
    return make_mla_config(folder, *arguments, index_topk=topk, **changes)


def make_sparse_layer(config: VllmConfig) -> MLAAttention:
    """A sparse layer, and its indexer's buffer with lists of other tokens."""
    topk = config.model_config.hf_text_config.index_topk
    num_tokens = config.scheduler_config.max_num_batched_tokens
    buffer = torch.full((num_tokens, topk), 3, dtype=torch.int32)
    indexer = SimpleNamespace(topk_indices_buffer=buffer)
    more = dict(use_sparse=True, indexer=indexer, topk_indices_buffer=buffer)
    return make_mla_layer(config, **more)


def make_lists(batch: MLABatch, topk: int) -> torch.Tensor:
    """(T, topk) int32: for each query token up to ``topk`` of the tokens up to itself,
    in any order, with -1 among them.
    """
    generator = torch.Generator().manual_seed(6)
    lists = torch.full((batch.query.shape[0], topk), -1, dtype=torch.int32)
    ends = [
        context + place + 1
        for query_len, context in batch.requests
        for place in range(query_len)
    ]
    for row, end in enumerate(ends):
        chosen = torch.randperm(end, generator=generator)[: topk * 3 // 4]
        places = torch.randperm(topk, generator=generator)[: len(chosen)]
        lists[row, places] = chosen.int()
    return lists


def run(config: VllmConfig, batch: MLABatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output, (T, Hq, V), and the lists that it read, (T, K)."""
    metadata = make_mla_builder(config, batch.layer).build(0, batch.common)
    # A drafter's indexers get the target's buffer after they were made.
    lists = make_lists(batch, metadata.topk_tokens)
    batch.layer.indexer.topk_indices_buffer = lists
    return batch.run(config, metadata), lists


def expected(batch: MLABatch, lists: torch.Tensor, mode: str) -> torch.Tensor:
    """The output in fp32, (T, Hq, V): prefills see each other raw if all are short."""
    prefills = [request for request in batch.requests if request[0] > 1]
    is_dense = mode == "raw" and all(sum(request) <= TOPK for request in prefills)
    own = batch.expected(2) if is_dense else None
    stored = [batch.stored(row) for row in range(len(batch.requests))]
    output = batch.attend(stored, lists)
    if own is not None:
        first = sum(query_len for query_len, _ in batch.requests if query_len == 1)
        output[first:] = own[first:]
    return output


def test_backend_interface():
    assert AttentionBackendEnum.TURBO_MLA_SPARSE.get_class() is TurboMLASparseBackend
    assert TurboMLASparseBackend.is_mla() and TurboMLASparseBackend.is_sparse()
    assert TurboMLASparseBackend.get_name() == "TURBO_MLA_SPARSE"


@latent_presets
@prefill_modes
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_batches(folder, name, mode, requests):
    """Query tokens see the listed tokens as stored. A batch's short prefills see all
    tokens, their own raw, unless all are to be seen as stored.
    """
    config = make_sparse_config(folder, name, turbo_prefill=mode)
    batch = MLABatch.make(make_sparse_layer(config), requests)
    before = batch.cache.clone()
    output, lists = run(config, batch)
    torch.testing.assert_close(
        output, expected(batch, lists, mode), atol=TOLERANCE, rtol=0
    )
    slots = batch.common.slot_mapping
    batch.store(before, slots, batch.kv_c, batch.k_pe.squeeze(1))
    assert torch.equal(batch.cache, before)


@requires_triton
@latent_presets
def test_triton_kernels(folder, name):
    config = make_sparse_config(folder, name, torch.float16, turbo_prefill="stored")
    layer = make_sparse_layer(config)
    layer.impl.runner.kernels = TritonLatentKernels()
    batch = MLABatch.make(layer, [(1, 33), (1, 70), (3, 90)])
    output, lists = run(config, batch)
    torch.testing.assert_close(
        output.float(), expected(batch, lists, "stored"), atol=4e-3, rtol=0
    )


def test_padded_batch(folder):
    """A CUDA graph's batch has requests without tokens, and padded rows for them."""
    config = make_sparse_config(folder)
    batch = MLABatch.make(make_sparse_layer(config), BATCHES["decodes"], padding=2)
    output, lists = run(config, batch)
    own = len(batch.requests)
    torch.testing.assert_close(
        output[:own], expected(batch, lists, "raw"), atol=TOLERANCE, rtol=0
    )
    assert output.shape[0] > own and not output[own:].any()


@requires_triton
def test_slots_are_those_of_vllms_kernel(monkeypatch):
    """The operators for CPUs give what the kernel for GPUs gives."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(60, generator=generator).int().view(3, 20)
    positions = torch.randint(-40, 20 * 16, (5, 128), generator=generator).int()
    requests = torch.tensor([0, 2, 2, 1, 0], dtype=torch.int32)
    arguments = requests, table, positions.clamp_(min=-1), 16
    slots, counts = find_slots(*arguments)
    assert (counts < 128).all() and (slots[0, : counts[0]] >= 0).all()
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    for one, other in zip((slots, counts), find_slots(*arguments)):
        assert torch.equal(one, other)
    other = triton_convert_req_index_to_global_index(
        *arguments[:3], BLOCK_SIZE=16, NUM_TOPK_TOKENS=128
    )
    assert torch.equal(other.sort(1).values, slots.sort(1).values)


def test_requests_of_draft_tokens_follow_the_device(folder):
    """A drafter's next step has other query lengths in the same tensors."""
    config = make_sparse_config(folder)
    batch = MLABatch.make(make_sparse_layer(config), [(1, 20), (1, 9), (1, 31)])
    builder = make_mla_builder(config, batch.layer)
    metadata = builder.build(0, batch.common)
    assert metadata.req_id_per_token[:3].tolist() == [0, 1, 2]
    metadata.query_start_loc.copy_(torch.tensor([0, 0, 2, 3]))
    builder.update_draft_decode_metadata(metadata)
    assert metadata.req_id_per_token[:3].tolist() == [1, 1, 2]
    assert builder.supports_draft_decode_metadata_update


def many_splits(num_seqs: int, num_heads: int, num_sms: int, query_len: int = 1) -> int:
    return MAX_KV_SPLITS


@prefill_modes
@pytest.mark.parametrize("num_rows", [200, 2**20])
def test_the_profile_run_takes_all_memory(
    folder, workspace, monkeypatch, mode, num_rows
):
    """No step needs more than the profile run took, for any number of splits. A step
    with more tokens than partial results are kept is cut into calls.
    """
    monkeypatch.setattr(scratch, "PARTIAL_BYTES", num_rows * NUM_HEADS * 512 * 4)
    config = make_sparse_config(folder, turbo_prefill=mode, max_num_batched_tokens=1200)
    layer = make_sparse_layer(config)
    runner = layer.impl.runner
    runner.kernels = reference.TorchLatentKernels(num_decode_splits=many_splits)
    layer.impl.reserve_workspace()
    lock_workspace()
    for requests in ([(1, 40)] * runner.max_num_seqs, [(1199, 0)], [(1, 50), (9, 1)]):
        batch = MLABatch.make(layer, requests)
        output, lists = run(config, batch)
        torch.testing.assert_close(
            output, expected(batch, lists, mode), atol=TOLERANCE, rtol=0
        )


def test_projected_contexts_have_room(folder):
    """The profile run takes the projected keys and values of a piece of context."""
    config = make_sparse_config(folder, topk=2048, max_num_seqs=64)
    layer = make_sparse_layer(config)
    rows = make_mla_builder(config, layer).chunked_prefill_workspace_size
    assert rows == MAX_CONTEXT_ROWS
    # With few sequences and short lists there are fewer rows than in dense MLA.
    few = make_sparse_config(folder, max_num_seqs=1)
    (rows, dense) = (
        builder.determine_chunked_prefill_workspace_size(few)
        for builder in (TurboMLASparseMetadataBuilder, TurboMLAMetadataBuilder)
    )
    assert rows < dense
    projected = layer.qk_head_dim + layer.qk_nope_head_dim + layer.v_head_dim
    assert layer.impl._unmeasured_size() >= rows * projected
    assert layer.impl.runner.max_absorbed_tokens == 1024


def test_line_at_the_start(folder):
    config = make_sparse_config(folder)
    impls = [make_sparse_layer(config).impl, make_mla_layer(config).impl]
    line = describe_latent_cache(impls)
    assert "340 bytes a token and layer (sparse MLA layers: 1, query heads: 4" in line
    assert "340 bytes a token and layer (MLA layers: 1, query heads: 4" in line


@requires_triton
def test_layers_of_deepseek_v32(folder):
    """Its own layer class stores packed rows, and attends to the listed ones."""
    config = make_v32_config(folder, "turbo4", turbo_prefill="stored")
    layer = make_v32_layer(config)
    # The batch has the metadata of a request of 4 tokens behind 50.
    batch = MLABatch.make(layer, [(4, 50)])
    hidden, positions = gaussian(4, HIDDEN, seed=4), torch.arange(50, 54)
    _, keys = latents_of(layer, hidden, positions)
    lists = layer.topk_indices_buffer
    lists[:4] = make_lists(batch, lists.shape[1])
    layer.kv_cache = batch.cache
    metadata = make_mla_builder(config, layer).build(0, batch.common)
    slots = batch.common.slot_mapping
    output = run_v32(config, layer, hidden, positions, metadata, slots)
    query = layer.fused_qkv_a_proj(hidden)[0][:, : layer.q_lora_rank]
    query = layer.q_b_proj(layer.q_a_layernorm.forward_native(query))[0]
    batch.query = query.view(4, NUM_HEADS, -1)
    rotary = batch.query[..., -ROPE:].contiguous()
    rotary, _ = layer.rotary_emb.forward_native(positions, rotary.clone(), rotary)
    batch.query[..., -ROPE:] = rotary
    stored, stored_keys = batch.stored(0)
    torch.testing.assert_close(stored_keys[50:], keys, atol=0.05, rtol=0)
    expected = layer.o_proj(batch.attend([(stored, stored_keys)], lists[:4]).flatten(1))
    torch.testing.assert_close(output, expected[0], atol=TOLERANCE, rtol=0)


@requires_triton
def test_a_pass_of_layers_of_deepseek_v32(folder):
    """They attend to all tokens in a pass, which needs no lists."""
    config = make_v32_config(folder, "turbo4")
    layer = make_v32_layer(config)
    hidden = gaussian(NUM_TOKENS, HIDDEN, seed=4)
    positions = torch.arange(NUM_TOKENS)
    text_pass = TextPass({}, NUM_TEXT, NUM_TOKENS)
    with text_pass.running([layer]):
        text_pass.begin(0)
        output = run_v32(config, layer, hidden, positions, None, positions)
    assert "_sparse_indexer_and_attn" not in vars(layer)
    latents, keys = latents_of(layer, hidden, positions)
    mean = text_pass.means[layer.layer_name].rest
    torch.testing.assert_close(mean, latents[:NUM_TEXT].mean(0)[None])
    query = layer.fused_qkv_a_proj(hidden)[0][:, : layer.q_lora_rank]
    query = layer.q_b_proj(layer.q_a_layernorm.forward_native(query))[0]
    query = query.view(NUM_TOKENS, NUM_HEADS, -1)
    rotary = query[..., -ROPE:].contiguous()
    rotary, _ = layer.rotary_emb.forward_native(positions, rotary.clone(), rotary)
    query = torch.cat([query[..., :-ROPE], rotary], -1)
    attended = expected_outputs(layer, query, latents, keys[:, None])
    expected = layer.o_proj(attended)[0]
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=0)


class OwnSparseAttention(DeepseekV32Attention):
    """A model's own layer class, which may store by other means."""


@pytest.mark.parametrize("kind", [MLAAttention, DeepseekV32Attention])
def test_classes_of_layers(folder, kind):
    """Layers are served that have the implementation store their latents."""
    config = make_sparse_config(folder)
    layer = make_sparse_layer(config)
    layer.__class__ = kind
    current_platform.update_block_size_for_backend(config)
    layer.__class__ = OwnSparseAttention
    with refused(rf"layer {layer.layer_name} of .*OwnSparseAttention, TURBO_MLA_SPARS"):
        current_platform.update_block_size_for_backend(config)


@pytest.mark.parametrize("name", sorted(MLA_CONNECTORS))
def test_connectors(folder, name):
    """Connectors that take an indexer's keys for K and V are refused."""
    config = transfer_config(make_sparse_config(folder), name)
    if name in SPARSE_MLA_CONNECTORS:
        make_sparse_layer(config)
        return
    with refused(f"KV connector {name} .it is not known to work with sparse MLA: use"):
        make_sparse_layer(config)


def test_bytes_of_a_page(folder):
    """The latents' pages are those of dense MLA."""
    config = make_sparse_config(folder)
    spec = make_sparse_layer(config).get_kv_cache_spec(config)
    spec = TurboMLASparseBackend.customize_spec(spec)
    assert spec.page_size_bytes == 32 * 340
