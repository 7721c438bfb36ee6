# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hooks of vLLM for MLA implementations, and for the bytes of backends' pages."""

from pathlib import Path

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

from ..mla.mla_utils import (
    NOPE,
    NUM_HEADS,
    V_SIZE,
    MLABatch,
    make_mla_config,
    make_mla_layer,
)
from ..utils import DEVICE, ON_GPU, gaussian

pytestmark = pytest.mark.skipif(ON_GPU, reason="fp32 layers are for CPUs")
RANK = 512
REQUESTS = [(5, 40), (3, 0), (4, 17)]


class OwnImpl(CPUMLAImpl):
    """An implementation that stores half of each vector, with latents negated."""

    gathers_context = True

    def transform_absorbed_weights(
        self, W_UK: torch.Tensor, W_UV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return -W_UK, -W_UV

    def gather_context(
        self,
        kv_cache: torch.Tensor,
        workspace: torch.Tensor,
        block_table: torch.Tensor,
        chunk: MLACommonPrefillMetadata.ContextChunk,
    ) -> None:
        for row in range(chunk.num_requests):
            begin, end = chunk.cu_seq_lens[row : row + 2].tolist()
            positions = torch.arange(begin, end) - begin + chunk.starts[row]
            blocks = block_table[row, positions // kv_cache.shape[1]].long()
            rows = kv_cache[blocks, positions % kv_cache.shape[1]]
            workspace[begin:end] = 2 * rows
            workspace[begin:end, :RANK] *= -1


class OwnBackend(CPUMLABackend):
    @staticmethod
    def get_impl_cls() -> type[OwnImpl]:
        return OwnImpl


@pytest.fixture
def config(rank_config: VllmConfig, folder: Path) -> VllmConfig:
    return make_mla_config(folder, "auto")


def test_contexts_are_gathered_by_the_implementation(config):
    layer = make_mla_layer(config, attn_backend=OwnBackend)
    batch = MLABatch.of_vectors(layer, REQUESTS, RANK, 64)
    size = RANK + 64
    cache = torch.full((*batch.cache.shape[:2], size), torch.nan)
    for row, (_, context) in enumerate(REQUESTS):
        latent, rope = batch.latents[row]
        slots = batch.slots[row][:context]
        rows = torch.cat([-latent[:context], rope[:context]], -1) / 2
        cache.view(-1, size)[slots] = rows
    batch.cache = cache
    with set_current_vllm_config(config):
        spec = layer.get_kv_cache_spec(config)
        builder = MLACommonMetadataBuilder(spec, [layer.layer_name], config, DEVICE)
    output = batch.run(config, builder.build(0, batch.common))
    expected = batch.attend(batch.latents)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


def test_absorbed_weights_are_transformed(config):
    own = make_mla_layer(config, attn_backend=OwnBackend)
    plain = make_mla_layer(config, attn_backend=CPUMLABackend)
    weight = plain.kv_b_proj.weight.view(NUM_HEADS, NOPE + V_SIZE, RANK)
    assert torch.equal(plain.W_UK_T, weight[:, :NOPE])
    assert torch.equal(own.W_UK_T, -plain.W_UK_T)
    assert torch.equal(own.W_UV, -plain.W_UV)
    # Weights that are loaded again are transformed once.
    values = gaussian(*own.kv_b_proj.weight.shape, seed=9)
    own.kv_b_proj.weight.data.copy_(values)
    own.process_weights_after_loading(values.dtype)
    expected = values.view(NUM_HEADS, NOPE + V_SIZE, RANK)[:, :NOPE]
    assert torch.equal(own.W_UK_T, -expected)


@pytest.mark.parametrize(
    "cache_dtype, num_bytes", [("fp8", 576), ("int8_per_token_head", 576 + 8)]
)
def test_blocks_of_hybrids_follow_the_bytes_that_are_stored(
    config, tmp_path, monkeypatch, cache_dtype, num_bytes
):
    """A block has just as many tokens as it takes to cover a state."""
    # On a CPU vLLM disables prefix caching, which the states are set up for.
    update = classmethod(lambda cls, config: None)
    monkeypatch.setattr(type(current_platform), "check_and_update_config", update)
    hybrid = make_mla_config(
        tmp_path,
        cache_dtype,
        architectures=["BailingMoeV2_5ForCausalLM"],
        num_attention_heads=68,
        hidden_size=68 * 64,
    )
    hybrid.cache_config.block_size = 128
    # With a byte an element and with these dtypes, blocks have different lengths.
    state = 68 * 64 * 64 * 4
    with set_current_vllm_config(hybrid):
        make_mla_layer(hybrid, attn_backend=CPUMLABackend)
        Platform._align_hybrid_block_size(hybrid, TritonMLABackend)
    size = hybrid.cache_config.block_size
    assert size * num_bytes >= state > (size - 128) * num_bytes
