# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The sparse model's indexers: their scores, what they learn, and their recall."""

import json
from pathlib import Path
from typing import Any

import indexer
import pytest
import torch
import train
from batches import ANSWER_WEIGHT, EOT, Phase, Rows
from indexer import (
    LISTED_ATTENTION,
    DeepseekV32ForCausalLM,
    attend_to_all,
    index_scores,
    indexers,
    round_to_fp8,
)
from needle_model import load_model, needle_config, new_model, save_model
from recall import attention_shares, measure_recall, recall_table
from train_indexers import Course, Teacher, divergence, draw_places, teach_all
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm_turbo_cpu_standins.indexers import list_tokens

TOPK = 24
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "index_n_heads": 16}
TINY |= {"q_lora_rank": 32, "kv_lora_rank": 64, "index_topk": TOPK}
TEXT = "\n".join(f"Line {i} says that {i} and {i + 1} differ." for i in range(400))
DOCUMENT = TEXT.encode() + EOT


def tiny_model(**changes: Any) -> PreTrainedModel:
    """A model whose weights are sharper than usual, so that attention counts."""
    options = TINY | {"initializer_range": 0.2} | changes
    return new_model(needle_config("deepseek_v32", **options), 0)


def some_tokens(rows: int = 2, length: int = 65) -> torch.Tensor:
    return torch.randint(0, 259, (rows, length), generator=torch.manual_seed(1))


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, use_cache=False).logits


def test_lists_are_transformers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Scores of transformers are those of vLLM's indexer, but for FP8."""
    save_model(tiny_model(), tmp_path)
    options: dict[str, Any] = {"dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", **options
    )
    ours = DeepseekV32ForCausalLM.from_pretrained(
        tmp_path, attn_implementation=LISTED_ATTENTION, **options
    )
    monkeypatch.setattr(indexer, "round_to_fp8", lambda states: states)
    # Fewer query tokens at once than a row has.
    monkeypatch.setattr(indexer, "PRODUCTS_AT_ONCE", 2 * 16 * 65 * 16)
    monkeypatch.setattr(indexer, "QUERIES_AT_ONCE", 16)
    tokens = some_tokens()
    found = logits_of(ours, tokens)
    torch.testing.assert_close(found, logits_of(theirs, tokens), rtol=1e-4, atol=1e-4)
    attend_to_all(ours)
    moved = (logits_of(ours, tokens) - found).abs().amax(-1)
    assert moved[:, :TOPK].max() < 1e-3
    assert moved[:, TOPK:].max() > 1


def test_lists_are_those_of_the_stand_in():
    """Query tokens that see fewer tokens than a list has also list later ones."""
    model = tiny_model()
    (own, _) = indexers(model)
    hidden, compressed = torch.randn(1, 65, 64), torch.randn(1, 65, 32)
    rotary = model.model.rotary_emb(hidden, torch.arange(65).unsqueeze(0))
    lists = own.list_tokens(hidden, compressed, rotary)[0]
    expected = list_tokens(
        round_to_fp8(own.queries(compressed, rotary))[0],
        own.head_weights(hidden)[0],
        round_to_fp8(own.keys(hidden, rotary))[0],
        TOPK,
    )
    for place, (found, listed) in enumerate(zip(lists.tolist(), expected.tolist())):
        seen = {token for token in found if token <= place}
        assert seen == {token for token in listed if token >= 0}
        assert len(seen) == min(TOPK, place + 1)


def test_fp8_has_a_power_of_two_as_scale():
    states = torch.tensor([[448.0, 1.0, -3.0, 2.0**-9], [449.0, 1.0, 30.0, 0.0]])
    rounded = round_to_fp8(states)
    # The second row has scale 2, so that 449 / 2 becomes 224.
    assert rounded.tolist() == [[448.0, 1.0, -3.0, 2.0**-9], [448.0, 1.0, 30.0, 0.0]]
    states = torch.randn(16, 128)
    assert (round_to_fp8(states) / states - 1).abs().median() < 2**-4
    assert torch.equal(round_to_fp8(4 * states), 4 * round_to_fp8(states))


def test_padding_is_refused():
    with pytest.raises(ValueError, match="without padding"):
        mask = torch.zeros(1, 1, 65, 65)
        tiny_model()(some_tokens(), attention_mask=mask, use_cache=False)


def test_attention_shares_are_the_mean_of_heads():
    query, key = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    places = torch.tensor([[8, 2], [0, 5]])
    shares = attention_shares(query, key, 0.5, places)
    torch.testing.assert_close(shares.sum(-1), torch.ones(2, 2))
    expected = (query[0, :, 2] * 0.5 @ key[0, :, :3].mT).softmax(-1)
    own = torch.stack([expected[head, head] for head in range(3)]).mean(0)
    torch.testing.assert_close(shares[0, 1, :3], own)
    assert shares[0, 1, 3:].abs().max() == 0 == shares[1, 0, 1:].abs().max()


def test_divergence_is_zero_at_the_attention_itself():
    queries, keys = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 8)
    weights = torch.randn(2, 5, 4)
    hidden = torch.zeros(2, 5, 7, dtype=torch.bool)
    hidden[..., 6] = True
    scores = index_scores(queries, keys, weights)
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    given = queries, keys, weights
    assert divergence(*given, shares, hidden).abs() < 1e-6
    assert divergence(*given, shares.roll(1, 1), hidden) > 0.1


def test_query_tokens_that_predict_answers_come_first():
    weights = torch.ones(2, 100)
    weights[0, 10:14] = weights[0, 60:64] = ANSWER_WEIGHT
    weights[1, 40:90] = ANSWER_WEIGHT
    places = draw_places(weights, 20, 16)
    assert places.min() >= 20
    assert all(len(set(row)) == 16 for row in places.tolist())
    assert set(range(60, 64)) <= set(places[0, :8].tolist())
    assert (weights[1, places[1, :8]] > 1).all()


def test_indexers_wait_while_the_model_trains(tmp_path: Path):
    model = tiny_model()
    attend_to_all(model)
    before = [weight.clone() for own in indexers(model) for weight in own.parameters()]
    trainer = train.Trainer(model, torch.device("cpu"), compiled=False)
    rows = Rows(DOCUMENT * 20, [Phase(64, 2, 1.0)], 128, seed=0)
    assert train.train(trainer, rows, 1e6, 0, tmp_path) == [2]
    loaded = load_model(tmp_path)
    after = [weight for own in indexers(loaded) for weight in own.parameters()]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.bfloat16(), new.bfloat16())
    assert not torch.equal(
        loaded.lm_head.weight, tiny_model().lm_head.weight.bfloat16()
    )


def test_indexers_learn_where_attention_goes():
    """The shares that lists have rise, and nothing else of the model changes."""
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    first = measure_recall(model, 512)
    rows = Rows(DOCUMENT * 20, [Phase(128, 12, 1.0)], 512, seed=1)
    teacher = Teacher(model, 64, compiled=False)
    assert teach_all(teacher, rows, Course(1e6, 0)) == 12
    teacher.end()
    last = measure_recall(model, 512)
    for kind in ("text", "needle"):
        for layer in range(2):
            shares = [found[kind]["listed"][layer] for found in (first, last)]
            assert 1.05 * shares[0] < shares[1] <= last[kind]["best"][layer]
    assert "| needle | listed | " in recall_table(last)
    changed = {
        name
        for name, weight in model.state_dict().items()
        if not torch.equal(weight, before[name])
    }
    assert changed and all(".indexer." in name for name in changed)


def test_what_is_saved_serves(tmp_path: Path):
    """A config that vLLM reads, and the weights that its loader looks for."""
    save_model(tiny_model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV32ForCausalLM"]
    assert config["first_k_dense_replace"] >= config["num_hidden_layers"]
    assert not config.keys() & {"layer_types", "mlp_layer_types"}
    own = {name for name in load_model(tmp_path).state_dict() if ".indexer." in name}
    parts = ("wq_b.weight", "wk.weight", "weights_proj.weight")
    parts += ("k_norm.weight", "k_norm.bias")
    assert own == {
        f"model.layers.{layer}.self_attn.indexer.{part}"
        for layer in range(2)
        for part in parts
    }


def test_sizes_are_those_that_kernels_have():
    config = needle_config("deepseek_v32")
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
    assert config.index_n_heads in (32, 64) and config.index_head_dim == 128
    assert config.index_topk in (512, 1024, 2048)
    assert config.first_k_dense_replace == config.num_hidden_layers
