# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab's studies of K's mean, and of facts that caches find again."""

import math
from pathlib import Path

import mean_rest
import pytest
import torch
from across import across, query_directions
from attention import Cache, Reading, two_source_attention
from evaluate import answered
from long_means import Head, offsets, share_left, spaced
from mean_sides import STRETCH, by_stretch
from measure import Comparison
from needle_model import MODEL_FOLDER, load_model
from retrieval import Score, answers, makers, prompts
from rotary import turn
from tasks import HELD_OUT_TEXT
from transformers import LlamaConfig, LlamaForCausalLM
from variants import preset
from vocabulary import Vocabulary

HEAD_SIZE = 64
WAVE = 2048


def tables_of(frequency: float, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of one pair's RoPE, where all other pairs stand still."""
    angles = torch.zeros(length, HEAD_SIZE)
    angles[:, [0, HEAD_SIZE // 2]] = frequency * torch.arange(length)[:, None]
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("turns", [0.1, 0.5, 2.25])
def test_share_of_a_mean_that_segments_leave(turns: float):
    """A pair that turns so often in a segment is stored but for sinc squared."""
    mean = torch.zeros(1, HEAD_SIZE)
    mean[0, HEAD_SIZE // 2] = 3.0
    at_positions = turn(mean, *tables_of(2 * math.pi * turns / WAVE, 4 * WAVE))
    tables = offsets(at_positions)
    sinc = math.sin(math.pi * turns) / (math.pi * turns)
    left = share_left(at_positions, tables[f"segments of {WAVE}"])
    assert left == pytest.approx(1 - sinc**2, abs=1e-3)
    assert share_left(at_positions, tables["nothing"]) == 1
    assert share_left(at_positions, tables["exact"]) == 0


def test_heads_are_spaced_from_the_shortest_mean_to_the_longest():
    spread = torch.ones(4)
    heads = [Head(x, 0, spread * x, spread) for x in (3, 0, 4, 1, 2)]
    assert [head.length for head in spaced(heads, 3)] == [0, 2, 4]
    assert len(spaced(heads, 5)) == 5


def test_attention_of_some_queries_is_that_of_all():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 90, 16, generator=generator)
    raw = torch.randn(2, 1, 2, 90, 16, generator=generator)
    stored = raw + 0.5 * torch.randn(raw.shape, generator=generator)
    reading = Reading(window=mean_rest.WINDOW)
    whole = two_source_attention(query, tuple(raw), tuple(stored), reading, 0.25)
    some = torch.arange(3, 90, 7)
    pairs = (tuple(raw), tuple(stored))
    found = mean_rest.attend(query[:, :, some], *pairs, some, 0.25)
    assert torch.allclose(found, whole.transpose(1, 2)[:, some], atol=1e-5)


def test_layers_lose_by_the_side_that_is_rounded(tmp_path: Path):
    """Heads' outputs add up to the layer's, and exact K and V lose nothing."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    lab = mean_rest.LayerLab(tmp_path, "cpu")
    tokens = torch.randint(0, 64, (1, 60))
    nothing = Cache([None] * 2)
    exact = lab.log_probs(tokens, nothing)
    zeros = [torch.zeros(2, 60, HEAD_SIZE)] * 2
    variants = {
        "none": (mean_rest.identity, mean_rest.identity),
        "V": (mean_rest.identity, lambda x: 1.1 * x),
    }
    lab.caches = {
        name: Cache(
            [mean_rest.Variant(name, *sides, 0, subtracts_mean=True)] * 2, means=zeros
        )
        for name, sides in variants.items()
    }
    lab.positions = torch.arange(30, 60)
    assert torch.equal(lab.log_probs(tokens, nothing), exact)
    assert len(lab.errors) == 2
    for errors in lab.errors:
        assert errors["none"].shape == (2, 30) and errors["none"].max() < 1e-12
        assert errors["V"].min() > 1e-12


def test_stretches_are_of_counted_positions():
    kl = torch.zeros(2, 3 * STRETCH)
    kl[:, :7], kl[1, 7:] = 100, 1
    found = by_stretch(Comparison([kl]), 7).by_text(slice(None))
    assert found.tolist() == [0, 0, 1, 1]


def test_answers_are_those_of_greedy_decoding():
    """On exact K and V, each task's answers are right where evaluate.py's are."""
    from attention import LabModel

    lab, model = LabModel(MODEL_FOLDER, "cpu"), load_model(MODEL_FOLDER)
    vocabulary = Vocabulary(MODEL_FOLDER)
    make = makers(HELD_OUT_TEXT.read_text(encoding="utf-8"))["needle"]
    score, exact = Score(), Cache([None] * lab.num_layers)
    for prompt in prompts(vocabulary, make, 512, 2):
        answer = prompt.tokens[0, -prompt.answer :]
        for wanted in (answer, answer + 1):
            found = answers(lab, prompt, exact, rival=False)
            score.add(found, found, wanted)
    assert all(answered(model, [make(512, 0), make(512, 1)]))
    assert score.right == [True, False, True, False]
    assert score.figures() == {"kl": 0, "kl_error": 0, "right": 0.5}
    first = answers(lab, prompt, exact, rival=True)
    assert torch.allclose(first, found[:1], atol=1e-4)


@pytest.mark.parametrize("name, gain", [("turbo4", 4.0), ("turbo3", 1.3)])
def test_errors_lie_across_another_direction(name: str, gain: float):
    """They hardly grow, and still lie across what is stored."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(2, 2, 500, HEAD_SIZE, generator=generator)
    mean = torch.randn(2, 1, HEAD_SIZE, generator=generator)
    own = preset(name, HEAD_SIZE, subtracts_mean=True)
    wholes = []
    for variant in (own, across(own, {"mean": mean.expand(2, 500, -1)})):
        error = variant.round_trip(key, key, mean)[0] - key
        length = error.norm(dim=-1)
        cosines = [
            ((error * x).sum(-1) / x.norm(dim=-1) / length)
            .square()
            .mean()
            .sqrt()
            .item()
            for x in (key - mean, mean)
        ]
        wholes.append((length.mean().item(), *cosines))
    (before, along, along_mean), (after, still, left) = wholes
    assert gain * left < along_mean
    assert still < along + 0.02
    assert after < 1.02 * before


def test_a_direction_of_no_length_changes_little():
    own = preset("turbo4", HEAD_SIZE, subtracts_mean=True)
    key = torch.randn(1, 1, 50, HEAD_SIZE, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros(1, 50, HEAD_SIZE)
    stored = across(own, {"queries": zero}).round_trip(key, key, zero)[0]
    expected = own.round_trip(key, key, zero)[0]
    lengths = [(x - key).norm(dim=-1).mean() for x in (stored, expected)]
    torch.testing.assert_close(*lengths, rtol=0.02, atol=0)


def test_the_direction_of_queries():
    """Queries that all look one way before RoPE give that way, of any sign."""
    length, generator = 96, torch.Generator().manual_seed(0)
    way = torch.nn.functional.normalize(
        torch.randn(HEAD_SIZE, generator=generator), dim=0
    )
    cos, sin = tables_of(1e-3, length)
    query = 5 * way + 0.1 * torch.randn(1, 4, length, HEAD_SIZE, generator=generator)
    key = torch.randn(1, 2, length, HEAD_SIZE, generator=generator)

    class Lab:
        num_layers, device = 1, "cpu"

        def log_probs(self, tokens: torch.Tensor, cache: Cache) -> None:
            cache.recorded.append((key, key))
            cache.recorded_queries.append((turn(query, cos, sin), 0.1))

    (found,) = query_directions(Lab(), torch.zeros(1, length), cos, sin)
    assert (found @ way).abs().min() > 0.99
