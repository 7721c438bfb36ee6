# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A model's rotation of a bias of K is found, or reported as unknown."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.keys import bias as key_bias
from vllm.v1.attention.ops.turbo.keys.loading import prepare_key_biases
from vllm.v1.attention.ops.turbo.keys.offset import (
    UnknownRotation,
    find_rotary,
    lag_until,
    mean_rotary,
    mean_rotated,
)

from ..backend_utils import make_vllm_config
from ..utils import gaussian
from .test_key_bias import load_biases, make_module

HEAD_SIZE, KV_HEADS = 64, 2
SEGMENT, POSITIONS = 64, 1024
BASE = {"rope_theta": 1e4}
SCALED = BASE | {"factor": 4.0, "original_max_position_embeddings": POSITIONS}
ROPES: dict[str, dict[str, Any]] = {
    "default": BASE,
    "linear": BASE | {"factor": 4.0},
    "llama3": SCALED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": SCALED,
    "dynamic": BASE | {"factor": 4.0},
    "longrope": SCALED
    | {"short_factor": [1.0] * 32, "long_factor": [1.0 + i for i in range(32)]},
}
# Models, with the prefix of their classes. GLM and Cohere rotate neighbours, and GLM
# rotates only half of a head.
MODELS = {"qwen2": "Qwen2", "llama": "Llama", "glm": "Glm", "cohere": "Cohere"}


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "OFFSET_SEGMENT", SEGMENT)


def transformers_model(name: str = "qwen2", rope: str = "default") -> Any:
    """RoPE and an attention module of Transformers' modeling code."""
    folder = f"transformers.models.{name}"
    configuration = importlib.import_module(f"{folder}.configuration_{name}")
    modeling = importlib.import_module(f"{folder}.modeling_{name}")
    config = getattr(configuration, f"{MODELS[name]}Config")(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        num_hidden_layers=1,
        max_position_embeddings=POSITIONS,
        rope_parameters=ROPES[rope] | {"rope_type": rope},
        pad_token_id=0,
    )
    model: Any = nn.Module()
    model.rotary_emb = getattr(modeling, f"{MODELS[name]}RotaryEmbedding")(config)
    model.attention = getattr(modeling, f"{MODELS[name]}Attention")(config, 0)
    model.rotate = modeling.apply_rotary_pos_emb
    return model


def mean_of_transformers(model: Any, bias: torch.Tensor, segment: int) -> torch.Tensor:
    """The mean of a segment's rotated bias, (H, D) fp32, rotated at each position.

    Segment -1 is the first token.
    """
    places = torch.arange(max(segment * SEGMENT, 0), max((segment + 1) * SEGMENT, 1))
    cos, sin = model.rotary_emb(bias, places[None])
    keys = bias[None, :, None].repeat(1, 1, len(places), 1)
    return model.rotate(keys, keys, cos, sin)[1][0].double().mean(1).float()


def table_of(model: Any, bias: torch.Tensor) -> torch.Tensor:
    rotary = find_rotary(model.attention, model)
    assert rotary is model.rotary_emb
    return mean_rotated(bias, mean_rotary(rotary))


@pytest.mark.parametrize(
    "name, rope, count",
    [(name, "default", POSITIONS) for name in MODELS]
    + [("qwen2", "linear", POSITIONS), ("llama", "llama3", 4 * POSITIONS)]
    + [("qwen2", "yarn", 4 * POSITIONS)],
)
def test_rope_of_transformers(short_segments, name, rope, count):
    model = transformers_model(name, rope)
    bias = 30 * gaussian(KV_HEADS, HEAD_SIZE, seed=3).cpu()
    table = table_of(model, bias)
    assert table.shape == (count // SEGMENT + 1, KV_HEADS, HEAD_SIZE)
    for segment in (-1, 0, 1, len(table) - 2):
        expected = mean_of_transformers(model, bias, segment)
        assert (table[segment + 1] - expected).abs().max() < 1e-4 * bias.abs().max()
    assert not torch.allclose(table[1], table[2], atol=1.0)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_follows_a_batch_is_not_known(rope):
    model = transformers_model("qwen2", rope)
    rotary = find_rotary(model.attention, model)
    assert rotary is not None
    with pytest.raises(UnknownRotation, match="Qwen2RotaryEmbedding"):
        mean_rotary(rotary)


def test_rope_of_another_module_is_not_known():
    """RoPE of another module, such as a vision tower, or one of two, is not known."""
    model = transformers_model("qwen2")
    model.attention = transformers_model("llama").attention
    with pytest.raises(UnknownRotation, match="Qwen2RotaryEmbedding"):
        find_rotary(model.attention, model)
    model = transformers_model("qwen2")
    model.other = transformers_model("qwen2").rotary_emb
    with pytest.raises(UnknownRotation):
        find_rotary(model.attention, model)


def test_rope_that_is_called_otherwise_is_not_known(monkeypatch):
    model = transformers_model("qwen2")

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, kind: str):
        raise AssertionError

    monkeypatch.setattr(type(model.rotary_emb), "forward", forward)
    with pytest.raises(UnknownRotation):
        mean_rotary(model.rotary_emb)


def test_layers_without_rope_beside_others(rank_config):
    class Attention(nn.Module):
        """An attention module of one of vLLM's models."""

    rope = get_rope(
        HEAD_SIZE, POSITIONS, rope_parameters=BASE | {"rope_type": "default"}
    )
    with_rope, without = Attention(), Attention()
    with_rope.rotary_emb = rope
    model = nn.ModuleList([with_rope, without])
    assert find_rotary(with_rope, model) is rope
    assert find_rotary(without, model) is None


def test_layers_whose_rotation_is_not_known_have_no_offset(rank_config, log):
    """Such layers are named. Taking off the bias without rotation would be worse."""
    module = make_module(rank_config)
    load_biases(module.qkv_proj)
    model = nn.ModuleList([module, transformers_model("llama").rotary_emb])
    key_bias.set_key_offsets(model)
    assert module.attn.impl.runner.scoring.key_offset is None
    number = module.attn.layer_name.split(".")[2]
    (line,) = log.warnings
    assert f"layers {number}," in line and "LlamaRotaryEmbedding" in line
    assert "--model-impl vllm" in line


def longrope(folder: Path, max_model_len: int) -> Any:
    """LongRoPE of vLLM, which has long factors if sequences may be long."""
    config = make_vllm_config(folder)
    config.model_config.max_model_len = max_model_len
    with set_current_vllm_config(config):
        return get_rope(
            HEAD_SIZE,
            max_position=4 * POSITIONS,
            rope_parameters=ROPES["longrope"] | {"rope_type": "longrope"},
            dtype=torch.float32,
        )


@pytest.mark.parametrize("positions", [POSITIONS, 4 * POSITIONS])
def test_longrope(short_segments, folder, positions, monkeypatch):
    # Made anew, because vLLM's cache does not distinguish lengths of sequences.
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    rope = longrope(folder, positions)
    assert rope.use_long_rope == (positions > POSITIONS)
    parent = nn.ModuleDict({"rotary_emb": rope})
    bias = 30 * gaussian(KV_HEADS, HEAD_SIZE, seed=3).cpu()
    assert find_rotary(parent, parent) is rope
    table = mean_rotated(bias, mean_rotary(rope))
    assert table.shape == (positions // SEGMENT + 1, KV_HEADS, HEAD_SIZE)
    for segment in (0, 1, len(table) - 2):
        places = torch.arange(segment * SEGMENT, (segment + 1) * SEGMENT)
        keys = bias.flatten().repeat(SEGMENT, 1)
        expected = rope(places, keys, keys.clone())[1].double().mean(0).float()
        expected = expected.view_as(bias)
        assert (table[segment + 1] - expected).abs().max() < 1e-4 * bias.abs().max()


def slow_bias(norm: float) -> torch.Tensor:
    """A bias, (1, D), that is constant in the slowest quarter of the pairs."""
    bias = torch.zeros(2, HEAD_SIZE // 2)
    bias[:, -HEAD_SIZE // 8 :] = 1
    return norm * (bias / bias.norm()).view(1, HEAD_SIZE)


def left_of(
    table: torch.Tensor, rotated: Callable[[torch.Tensor], torch.Tensor], place: int
) -> float:
    """The norm of a rotated bias that a table leaves at a place, as kernels read it."""
    row = interface.offset_rows(torch.tensor([place]), table)
    return (rotated(torch.tensor([place])) - table[row]).norm().item()


@pytest.mark.parametrize("place, unrotated", [(8191, 55), (32767, 210), (131071, 530)])
def test_the_rest_of_a_long_bias(place, unrotated):
    """The table leaves less than 10 of a bias as long and slow as Qwen2.5's.

    A layer with more than 40 gets a warning. Taking off the bias without rotation may
    leave more than the whole bias.
    """
    model = transformers_model("qwen2")
    config = model.rotary_emb.config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    config.max_position_embeddings = 131072
    model.rotary_emb = type(model.rotary_emb)(config)
    bias = slow_bias(460)

    def rotated(places: torch.Tensor) -> torch.Tensor:
        cos, sin = model.rotary_emb(bias, places[None])
        return model.rotate(bias[None, :, None], bias[None, :, None], cos, sin)[1]

    assert left_of(table_of(model, bias), rotated, place) < 10
    found = left_of(mean_rotated(bias, None), rotated, place)
    assert found == pytest.approx(unrotated, rel=0.1)


def mrope(positions: int) -> Any:
    """M-RoPE as in Qwen2-VL, for smaller heads."""
    return get_rope(
        HEAD_SIZE,
        positions,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [8, 12, 12],
        },
        dtype=torch.float32,
    )


def test_the_rest_behind_an_image(rank_config):
    """An image of 16384 tokens takes 128 positions, so that later keys' positions lag
    far behind their places.

    A quarter is left of a bias in the slowest quarter of the pairs, and a fortieth of
    one in the slowest pair. Without an image the place's segment leaves little.
    """
    rope = mrope(32768)
    slowest = torch.zeros(1, HEAD_SIZE)
    slowest[:, [HEAD_SIZE // 2 - 1, HEAD_SIZE - 1]] = 0.5**0.5

    def left(bias: torch.Tensor, place: int, position: int) -> float:
        table = mean_rotated(bias, mean_rotary(rope))
        key = bias.flatten()[None].clone()
        rotated = rope.forward_native(torch.tensor([position]), key.clone(), key)[1]
        row = interface.offset_rows(torch.tensor(place), table)
        return (rotated.view_as(bias) - table[row]).norm().item()

    place = 16384 + 1500
    behind = place - 16384 + 128
    assert left(slow_bias(1), place, place) < 0.02
    assert left(slow_bias(1), place, behind) == pytest.approx(0.25, abs=0.02)
    assert left(slowest, place, place) < 0.001
    assert left(slowest, place, behind) == pytest.approx(1 / 40, abs=0.002)


def test_the_lag_that_has_warning(rank_config):
    """Up to this lag at most 40 is left anywhere; beyond it, more is left somewhere."""
    segment = interface.OFFSET_SEGMENT
    table = mean_rotated(slow_bias(460), mean_rotary(mrope(65536)))
    lag = lag_until(table, 40)
    table = table[1:]
    assert lag is not None and lag == 4096
    count = lag // segment
    assert (table[count:] - table[:-count]).norm(dim=-1).max() <= 40
    count += 1
    assert (table[count:] - table[:-count]).norm(dim=-1).max() > 40
    assert lag_until(mean_rotated(slow_bias(20), mean_rotary(mrope(65536))), 40) is None


@pytest.mark.parametrize("max_model_len, has_warning", [(65536, True), (4096, False)])
def test_long_lags_get_a_warning(
    rank_config, log, monkeypatch, max_model_len, has_warning
):
    module = make_module(rank_config)
    module.rotary_emb = mrope(65536)
    monkeypatch.setattr(rank_config.model_config, "max_model_len", max_model_len)
    bias = key_bias.find_key_bias(module.attn, module)
    bias.copy_(slow_bias(460).expand_as(bias))
    prepare_key_biases(nn.ModuleList([module]))
    number = module.attn.layer_name.split(".")[2]
    assert len(log.warnings) == has_warning
    for line in log.warnings:
        assert "images and videos of more than" in line
        assert line.endswith(f"--kv-cache-dtype-skip-layers {number}")
