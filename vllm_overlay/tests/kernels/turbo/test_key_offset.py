# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An offset is taken off K when it is stored, and back into the scores."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.ops.turbo import key_offset
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.kernel_choice import choose_kernels
from vllm.v1.attention.ops.turbo.key_offset import digest, find_rotary, mean_rotated

from .backend_utils import (
    BATCHES,
    HEAD_SIZE,
    KERNELS,
    NUM_KV_HEADS,
    Batch,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    set_path,
    set_scratch,
    with_drafts,
)
from .test_golden import FILE as GOLDEN
from .test_golden import digest as digest_of_bytes
from .test_golden import stored_with_offset
from .utils import BF16, DEVICE, FP16, all_presets, gaussian, requires_triton


def long_offset() -> torch.Tensor:
    """A norm of some 400 a head, in few coordinates, other ones of each head."""
    offset = torch.zeros(NUM_KV_HEADS, HEAD_SIZE)
    for head in range(NUM_KV_HEADS):
        offset[head, 5 + head :: 17] = torch.tensor([200.3, -150.7, 250.1, 199.9])[
            : len(offset[head, 5 + head :: 17])
        ]
    return offset.to(DEVICE)


def batch_with_offset(impl, requests: list[tuple[int, int]]) -> Batch:
    """Whose keys have the layer's offset; of what is cached it was taken off."""
    batch = Batch.make(impl, requests)
    batch.key += impl.runner.key_offset.to(batch.key.dtype)
    return batch


CASES = ["mixed", "prefix hits", "context of several pieces"]


@requires_triton
@prefill_modes
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("path", ["torch", *KERNELS])
def test_batches(tmp_path: Path, case, mode, dtype, path, monkeypatch):
    set_scratch(monkeypatch, piece_tokens=128)
    config = make_vllm_config(tmp_path, "turbo4", dtype, mode)
    impl = make_impl(config)
    impl.runner.key_offset = long_offset()
    set_path(impl, path)
    batch = batch_with_offset(impl, BATCHES[case])
    metadata = make_builder(config, impl).build(0, batch.common)
    batch.check(impl, batch.run(impl, metadata, path))


@requires_triton
@pytest.mark.parametrize("path", ["torch", *KERNELS])
def test_drafts(tmp_path: Path, path):
    """Of mixed lengths, the last with a request that has no cached tokens."""
    config = with_drafts(make_vllm_config(tmp_path, "turbo4", BF16), 2)
    impl = make_impl(config)
    impl.runner.key_offset = long_offset()
    set_path(impl, path)
    batch = batch_with_offset(impl, [(3, 31), (1, 70), (2, 95), (3, 0)])
    metadata = make_builder(config, impl).build(0, batch.common)
    batch.check(impl, batch.run(impl, metadata, path))


@requires_triton
@kernel_paths
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_paths_store_the_same_bytes(tmp_path: Path, dtype, path):
    """Of each preset: see the golden bytes."""
    config = make_vllm_config(tmp_path, "turbo4", dtype)
    impl = make_impl(config)
    impl.runner.key_offset = long_offset()
    set_path(impl, path)
    caches = []
    for each in ("torch", path):
        batch = batch_with_offset(impl, BATCHES["mixed"])
        metadata = make_builder(config, impl).build(0, batch.common)
        batch.run(impl, metadata, each)
        caches.append(batch.cache)
    assert torch.equal(caches[0], caches[1])
    updated = batch_with_offset(impl, BATCHES["mixed"])
    num_tokens = updated.common.num_actual_tokens
    impl.do_kv_cache_update(
        None,
        updated.key,
        updated.value,
        updated.cache,
        updated.common.slot_mapping[:num_tokens],
    )
    assert torch.equal(updated.cache, caches[0])


@requires_triton
@all_presets
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_kernels_write_the_golden_bytes_with_an_offset(name, head_size, path):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    try:
        kernels = choose_kernels(path, layout, 4, has_key_offset=True)
    except ValueError as error:
        pytest.skip(str(error))
    found = stored_with_offset(layout, kernels.store, DEVICE)
    expected = json.loads(GOLDEN.read_text())[f"{name} {head_size}"]
    assert digest_of_bytes(found) == expected["page with K offset"]


BASE = 1e6
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": BASE},
    "partial": {
        "rope_type": "default",
        "rope_theta": BASE,
        "partial_rotary_factor": 0.5,
    },
    "linear": {"rope_type": "linear", "rope_theta": BASE, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": BASE,
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "mrope": {
        "rope_type": "default",
        "rope_theta": BASE,
        "mrope_section": [16, 8, 8],
    },
}


def make_rope(tmp_path: Path, name: str, dtype: torch.dtype = torch.float32):
    with set_current_vllm_config(make_vllm_config(tmp_path)):
        return get_rope(
            HEAD_SIZE,
            max_position=32768,
            is_neox_style=True,
            rope_parameters=ROPES[name],
            dtype=dtype,
        )


def mean_of_keys(rope: nn.Module, bias: torch.Tensor, count: int) -> torch.Tensor:
    """By RoPE itself, a position at a time, in fp32."""
    total = torch.zeros_like(bias, dtype=torch.float64)
    for position in range(0, count):
        key = bias.flatten()[None].clone()
        positions = torch.tensor([position])
        total += rope.forward_native(positions, key.clone(), key)[1].view_as(bias)
    return (total / count).float()


@pytest.mark.parametrize("name", ROPES)
def test_the_offset_is_the_mean_of_the_rotated_bias(tmp_path: Path, name, monkeypatch):
    monkeypatch.setattr(key_offset, "NUM_POSITIONS", 1500)
    bias = 30 * gaussian(NUM_KV_HEADS, HEAD_SIZE, seed=3).cpu()
    found = mean_rotated(bias, make_rope(tmp_path, name))
    expected = mean_of_keys(make_rope(tmp_path, name), bias, 1500)
    assert (found - expected).abs().max() < 1e-4 * bias.abs().max()
    # Fast pairs come round, slow ones hardly move.
    assert not torch.allclose(found, bias, atol=1.0)


@pytest.mark.parametrize("name", ROPES)
def test_the_offset_does_not_depend_on_the_dtype(tmp_path: Path, name):
    bias = gaussian(NUM_KV_HEADS, HEAD_SIZE, seed=3).bfloat16()
    ropes = [make_rope(tmp_path, name, dtype) for dtype in (torch.float32, BF16)]
    tables = [rope.cos_sin_cache.clone() for rope in ropes]
    first, second = (mean_rotated(bias, rope) for rope in ropes)
    assert torch.equal(first, second)
    # Nor have the model's own become others.
    for rope, table in zip(ropes, tables):
        assert rope.cos_sin_cache.dtype == table.dtype
        assert torch.equal(rope.cos_sin_cache, table)


def test_without_a_rotation_the_offset_is_the_bias():
    bias = gaussian(NUM_KV_HEADS, HEAD_SIZE, seed=3).bfloat16()
    assert torch.equal(mean_rotated(bias, None), bias.float().cpu())
    assert find_rotary(nn.Sequential(nn.Linear(2, 2))) is None


@requires_triton
@pytest.mark.parametrize("scale", [0.125, math.pi])
def test_scores_of_the_offset_join_the_lse(scale):
    from vllm.v1.attention.ops.turbo.triton.prefill import add_offset_scores

    query = gaussian(2, 37, 6, HEAD_SIZE, dtype=BF16, seed=1)[1]
    offset = 100 * gaussian(3, HEAD_SIZE, seed=2)
    lse = gaussian(6, 37, seed=3)
    expected = query.double() * offset.double().repeat_interleave(2, 0)
    expected = lse + scale * expected.sum(-1).T
    add_offset_scores(lse, query, offset, scale)
    assert (lse - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_digest_tells_tables_and_layers_apart():
    table = long_offset()
    other = table.clone()
    other[0, 0] += 1e-3
    tables = [[table], [other], [table, None], [None, table], [table, table]]
    assert len({digest(each) for each in tables}) == len(tables)
    assert digest([table]) == digest([table.clone().cpu()])
