# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The means of K: a pass attends as the model does, keys are turned back by any RoPE,
and each rank's layers get the offsets that follow.
"""

from contextlib import ExitStack, nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.interface import offset_rows
from vllm.v1.attention.ops.turbo.keys import bias as key_bias
from vllm.v1.attention.ops.turbo.keys import means as key_means
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.keys.means import LayerMeans, first_tokens
from vllm.v1.attention.ops.turbo.keys.offset import (
    UnknownRotation,
    find_rotary,
    inverse_rotary,
    mean_rotary,
    mean_rotated,
    rotate_rows,
)
from vllm.v1.attention.ops.turbo.keys.run_pass import make_pass as make_model_pass
from vllm.v1.attention.ops.turbo.keys.run_pass import run_stage
from vllm.v1.attention.ops.turbo.keys.text_pass import PassError, TextPass
from vllm.v1.attention.ops.turbo.serving import means_tables

from ..utils import DEVICE, gaussian
from .test_key_bias import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    SelfAttention,
    found_bias,
    load_biases,
    make_module,
    make_rotary,
    set_rank,
)
from .test_key_rotation import MODELS, POSITIONS, ROPES, transformers_model

NUM_TEXT, NUM_FIRST = 40, 3
MAX_MODEL_LEN = 1100
NUM_TOKENS = NUM_TEXT + NUM_FIRST


@pytest.fixture
def config(rank_config: VllmConfig) -> VllmConfig:
    """The configuration of an engine that can have means."""
    rank_config.load_config.load_format = "auto"
    rank_config.model_config.skip_tokenizer_init = False
    assert refusals.means_problem(rank_config) is None
    return rank_config


def keys_of(num_tokens: int = NUM_TEXT, num_heads: int = 2, seed: int = 0):
    return gaussian(num_tokens, num_heads, HEAD_SIZE, seed=seed).float().cpu()


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn", "dynamic"])
def test_turning_back(config, name, is_neox):
    """Also where RoPE scales, or turns a part of a head."""
    parameters = ROPES[name] | {"rope_type": name, "partial_rotary_factor": 0.5}
    rotary: Any = get_rope(
        HEAD_SIZE,
        POSITIONS,
        is_neox_style=is_neox,
        rope_parameters=parameters,
        dtype=torch.float32,
    ).cpu()
    keys = keys_of()
    places = torch.arange(NUM_TEXT)
    _, turned = rotary.forward_native(places, keys.flatten(1), keys.flatten(1).clone())
    turned = turned.view_as(keys)
    assert not torch.allclose(turned, keys, atol=0.1)
    found = rotate_rows(turned, inverse_rotary(rotary, NUM_TEXT))
    torch.testing.assert_close(found, keys, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_turning_back_in_transformers(name, rope):
    model = transformers_model(name, rope)
    keys = keys_of()
    cos, sin = model.rotary_emb(keys, torch.arange(NUM_TEXT)[None])
    heads = keys.transpose(0, 1)[None]
    turned = model.rotate(heads, heads, cos, sin)[1][0].transpose(0, 1)
    rotary = find_rotary(model.attention, model)
    found = rotate_rows(turned, inverse_rotary(rotary, NUM_TEXT))
    torch.testing.assert_close(found, keys, atol=1e-4, rtol=0)


def test_rope_of_fewer_positions_is_not_known(config):
    rotary = make_rotary(config)
    with pytest.raises(UnknownRotation, match="RotaryEmbedding"):
        inverse_rotary(rotary, 4097)


def make_pass(*modules: SelfAttention, rotary: Any = None) -> tuple[TextPass, dict]:
    layers = {module.attn.layer_name: module.attn for module in modules}
    return TextPass(dict.fromkeys(layers, rotary), NUM_TEXT, NUM_TOKENS), layers


def run(
    text_pass: TextPass, layers: dict, tensors: list[torch.Tensor], step: int
) -> torch.Tensor:
    """The output of the last layer, if all layers have the same Q, K and V."""
    outputs = []
    with text_pass.running(layers.values()):
        for start in range(0, NUM_TOKENS, step):
            text_pass.begin(start)
            query, key, value = (x[start : start + step] for x in tensors)
            for layer in layers.values():
                output = torch.empty_like(query)
                layer.impl.forward(layer, query, key, value, None, None, output)
            outputs.append(output)
    return torch.cat(outputs)


def tensors_of(seed: int = 1) -> list[torch.Tensor]:
    """Q, K and V of a text and of sequences of one token, fp32."""
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    return [keys_of(NUM_TOKENS, heads, seed + heads) for heads in shapes]


def expected_outputs(tensors: list[torch.Tensor], scoring: Any) -> torch.Tensor:
    """Attention by query token and head, in the plainest way."""
    query, key, value = (x.double() for x in tensors)
    outputs = torch.empty_like(query)
    for token in range(NUM_TOKENS):
        first = 0 if token < NUM_TEXT else token
        if scoring.sliding_window is not None:
            first = max(first, token - scoring.sliding_window + 1)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            seen = slice(first, token + 1)
            scores = scoring.scale * key[seen, kv_head] @ query[token, head]
            weights = scores.exp()
            total = weights.sum()
            if scoring.sinks is not None:
                total = total + scoring.sinks[head].double().exp()
            outputs[token, head] = weights / total @ value[seen, kv_head]
    return outputs.float()


@pytest.mark.parametrize("step", [NUM_TOKENS, 16])
@pytest.mark.parametrize("feature", ["plain", "window", "sinks"])
def test_a_pass_attends_as_the_model_does(config, feature, step):
    module = make_module(config)
    runner = module.attn.impl.runner
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"sliding_window": 7},
        "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    }
    runner.scoring = runner.scoring._replace(**changes[feature])
    tensors = tensors_of()
    text_pass, layers = make_pass(module)
    found = run(text_pass, layers, tensors, step)
    torch.testing.assert_close(found, expected_outputs(tensors, runner.scoring))
    assert "forward" not in vars(module.attn.impl)


@pytest.mark.parametrize("step", [NUM_TOKENS, 16])
def test_means_are_of_keys_that_are_turned_back(config, step):
    module = make_module(config)
    rotary: Any = make_rotary(config).cpu()
    tensors = tensors_of()
    text_pass, layers = make_pass(module, rotary=inverse_rotary(rotary, NUM_TEXT))
    key = tensors[1]
    plain = key.clone()
    places = torch.arange(NUM_TEXT)
    flat = key[:NUM_TEXT].flatten(1)
    _, turned = rotary.forward_native(places, flat.clone(), flat.clone())
    key[:NUM_TEXT] = turned.view(NUM_TEXT, KV_HEADS, HEAD_SIZE)
    run(text_pass, layers, tensors, step)
    (means,) = text_pass.means.values()
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(means.rest, plain[1:NUM_TEXT].mean(0), **close)
    torch.testing.assert_close(means.first, plain[NUM_TEXT:].mean(0), **close)
    lengths = key[1:NUM_TEXT].square().sum(-1).mean(0).sqrt()
    torch.testing.assert_close(means.length, lengths, **close)
    # Rows are the first token's, and those of segments without it.
    table = means.table(mean_rotary(rotary))
    assert torch.equal(table[0], means.first)
    assert torch.equal(table[1:], mean_rotated(means.rest, mean_rotary(rotary))[1:])


def test_without_rope_the_first_token_has_its_own_row():
    means = means_of(2)
    table = means.table(None)
    assert torch.equal(table, torch.stack([means.first, means.rest]))
    assert offset_rows(torch.tensor([0, 1, 9000]), table).tolist() == [0, 1, 1]


def test_layers_that_read_another_cache(config):
    """They have no keys of their own, and attend to the other's."""
    target, reader = make_module(config), make_module(config)
    reader.attn.kv_sharing_target_layer_name = target.attn.layer_name
    tensors = tensors_of()
    text_pass, layers = make_pass(target, reader)
    outputs = []
    with text_pass.running(layers.values()):
        for own, layer in zip((tensors, tensors_of(5)), layers.values()):
            outputs.append(torch.empty_like(own[0]))
            pair = own[1:] if not outputs[1:] else (None, None)
            layer.impl.forward(layer, tensors[0], *pair, None, None, outputs[-1])
    assert torch.equal(*outputs)
    assert list(text_pass.means) == [target.attn.layer_name]


def test_layers_that_cannot_attend_end_a_pass(config):
    module = make_module(config)
    text_pass, layers = make_pass(module)
    query, key, value = tensors_of()
    layer = module.attn
    with pytest.raises(PassError, match="no keys"), text_pass.running([layer]):
        layer.impl.forward(layer, query, None, None, None, None, query.clone())
    runner = layer.impl.runner
    runner.scoring = runner.scoring._replace(soft_cap=0.7)
    with pytest.raises(PassError, match="soft cap"), text_pass.running([layer]):
        layer.impl.forward(layer, query, key, value, None, None, query.clone())
    assert "forward" not in vars(layer.impl)


def pass_of(model: nn.Module, config: VllmConfig, stack: ExitStack) -> TextPass:
    """A pass of a model's layers."""
    runner = SimpleNamespace(get_model=lambda: model, device=DEVICE)
    text_pass, states = make_model_pass(runner, config, NUM_TEXT, NUM_TOKENS, stack)
    assert states is None
    return text_pass


def test_layers_of_other_classes_end_a_pass(config):
    class State(nn.Module, AttentionLayerBase):
        def get_attn_backend(self): ...

        def get_kv_cache_spec(self, vllm_config): ...

    with ExitStack() as stack, pytest.raises(PassError, match="layers of State"):
        pass_of(nn.Sequential(State()), config, stack)


def test_functions_are_not_compiled_in_a_pass(config):
    """Inductor would take seconds, and compile them again for the last slice."""
    found = []

    def backend(module: Any, inputs: Any) -> Any:
        found.append(inputs)
        return module.forward

    compiled = torch.compile(torch.cos, backend=backend)
    with ExitStack() as stack:
        pass_of(nn.Identity(), config, stack)
        assert compiled(torch.zeros(3)).tolist() == [1] * 3
    assert not found
    compiled(torch.zeros(3))
    assert found


class Stage:
    """A pipeline stage, which reads from the one before and writes for the next."""

    def __init__(self, before: Queue | None, after: Queue | None) -> None:
        self.before, self.after = before, after
        self.is_first_rank, self.is_last_rank = before is None, after is None

    def recv_tensor_dict(self) -> dict[str, torch.Tensor]:
        return self.before.get_nowait()

    def send_tensor_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        self.after.put(tensors)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("slice_", [0, 1, 4])
def test_a_failing_stage_lets_no_other_wait(failing, slice_):
    """Each receives and sends as often as when none fails, and later ones fail too."""
    queues = [Queue(), Queue()]
    stages = [Stage(x, y) for x, y in zip([None, *queues], [*queues, None])]
    for number, stage in enumerate(stages):
        ran = []

        def run(start, received, number=number, ran=ran):
            if (number, start) == (failing, slice_):
                raise ValueError("out of memory")
            assert (received is None) == (number == 0)
            ran.append(start)
            return IntermediateTensors({"hidden_states": torch.zeros(2)})

        errors: Any = (ValueError, PassError)[number > failing]
        with pytest.raises(errors) if number >= failing else nullcontext():
            run_stage(run, range(5), stage)
        assert ran == list(range(5 if number < failing else slice_))
    assert all(queue.empty() for queue in queues)


@pytest.mark.parametrize("vocab_size", [10, 64, 300, 128256])
def test_first_tokens_differ(vocab_size):
    tokens = first_tokens(vocab_size)
    assert len(set(tokens)) == len(tokens) == min(vocab_size, key_means.FIRST_TOKENS)
    assert min(tokens) >= 0 and vocab_size * 0.9 <= max(tokens) < vocab_size


def means_of(num_heads: int = KV_HEADS, seed: int = 3) -> LayerMeans:
    vectors = gaussian(3, num_heads, HEAD_SIZE, seed=seed).float().cpu()
    first, rest, direction = vectors
    direction = torch.nn.functional.normalize(direction, dim=-1)
    return LayerMeans(first, rest, 2 * rest.norm(dim=-1), direction)


def test_the_share_of_a_mean():
    assert means_of().share == pytest.approx(0.5)
    assert means_of().is_usable
    assert not means_of()._replace(first=torch.full((1,), torch.inf)).is_usable
    assert not means_of()._replace(length=torch.zeros(KV_HEADS)).is_usable


def set_tables(*modules: SelfAttention, means: key_means.Means | None = None):
    if means is None:
        means = {module.attn.layer_name: means_of() for module in modules}
    return means_tables.set_tables(nn.ModuleList(modules), means, MAX_MODEL_LEN)


def table(module: SelfAttention) -> torch.Tensor | None:
    return module.attn.impl.runner.scoring.key_offset


def test_layers_get_the_tables(config):
    """A layer without RoPE has two rows, and one with a bias gets the mean instead."""
    plain, rotated, biased = (make_module(config) for _ in range(3))
    for module in (rotated, biased):
        module.rotary_emb = make_rotary(config)
    for module in (plain, rotated):
        found_bias(module).zero_()
    load_biases(biased.qkv_proj)
    key_bias.set_key_offsets(nn.ModuleList([plain, rotated, biased]))
    assert table(plain) is None and table(biased) is not None
    used, without = set_tables(plain, rotated, biased)
    assert list(used.values()) == pytest.approx([0.5] * 3) and not without
    assert torch.equal(table(plain).cpu(), means_of().table(None))
    expected = means_of().table(mean_rotary(rotated.rotary_emb))
    for module in (rotated, biased):
        assert torch.equal(table(module).cpu(), expected)
        # Engines that sleep keep a buffer.
        assert getattr(module.attn, key_offset.BUFFER) is table(module)


def test_another_bias_moves_the_means(config):
    """The part of the mean that the bias is not stays."""
    module = make_module(config)
    module.rotary_emb = make_rotary(config)
    old = load_biases(module.qkv_proj)
    key_bias.set_key_offsets(module_list := nn.ModuleList([module]))
    found = {module.attn.layer_name: means_of()}
    means_tables.set_tables(module_list, found, MAX_MODEL_LEN)
    before = table(module).clone()
    bias = module.attn.impl.runner.key_bias
    bias.set_offset(3 * old)
    moved = mean_rotated(2 * old, mean_rotary(module.rotary_emb))
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close((table(module) - before).cpu(), moved, **close)
    bias.set_offset(old)
    torch.testing.assert_close(table(module), before, **close)


def test_layers_without_means(config):
    capped, target, unknown, unseen, misfit, fine = (
        make_module(config) for _ in range(6)
    )
    reader = make_module(config)
    reader.attn.kv_sharing_target_layer_name = target.attn.layer_name
    for module in (capped, reader):
        runner = module.attn.impl.runner
        runner.scoring = runner.scoring._replace(soft_cap=50.0)
        runner.means_problem = refusals.SOFT_CAP
    unknown.rotary_emb = nn.Module()
    type_of_rope = type("OddRotaryEmbedding", (nn.Module,), {})
    unknown.rotary_emb = type_of_rope()
    modules = [capped, target, reader, unseen, misfit, fine]
    means = {module.attn.layer_name: means_of() for module in modules}
    del means[unseen.attn.layer_name]
    means[misfit.attn.layer_name] = means_of(KV_HEADS + 1)
    used, without = set_tables(*modules, means=means)
    assert list(used) == [fine.attn.layer_name]
    assert without == {
        capped.attn.layer_name: refusals.SOFT_CAP,
        target.attn.layer_name: refusals.SOFT_CAP,
        unseen.attn.layer_name: means_tables.NOT_RUN,
        misfit.attn.layer_name: means_tables.NOT_RUN,
    }
    assert [table(module) is None for module in modules] == [True] * 5 + [False]
    used, without = set_tables(unknown)
    assert without == {unknown.attn.layer_name: means_tables.UNKNOWN_ROPE}


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_have_their_heads(config, monkeypatch, num_ranks):
    """Ranks divide the heads of the means, or replicate them."""

    class Group:
        world_size = num_ranks
        rank_in_group = 0

    found = []
    for rank in range(num_ranks):
        with monkeypatch.context() as patch:
            set_rank(patch, rank, num_ranks)
            patch.setattr(Group, "rank_in_group", rank)
            patch.setattr(means_tables, "get_tp_group", lambda: Group)
            module = make_module(config)
            used, without = set_tables(module)
            assert len(used) == 1 and not without
            found.append(table(module).cpu())
            replicas = module.attn.impl.runner.key_offset_replicas
            assert replicas == max(num_ranks // KV_HEADS, 1)
    expected = means_of().table(None).repeat_interleave(replicas, 1)
    assert torch.equal(torch.cat(found, 1), expected)


def test_kernels_are_built_for_the_means(config):
    """Builds begin before there are means; kernels are chosen when there are."""
    runner = make_module(config).attn.impl.runner
    runner.means_problem = None
    assert runner.expected_source.variant.key_offset
    assert not runner.source.variant.key_offset
    runner.means_problem = refusals.SOFT_CAP
    assert runner.expected_source == runner.source
