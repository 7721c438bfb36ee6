# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab's means of K and V: what they are of, and that taking them off is exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from attention import LabModel
from mean_arms import SERVED, Arm, arms
from means import (
    FIRST_TOKENS,
    build_parser,
    caches_of,
    first_means,
    key_tables,
    layer_cache,
    means_of,
    until,
)
from measure import compare
from rotary import rope, turn
from variants import Variant, identity, preset

HEAD_SIZE = 64
LENGTH = 96
# Nats between two runs in fp32.
ROUNDING = 1e-6
EXACT = [arm for arm in arms(["text"]) if arm.kept_bits == 32]


def small_model(folder: Path, key_scale: float = 1.0) -> LabModel:
    """A Qwen2, whose K has a bias, with seeded weights."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
            layer.self_attn.v_proj.weight.mul_(16)
            layer.self_attn.o_proj.weight.mul_(8)
            layer.self_attn.k_proj.weight.mul_(key_scale)
            layer.self_attn.k_proj.bias.normal_(std=4)
            layer.self_attn.v_proj.bias.normal_(std=4)
        model.lm_head.weight.mul_(16)
    model.save_pretrained(folder)
    return LabModel(folder, "cpu")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> LabModel:
    return small_model(tmp_path_factory.mktemp("model"))


def random_texts(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (1, LENGTH), generator=generator) for _ in range(count)]


def test_means_are_of_projections(tmp_path: Path):
    """K's is taken before RoPE, and no mean counts the first tokens of a text."""
    lab, texts = small_model(tmp_path), random_texts(2)
    seen: list[list[torch.Tensor]] = [[], []]
    for index, layer in enumerate(lab.model.model.layers):
        for side in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            side.register_forward_hook(
                lambda module, given, output, index=index: seen[index].append(output[0])
            )
    found = means_of(lab, texts, first=5)
    for index in range(2):
        # Passes of other tokens follow.
        whole = seen[index][: 2 * len(texts)]
        keys, values = whole[::2], whole[1::2]
        for own, wanted in ((found.key, keys), (found.value, values)):
            mean = torch.cat([x[5:] for x in wanted]).mean(0, keepdim=True)
            assert torch.allclose(own[index], mean, atol=1e-4)
    assert not torch.allclose(found.key[0], found.turned[0], atol=1e-2)


@pytest.mark.parametrize("arm", EXACT, ids=lambda arm: arm.name)
def test_what_is_taken_off_is_added_again(lab: LabModel, arm: Arm):
    """A cache that rounds nothing changes no prediction, whatever is taken off."""
    texts = random_texts(1)
    means = {"text": means_of(lab, texts)}
    own = Variant("exact", identity, identity, 0, subtracts_mean=True)
    caches = caches_of(lab, own, [arm], means, LENGTH)
    figures = compare(lab, texts, caches, slice(0, LENGTH - 1))
    assert max(x["kl"] for x in figures.values()) < ROUNDING


def test_keys_that_are_their_mean_lose_nothing(tmp_path: Path):
    """K without a part of its own is its bias, and the exact table takes all of it."""
    lab, texts = small_model(tmp_path, key_scale=0), random_texts(2)
    means = {"text": means_of(lab, texts[1:])}
    rounds = preset("turbo4", HEAD_SIZE, subtracts_mean=True)
    own = replace(rounds, value=identity)
    chosen = [Arm(), Arm("exact", first=0)]
    caches = caches_of(lab, own, chosen, means, LENGTH)
    figures = compare(lab, texts[:1], caches, slice(0, LENGTH - 1))
    without, exact = (figures[arm.name, 1]["kl"] for arm in chosen)
    assert exact < ROUNDING < 1e-3 < without


def test_tables_leave_the_first_tokens_alone(lab: LabModel):
    means = means_of(lab, random_texts(1))
    cos, sin = rope(lab, LENGTH)
    today = key_tables(Arm(), means, cos, sin)
    for kind in ("exact", "constant", "32"):
        for table, bias in zip(key_tables(Arm(kind, first=7), means, cos, sin), today):
            assert torch.equal(table[:, :7], bias[:, :7]) and bias.any()
            assert (table[:, 7:] != bias[:, 7:]).any(-1).all()
    (table, _) = key_tables(Arm("32", first=0), means, cos, sin)
    exact = turn(means.key[0][:, None], cos, sin)
    assert torch.allclose(table[:, 32:64], exact[:, 32:64].mean(1, keepdim=True))
    value = torch.randn(1, LENGTH, HEAD_SIZE)
    stored = []
    own = Variant("seen", identity, lambda x: stored.append(x) or x, 0)
    arm = Arm(value=True, first_value=7)
    layer_cache(own, arm, means.value[0], means.first_value[0]).value(value)
    assert torch.equal(stored[0][:, :7], value[:, :7])
    assert torch.allclose(stored[0][:, 7:], value[:, 7:] - means.value[0])


def test_a_share_of_the_mean_is_beside_the_bias(lab: LabModel):
    means = means_of(lab, random_texts(1))
    cos, sin = rope(lab, LENGTH)
    bias, half, whole = (
        key_tables(replace(SERVED, key="32", share=x), means, cos, sin)
        for x in (0, 0.5, 1)
    )
    unmoved = key_tables(Arm(), means, cos, sin)
    for i, table in enumerate(half):
        assert torch.equal(bias[i][:, 1:], unmoved[i][:, 1:])
        assert torch.allclose(2 * table[:, 1:], (bias[i] + whole[i])[:, 1:], atol=1e-6)
        assert torch.equal(table[:, 0], means.first_key[i])
    assert replace(SERVED, share=0.5).name != SERVED.name


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("bits, error", [(32, 1e-6), (8, 0.01)])
def test_tokens_that_are_kept_apart(
    lab: LabModel, bits: int, error: float, value: bool
):
    """Their rounding is that of the form, and others' that of turbo4."""
    texts = random_texts(1)
    own = preset("turbo4", HEAD_SIZE, subtracts_mean=True)
    means = {"text": means_of(lab, texts)}
    arm = Arm("exact", value=value, kept=9, kept_bits=bits)
    (cache, _) = caches_of(lab, own, [arm], means, LENGTH).values()
    key = torch.randn(1, 1, LENGTH, HEAD_SIZE)
    for given, found in zip(
        (key, 2 * key), cache.layers[0].round_trip(key, 2 * key, cache.means[0])
    ):
        relative = (found - given).norm(dim=-1) / given.norm(dim=-1)
        assert relative[..., :9].max() < error
        assert relative[..., 9:].min() > 0.02


def test_first_token_that_is_its_own_mean_loses_nothing(lab: LabModel):
    """Other tokens lose what they did, and so does a side without such a mean."""
    own = preset("turbo4", HEAD_SIZE, subtracts_mean=True)
    means = means_of(lab, random_texts(1))
    for sides in ("K", "V", "KV"):
        arm = Arm("exact", first=1, own_first=sides)
        (cache, _) = caches_of(lab, own, [arm], {"text": means}, LENGTH).values()
        key, value = torch.randn(2, 1, 1, LENGTH, HEAD_SIZE)
        key[0, :, 0], value[0, :, 0] = means.first_key[0], means.first_value[0]
        found = cache.layers[0].round_trip(key, value, cache.means[0])
        for side, given, read in zip("KV", (key, value), found):
            relative = (read - given).norm(dim=-1) / given.norm(dim=-1)
            assert (relative[..., 0].max() < 1e-6) == (side in sides)
            assert relative[..., 1:].min() > 0.02


def test_means_of_first_tokens(lab: LabModel):
    """They are of sequences of one token, and so of position 0."""
    keys, values = first_means(lab)
    seen: list[torch.Tensor] = []
    layer = lab.model.model.layers[0]
    hook = layer.self_attn.v_proj.register_forward_hook(
        lambda module, given, output: seen.append(output)
    )
    first_means(lab)
    hook.remove()
    assert seen[0].shape[:2] == (FIRST_TOKENS, 1)
    assert torch.allclose(values[0], seen[0].mean((0, 1))[None], atol=1e-5)
    assert len(keys) == len(values) == lab.num_layers


def test_texts_end_with_the_time(capsys: pytest.CaptureFixture):
    texts = random_texts(3)
    assert len(list(until(texts, float("inf")))) == 3
    assert len(list(until(texts, 0.0))) == 1
    assert "stopped after 1 of 3 texts" in capsys.readouterr().out


def test_parts_of_heads_are_refused(tmp_path: Path):
    lab = small_model(tmp_path)
    lab.head_size = 128
    with pytest.raises(ValueError, match="a part of a head"):
        rope(lab, 4)
    with pytest.raises(ValueError, match="no tokens behind the first 96"):
        means_of(small_model(tmp_path), random_texts(1), first=96)


@pytest.mark.parametrize("text", ["code", "=file", "code=missing"])
def test_files_of_other_means_have_names(text: str):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--output", "x", "--calibrate", text])


def test_arms_have_names_of_their_own():
    names = [arm.name for arm in arms(["text", "64 random tokens, seed 0"])]
    assert len(names) == len(set(names))
