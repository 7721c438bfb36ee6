# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The MLA layer of vLLM with turbo pages: stored bytes, outputs and memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms.interface import Platform
from vllm.v1.attention.backends.mla import turbo_mla
from vllm.v1.attention.backends.mla.turbo_mla import TurboMLABackend
from vllm.v1.attention.backends.mla.turbo_mla_metadata import TurboMLAMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops.turbo.format import LAYOUT_VERSION
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import MAX_KV_SPLITS
from vllm.v1.attention.ops.turbo.latent.runner import (
    MAX_ABSORBED_LEN,
    find_spans,
    plan_spans,
)
from vllm.v1.attention.ops.turbo.planning.decode import MAX_CALL_TOKENS
from vllm.v1.attention.ops.turbo.reference import latent as reference
from vllm.v1.attention.ops.turbo.serving.format_id import with_format_ids
from vllm.v1.attention.ops.turbo.serving.startup import describe_latent_cache
from vllm.v1.attention.ops.turbo.triton.latent_kernels import TritonLatentKernels
from vllm.v1.kv_cache_interface import get_kv_quant_mode
from vllm.v1.worker.utils import customize_attention_spec
from vllm.v1.worker.workspace import lock_workspace

from ..backend_utils import make_engine_config, prefill_modes, with_drafts
from ..utils import DEVICE, ON_GPU, requires_triton
from .latent_utils import latent_presets
from .mla_utils import (
    FP32,
    NOPE,
    NUM_HEADS,
    V_SIZE,
    MLABatch,
    make_mla_builder,
    make_mla_config,
    make_mla_layer,
)

# The error of fp32 in outputs of magnitude one.
TOLERANCE = 2e-5
BYTES = {"turbo4": 340, "turbo3": 276}
LONG = MAX_ABSORBED_LEN + 2
BATCHES = {
    "decodes": [(1, 31), (1, 0), (1, 95), (1, 64)],
    "short extends": [(1, 40), (5, 64), (MAX_ABSORBED_LEN, 33), (2, 0)],
    "uniform": [(3, 31), (3, 64), (3, 1)],
    "prefills": [(LONG, 0), (LONG + 30, 0)],
    "contexts": [(LONG, 64), (LONG + 9, 0), (LONG, 33)],
    "mixed": [(1, 33), (1, 70), (7, 32), (LONG, 70), (LONG, 0)],
}
pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="fp32 layers are for CPUs"),
    pytest.mark.usefixtures("rank_config"),
]


def assert_as_expected(
    batch: MLABatch, config: VllmConfig, raw_from: int | None, magnitude: float = 1
) -> None:
    metadata = make_mla_builder(config, batch.layer).build(0, batch.common)
    before = batch.cache.clone()
    output = batch.run(config, metadata)
    expected = batch.expected(raw_from)
    torch.testing.assert_close(
        output[: len(expected)].float(), expected, atol=TOLERANCE * magnitude, rtol=0
    )
    # The tokens' latents are stored over any bytes, and no other byte changes.
    num_tokens = batch.common.slot_mapping.numel()
    slots = batch.common.slot_mapping
    batch.store(before, slots, batch.kv_c, batch.k_pe.squeeze(1))
    assert num_tokens and torch.equal(batch.cache, before)


def test_backend_interface():
    assert AttentionBackendEnum.TURBO_MLA.get_class() is TurboMLABackend
    assert TurboMLABackend.is_mla() and not TurboMLABackend.is_sparse()
    assert TurboMLABackend.get_name() == "TURBO_MLA"
    assert TurboMLABackend.get_builder_cls() is TurboMLAMetadataBuilder


@latent_presets
@prefill_modes
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_batches(folder, name, mode, requests):
    """Short queries see all tokens as stored. Long queries see their own tokens raw, or
    also as stored.
    """
    config = make_mla_config(folder, name, turbo_prefill=mode)
    batch = MLABatch.make(make_mla_layer(config), requests)
    assert_as_expected(batch, config, LONG if mode == "raw" else None)


@requires_triton
@latent_presets
@prefill_modes
def test_triton_kernels(folder, name, mode):
    """Outputs are PyTorch's up to rounding in fp16, and all bytes are the same."""
    config = make_mla_config(folder, name, torch.float16, turbo_prefill=mode)
    layer = make_mla_layer(config)
    batch = MLABatch.make(layer, BATCHES["mixed"])
    metadata = make_mla_builder(config, layer).build(0, batch.common)
    expected, before = batch.run(config, metadata), batch.cache.clone()
    layer.impl.runner.kernels = TritonLatentKernels()
    batch.cache.copy_(MLABatch.make(layer, BATCHES["mixed"]).cache)
    metadata = make_mla_builder(config, layer).build(0, batch.common)
    output = batch.run(config, metadata)
    assert torch.equal(batch.cache, before)
    torch.testing.assert_close(output, expected, atol=4e-3, rtol=0)


@pytest.mark.parametrize("rank, rope", [(512, 0), (256, 64)])
@prefill_modes
def test_other_sizes(folder, rank, rope, mode):
    config = make_mla_config(folder, rank=rank, rope=rope, turbo_prefill=mode)
    batch = MLABatch.make(make_mla_layer(config), BATCHES["mixed"])
    assert_as_expected(batch, config, LONG if mode == "raw" else None)


@pytest.fixture
def empty_is_nan() -> Iterator[None]:
    """Have new tensors hold NaN, so that unwritten elements are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "requests, is_uniform",
    [([(1, 31), (1, 5)], True), ([(3, 31), (3, 64)], True), ([(3, 31), (1, 5)], False)],
)
def test_padded_batch(folder, empty_is_nan, requests, is_uniform):
    """A CUDA graph's batch has requests without tokens, and padded rows for them."""
    assert torch.empty(1).isnan().all()
    config = make_mla_config(folder)
    for padding in (0, 2):
        batch = MLABatch.make(make_mla_layer(config), requests, padding=padding)
        metadata = make_mla_builder(config, batch.layer).build(0, batch.common)
        (plan,) = metadata.decode.plans.values()
        assert plan.writes_all == is_uniform
        output = batch.run(config, metadata)
        expected = batch.expected(LONG)
        torch.testing.assert_close(
            output[: len(expected)], expected, atol=TOLERANCE, rtol=0
        )
        assert not output[len(expected) :].any()


def test_projected_context_has_room(folder):
    """The workspace has room for twice the projected keys and values of the longest
    piece of context and the keys with rotary parts. The profile run takes it.
    """
    config = make_mla_config(folder)
    config.model_config.max_model_len = 131072
    layer = make_mla_layer(config)
    builder = make_mla_builder(config, layer)
    num_rows = builder.chunked_prefill_workspace_size
    assert builder.chunked_prefill_workspace.shape[0] == num_rows
    projected = layer.qk_nope_head_dim + layer.v_head_dim
    whole_keys = layer.qk_nope_head_dim + layer.qk_rope_head_dim
    needed = num_rows * (projected + whole_keys)
    assert 2 * needed <= layer.chunked_prefill_workspace_size * projected
    assert num_rows % config.cache_config.block_size == 0


def test_context_in_several_chunks(folder, monkeypatch):
    """The workspace is smaller than the contexts, which are read in chunks."""
    monkeypatch.setattr(
        TurboMLAMetadataBuilder,
        "determine_chunked_prefill_workspace_size",
        staticmethod(lambda vllm_config: 64),
    )
    config = make_mla_config(folder)
    batch = MLABatch.make(make_mla_layer(config), [(LONG, 100), (LONG, 70)])
    builder = make_mla_builder(config, batch.layer)
    metadata = builder.build(0, batch.common)
    assert len(metadata.prefill.chunked_context.chunks) > 2
    assert_as_expected(batch, config, LONG)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_lose_one_rounding_by_the_rotation(folder, dtype):
    """The error of weights that include the rotation is at most twice the error of
    rounding weights to the model's dtype.
    """
    config = make_mla_config(folder, dtype=dtype)
    layer = make_mla_layer(config)
    plain = layer.kv_b_proj.weight.detach().double().view(NUM_HEADS, -1, 512)
    # Weights before any rounding.
    exact = plain * (1 + 2**-9 * torch.sin(torch.arange(512.0).double()))
    layer.kv_b_proj.weight.data.copy_(exact.view(-1, 512))
    layer.process_weights_after_loading(dtype)
    rotation = rotation_matrix(512, DEVICE, torch.float64) / 512**0.5
    up, value = exact.split([64, 64], 1)
    rounded = exact.to(dtype).double()
    for folded, weight, own in (
        (layer.W_UK_T, up, rounded[:, :64]),
        (layer.W_UV.transpose(1, 2), value, rounded[:, 64:]),
    ):
        error = (folded.double() - weight @ rotation).norm()
        assert 0 < error < 2 * (own - weight).norm()


def test_weights_that_are_loaded_again(folder):
    """Reloaded weights are rotated, and written where CUDA graphs read the old ones."""
    config = make_mla_config(folder)
    layer = make_mla_layer(config)
    before = layer.W_UV.clone()
    addresses = layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr()
    layer.kv_b_proj.weight.data.mul_(-2)
    layer.process_weights_after_loading(FP32)
    torch.testing.assert_close(layer.W_UV.data, -2 * before)
    assert addresses == (layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr())


def test_nothing_is_kept_among_the_weights(folder, monkeypatch):
    """Sleep may discard weights, so matrices are made on the host and copied anew."""
    devices = []

    def watched(size: int, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        devices.append(device.type)
        return rotation_matrix(size, device, *args, **kwargs)

    monkeypatch.setattr(turbo_mla, "rotation_matrix", watched)
    impl = make_mla_layer(make_mla_config(folder)).impl
    weight = torch.empty(512, NUM_HEADS, 64, device="meta")
    rotated, _ = impl.transform_absorbed_weights(weight, weight)
    assert rotated.device.type == "meta" and set(devices) == {"cpu"}


def test_absorbed_weights_keep_their_layout(folder):
    """The latent's axis has stride 1, as in vLLM's own: cuBLAS is faster with it."""
    layer = make_mla_layer(make_mla_config(folder))
    # (N, P, L) and (N, L, V).
    assert layer.W_UK_T.stride() == (NOPE * 512, 512, 1)
    assert layer.W_UV.stride() == (V_SIZE * 512, 1, 512)


@latent_presets
def test_bytes_of_a_page(folder, name):
    """A page has the bytes of a slot for each token."""
    config = make_mla_config(folder, name)
    layer = make_mla_layer(config)
    spec = layer.get_kv_cache_spec(config)
    spec = customize_attention_spec(layer.get_attn_backend(), spec)
    assert spec.page_size_bytes == 32 * BYTES[name]
    assert spec.kv_quant_mode == get_kv_quant_mode(name)


def test_line_at_the_start(folder):
    config = make_mla_config(folder, turbo_prefill="stored")
    impls = [make_mla_layer(config).impl for _ in range(3)]
    assert describe_latent_cache(impls) == (
        "KV cache turbo4: 340 bytes a token and layer (MLA layers: 3, query heads: 4, "
        "latent: 512, rotary: 64; PyTorch's operators, because this is a CPU), 3.39 "
        "times fewer than in bf16; 0.0 MiB of workspace; prefill attends to stored "
        "latents."
    )


def test_pages_say_their_format(folder):
    """The format ID of latents is the layout version alone."""
    config = make_mla_config(folder)
    layers = [make_mla_layer(config) for _ in range(2)]
    specs = {
        layer.layer_name: TurboMLABackend.customize_spec(
            layer.get_kv_cache_spec(config)
        )
        for layer in layers
    }
    found = list(with_format_ids(specs, config).values())
    assert {spec.format_id for spec in found} == {str(LAYOUT_VERSION)}
    assert type(found[0]).merge(found).format_id == str(LAYOUT_VERSION)


@pytest.mark.parametrize("cache_dtype", ["turbo4", "auto"])
def test_cpu_keeps_blocks_and_prefix_caching(folder, cache_dtype):
    """On a CPU only vLLM's own MLA loses long blocks and prefix caching."""
    make_mla_config(folder)
    config = make_engine_config(
        folder,
        cache_dtype,
        block_size=64,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
    )
    is_ours = cache_dtype == "turbo4"
    assert config.cache_config.block_size == (64 if is_ours else 16)
    assert config.cache_config.enable_prefix_caching is is_ours
    assert config.scheduler_config.enable_chunked_prefill is is_ours


BAILING = {"architectures": ["BailingMoeV2_5ForCausalLM"], "num_attention_heads": 32}


def test_blocks_of_hybrids(folder):
    """A block has just as many tokens as it takes to cover a state."""
    config = make_mla_config(folder, **BAILING)
    with set_current_vllm_config(config):
        make_mla_layer(config)
        Platform._align_hybrid_block_size(config, TurboMLABackend)
    state = 32 * 64 * 64 * 4
    size = config.cache_config.block_size
    assert size * 340 >= state > (size - 128) * 340


# Query lengths of requests, and first and last (exclusive) request of each span.
LENGTHS = {
    "decodes": ([1] * 300, [(0, 300)]),
    "drafts": ([4, 4, 2, 4], [(0, 4)]),
    "padding": ([4, 4, 0, 0], [(0, 4)]),
    "decodes and an extend": ([1] * 5 + [100], [(0, 5), (5, 6)]),
    "extends": ([100, 128, 90, 128] * 3, [(0, 8), (8, 12)]),
    "extends and decodes": ([128, *[1] * 20], [(0, 8), (8, 21)]),
}


@pytest.mark.parametrize("lengths, spans", LENGTHS.values(), ids=LENGTHS)
def test_spans(lengths, spans):
    assert find_spans(lengths, 4) == spans


@pytest.mark.parametrize("lengths", [x for x, _ in LENGTHS.values()], ids=LENGTHS)
def test_spans_have_all_tokens(lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    total = int(starts[-1])
    spans = plan_spans(lengths, total, starts, 4)
    assert [span.first_token for span in spans] == [
        int(starts[span.first_request]) for span in spans
    ]
    assert sum(span.num_tokens for span in spans) == total
    for span in spans:
        own = lengths[span.first_request :][: span.num_requests]
        assert span.query_len == max(own)
        if span.query_start_loc is None:
            assert set(own) == {span.query_len}
        else:
            expected = torch.tensor([0, *own]).cumsum(0).int()
            assert torch.equal(span.query_start_loc, expected)
        if span.query_len > 4:
            assert span.num_requests * span.query_len <= MAX_CALL_TOKENS


def many_splits(num_seqs: int, num_heads: int, num_sms: int, query_len: int = 1) -> int:
    return MAX_KV_SPLITS


def test_the_profile_run_takes_all_memory(folder, workspace):
    """No step needs more than the profile run took, for any number of splits."""
    config = with_drafts(make_mla_config(folder, turbo_prefill="stored"))
    layer = make_mla_layer(config)
    runner = layer.impl.runner
    runner.kernels = reference.TorchLatentKernels(num_decode_splits=many_splits)
    layer.impl.reserve_workspace()
    lock_workspace()
    longest = runner.max_num_tokens
    for requests in (
        [(3, 40)] * runner.max_num_seqs,
        [(1, 40), *[(MAX_ABSORBED_LEN, 16)] * (runner.max_num_seqs - 1)],
        [(longest, 0)],
        [(1, 16), (longest - 1, 33)],
    ):
        batch = MLABatch.make(layer, requests)
        assert_as_expected(batch, config, None)
