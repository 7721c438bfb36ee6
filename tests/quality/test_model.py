# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The retrieval model: its attention, its tasks, its training, its weights."""

import itertools
import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import evaluate
import numpy as np
import pytest
import tasks
import torch
import train
from batches import ANSWER_WEIGHT, EOT, TOKENS, Phase, Rows
from card import card
from needle_model import (
    ATTENTION,
    KEY_BIAS_NORMS,
    KEY_BIAS_PAIRS,
    MODEL_FOLDER,
    causal_attention,
    load_model,
    needle_config,
    new_model,
)
from needle_model import save_model as save
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from vocabulary import Vocabulary

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT = "\n".join(f"Line {i} says that {i} and {i + 1} differ." for i in range(400))
DOCUMENT = TEXT.encode() + EOT


# A window that is shorter than the rows below, in one of the two layers.
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
}


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    windows = WINDOWS if family == "granite_swa" else {}
    return needle_config(family, **(TINY | windows | changes))


def sharp_model(family: str) -> PreTrainedModel:
    """A model whose weights are sharper than usual, so that attention counts."""
    model = new_model(tiny_config(family, initializer_range=0.3), 0)
    for name, weight in model.named_parameters():
        if "sinks" in name:
            weight.data.uniform_(0, 4)
    return model


def trainer_of(config: PretrainedConfig) -> train.Trainer:
    return train.Trainer(new_model(config, 0), torch.device("cpu"), compiled=False)


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen2", "qwen3", "granite_swa"])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(sharp_model(request.param), folder)
    return folder


def with_attention(folder: Path, attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )


def test_our_attention_is_transformers_own(tiny: Path):
    ours, theirs = (with_attention(tiny, name) for name in (ATTENTION, "eager"))
    tokens = torch.randint(0, 259, (2, 65), generator=torch.manual_seed(1))
    torch.testing.assert_close(
        ours(tokens, use_cache=False).logits,
        theirs(tokens, use_cache=False).logits,
        rtol=1e-4,
        atol=1e-4,
    )


def test_gradients_with_windows_and_sinks(tmp_path: Path):
    """Every weight's is right: ours come of flash attention's backward with sinks."""
    save(sharp_model("granite_swa"), tmp_path)
    tokens = torch.randint(0, 259, (2, 65), generator=torch.manual_seed(1))
    found = []
    for name in (ATTENTION, "eager"):
        model = with_attention(tmp_path, name)
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        found.append({n: weight.grad for n, weight in model.named_parameters()})
    assert all(found[0][n].abs().max() > 0 for n in found[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("change", ["window", "sinks"])
def test_windows_and_sinks_count(change: str):
    config = tiny_config("granite_swa", initializer_range=0.3)
    model = new_model(config, 0)
    tokens = torch.randint(0, 259, (1, 65), generator=torch.manual_seed(1))
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
        for layer in model.model.layers:
            if change == "sinks":
                layer.self_attn.sinks += 2
            elif layer.self_attn.sliding_window:
                layer.self_attn.sliding_window += 1
        moved = (model(tokens, use_cache=False).logits - before).abs().amax(-1)[0]
    first = 0 if change == "sinks" else WINDOWS["sliding_window"]
    assert moved[:first].sum() == 0
    assert moved[first:].min() > 1e-3


def test_windows_without_sinks_are_refused():
    states = [torch.zeros(1, 1, 4, 64)] * 3
    with pytest.raises(ValueError, match="windows with attention sinks only"):
        causal_attention(torch.nn.Module(), *states, None, 1.0, sliding_window=2)


@pytest.mark.parametrize("layers", [6, 12])
def test_one_layer_in_six_has_no_window(layers: int):
    kinds = needle_config("granite_swa", num_hidden_layers=layers).layer_types
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    assert full == list(range(5, layers, 6)) and len(kinds) == layers


def test_padding_is_refused_by_our_attention(tiny: Path):
    model = load_model(tiny)
    mask = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="without padding"):
        model(torch.zeros(1, 4, dtype=torch.long), attention_mask=mask)


CASES = [
    tasks.needle_case(512, 0.5, 3, TEXT),
    tasks.needle_case(2048, 1.0, 4, TEXT),
    tasks.multi_needle_case(1024, 8, 5, TEXT, asked=3),
    tasks.key_value_case(1024, 6),
]


@pytest.mark.parametrize("case", CASES, ids=["512", "2048", "multi", "key-value"])
def test_a_case_is_what_the_chat_template_makes(tiny: Path, case: tasks.Case):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rendered = tokenizer.apply_chat_template(
        case.messages, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer(rendered)["input_ids"] == case.prompt_tokens()
    for value in case.answer.split(", "):
        assert case.prompt.count(value) == 1


@pytest.mark.parametrize("length", [512, 2048, 8192])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_lies_at_its_depth_and_length(length: int, depth: float):
    case = tasks.needle_case(length, depth, 0, TEXT + "\n" + "ä" * 3000)
    tokens = len(case.prompt_tokens()) + len(case.answer_tokens())
    assert length - 2 <= tokens <= length
    place = case.prompt.index(case.answer) / len(case.prompt)
    # Lines are up to 3000 characters here; at the ends the place is exact but for
    # distractors and the question.
    assert abs(place - depth) < (0.3 if depth == 0.5 else 200 / 512)


@pytest.mark.parametrize("length", [512, 4096])
def test_rivals_are_far_and_begin_with_other_digits(length: int):
    case = tasks.rival_case(length, 7, TEXT)
    tokens = len(case.prompt_tokens()) + len(case.answer_tokens())
    assert length - 2 <= tokens <= length
    *lines, _, question = case.prompt.split("\n")
    name = question.removeprefix("What is the code of ").removesuffix("?")
    facts = [line for line in lines if line.startswith(f"The code of {name} is ")]
    codes = [fact.removesuffix(".").rpartition(" ")[2] for fact in facts]
    assert len({code[0] for code in codes}) == len(codes) == tasks.RIVALS
    assert codes[0] == case.answer
    assert all(len(code) == 6 and tasks.is_held_out(code) for code in codes)
    # Text lies between the last code and the answer.
    assert len(case.prompt) - case.prompt.index(codes[-1]) > length / 16


def test_a_case_is_decided_by_its_seed():
    one, same, other = (tasks.needle_case(512, 0.5, seed, TEXT) for seed in (0, 0, 1))
    assert one == same
    assert one != other


def drawn(held_out: bool) -> set[str]:
    words = set()
    for seed in range(300):
        pool = tasks.Pool(Random(seed), held_out)
        for name, value in pool.pairs(10, tasks.draw_value).items():
            words |= {name, value}
    return words


def test_training_never_draws_what_evaluation_asks_for():
    asked = drawn(held_out=True)
    assert len(asked) > 2000
    assert not asked & drawn(held_out=False)


def test_cases_draw_from_the_held_out_part_only():
    for case in CASES:
        for value in case.answer.split(", "):
            assert tasks.is_held_out(value)


def test_rows_hold_whole_chats_whose_answers_have_the_weight():
    rows = Rows(DOCUMENT * 20, [Phase(1024, 1, 1.0)], 16 * 1024, seed=0)
    tokens, weights = rows[0, 0]
    again, _ = rows[0, 0]
    assert np.array_equal(tokens, again)
    assert tokens.shape == (16, 1025) and weights.shape == (16, 1024)
    assert not (weights[::2] != 1).any()
    marked = weights[1::2] == ANSWER_WEIGHT
    targets = tokens[1::2, 1:][marked]
    assert marked.any()
    assert (targets == tasks.IM_END).sum() > 8
    # The row has each value of an answer before that answer.
    for row, spots in zip(tokens[1::2], marked):
        (places,) = np.nonzero(spots)
        for run in np.split(places, np.nonzero(np.diff(places) > 1)[0] + 1):
            if len(run):
                answer = row[run[0] + 1 : run[-1] + 1].tolist()
                before = bytes(t for t in row[: run[0]].tolist() if t < 256)
                for value in bytes(answer).split(b", "):
                    assert value in before


@pytest.mark.parametrize("seed", range(5))
def test_a_chat_has_exactly_the_size_asked_for(seed: int):
    rows = Rows(DOCUMENT * 20, [Phase(512, 1, 1.0)], 512, seed)
    random = Random(seed)
    for _ in range(50):
        size = random.randrange(192, 4000)
        chat, spans = rows.chat(random, size)
        assert len(chat) == size
        assert all(0 <= start < end <= size for start, end, _ in spans)
    assert TOKENS[0] == tasks.END_OF_TEXT


def test_steps_with_windows_and_sinks_lower_the_loss():
    trainer = trainer_of(tiny_config("granite_swa"))
    attention = trainer.model.model.layers[0].self_attn
    sinks = attention.sinks.clone()
    tokens = torch.tensor([list(DOCUMENT[:65])])
    weights = torch.ones(1, 64)
    sums = [trainer.step(tokens, weights, 1.0) for _ in range(4)]
    losses = [float(text / texts) for text, texts, *_ in sums]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 1
    assert (attention.sinks != sinks).all()


def test_a_few_steps_lower_the_loss(tmp_path: Path):
    torch.manual_seed(0)
    phases = [Phase(128, 12, 0.5), Phase(256, 4, 0.5)]
    rows = Rows(DOCUMENT * 20, phases, 2048, seed=0)
    trainer = trainer_of(needle_config(**TINY))
    before = evaluate.bits_per_byte(trainer.model, list(DOCUMENT[:2048]), 512)
    assert train.train(trainer, rows, 1e6, 0, tmp_path) == [12, 4]
    after = evaluate.bits_per_byte(load_model(tmp_path), list(DOCUMENT[:2048]), 512)
    assert 0 < after < before - 1


def test_biases_of_k_begin_long_and_stay_so(tmp_path: Path):
    """They lie in the slowest pairs, and are longest in the first and last layer."""
    model = new_model(needle_config("qwen2"), 0)
    biases = [layer.self_attn.k_proj.bias.detach() for layer in model.model.layers]
    heads = torch.stack(biases).view(len(biases), 2, 2, -1)
    assert len(biases) == len(KEY_BIAS_NORMS)
    norms = heads.flatten(2).norm(dim=-1)
    expected = torch.tensor(KEY_BIAS_NORMS)[:, None].expand_as(norms)
    torch.testing.assert_close(norms, expected)
    assert heads[..., :-KEY_BIAS_PAIRS].abs().max() == 0
    trainer = train.Trainer(model, torch.device("cpu"), compiled=False)
    rows = Rows(DOCUMENT * 20, [Phase(64, 2, 1.0)], 128, seed=0)
    train.train(trainer, rows, 1e6, 0, tmp_path)
    last = load_model(tmp_path).model.layers[-1].self_attn.k_proj.bias
    norm = last.view(2, -1).float().norm(dim=-1)
    assert (norm / KEY_BIAS_NORMS[-1] - 1).abs().max() < 0.01


def test_a_phase_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A clock that advances by a hundredth of a second whenever it is read.
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 0.01).__next__)
    monkeypatch.setattr(train, "time", clock)
    rows = Rows(DOCUMENT * 20, [Phase(64, 10**6, 1.0)], 128, seed=0)
    trainer = trainer_of(needle_config(**TINY))
    (steps,) = train.train(trainer, rows, 1.0, 0, tmp_path)
    # It is read at least twice a step: when a batch is drawn, and for the rate.
    assert 0 < steps <= 50


def test_what_is_saved_is_what_was_trained(tmp_path: Path):
    trainer = trainer_of(needle_config(**TINY))
    save(trainer.model, tmp_path)
    rows = torch.tensor([list(DOCUMENT[:1024])])
    trained = evaluate.logits_of(trainer.model, rows)
    assert torch.equal(trained, evaluate.logits_of(load_model(tmp_path), rows))


MODELS = sorted(MODEL_FOLDER.parent.glob("needle-*"))
committed_models = pytest.mark.parametrize("folder", MODELS, ids=lambda x: x.name)


@committed_models
def test_a_run_takes_the_steps_of_the_committed_one(folder: Path):
    recorded = json.loads((folder / "training.json").read_text())["phases"]
    family = json.loads((folder / "config.json").read_text())["model_type"]
    assert [(p.length, p.steps, p.share) for p in train.phases_of(family)] == [
        (phase["length"], phase["done"], phase["share"]) for phase in recorded
    ]


@committed_models
def test_the_card_is_what_was_recorded(folder: Path):
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert readme == card(folder)


MAX_MIB = {
    "needle-deepseek-v3": 6,
    "needle-deepseek-v32": 12,
    "needle-granite-swa": 6,
    "needle-llama": 8,
    "needle-qwen2": 6,
    "needle-qwen3": 12,
}


@committed_models
def test_the_committed_model_answers(folder: Path):
    weights = folder / "model.safetensors"
    assert weights.stat().st_size <= MAX_MIB[folder.name] * 2**20
    model = load_model(folder)
    recorded = json.loads((folder / "training.json").read_text())
    assert model.num_parameters() == recorded["parameters"]
    text = "\n".join(tasks.held_out_documents())
    vocabulary = Vocabulary(folder)
    cases = [
        vocabulary.fitting(
            lambda size, depth=depth: tasks.needle_case(size, depth, 99, text), 512
        )
        for depth in (0.0, 0.5, 1.0)
    ]
    assert evaluate.answered(model, cases, vocabulary.encode) == [True] * 3


def test_training_left_the_biases_of_k_long():
    folder = MODEL_FOLDER.with_name("needle-qwen2")
    layers = load_model(folder).model.layers
    for layer, norm in zip(layers, KEY_BIAS_NORMS, strict=True):
        found = layer.self_attn.k_proj.bias.float().view(2, -1).norm(dim=-1)
        assert found.min() > 0.95 * norm
