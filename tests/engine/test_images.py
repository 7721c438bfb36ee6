# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prompts with images, whose tokens see each other, in all ways of running.

One engine runs all ways. With --all each way also has an engine of its own.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import Call, Engine, kl_divergences, requests_of, run_job
from images import AN_IMAGE, EXPANDED, Reference, expand, write_image, write_model
from scenarios import text
from ways import CHUNK, KL_TOLERANCE, NUM_GENERATED, NUM_SCARCE, Answers, Ways

# Nats between distributions that are the same up to rounding in fp32.
ROUNDING = 1e-9
NUM_IMAGES = 3
# Prompts with an image in text, with two, with two side by side, with the same image
# twice, and with none.
PROMPTS = [
    text(20, 0) + [AN_IMAGE] + text(10, 1),
    text(70, 2) + [AN_IMAGE] + text(30, 3) + [AN_IMAGE] + text(1, 4),
    [AN_IMAGE] * 2 + text(9, 5),
    text(5, 6) + [AN_IMAGE] + text(12, 7) + [AN_IMAGE] + text(3, 8),
    text(40, 9),
]
# The numbers of the prompts' images, and of other images.
IMAGES = [[0], [0, 1], [1, 2], [0, 0], []]
OTHERS = [[1], [0, 2], [2, 2], [0, 1], []]
# Prompts with an image for means, and as many without.
MANY = [text(9 + 2 * i, 100 + i) + [AN_IMAGE] + text(30 - i, 120 + i) for i in range(8)]
TEXTS = [text(len(expand(prompt)), 140 + i) for i, prompt in enumerate(MANY)]
RAW = {"attention_config": {"turbo_prefill": "raw"}}
COMMON: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": 2},
    # A step has the whole of an image. On a GPU vLLM sees to it by itself.
    "disable_chunked_mm_input": True,
}


@dataclass
class WaysOfImages(Ways):
    """The ways of prompts with images."""

    @property
    def prompts(self) -> list[list[int]]:
        return PROMPTS

    @property
    def lengths(self) -> list[int]:
        return [len(expand(prompt)) for prompt in PROMPTS]

    @property
    def scarce(self) -> list[list[int]]:
        """Prompts of several blocks, which they outgrow while they generate."""
        length = 3 * self.block - 4 - len(EXPANDED)
        return [text(length, 300 + index) + [AN_IMAGE] for index in range(NUM_SCARCE)]


WAYS = WaysOfImages(
    32, scarce_blocks=45, more={"one kind": {"disable_hybrid_kv_cache_manager": True}}
)


class Gemma3:
    """The model, its images, and the comparison of its answers with transformers'."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model")
        self.paths = [write_image(folder / f"{i}.png", i) for i in range(NUM_IMAGES)]
        self.reference = Reference(self.model)

    def files(self, numbers: list[list[int]]) -> list[list[str]]:
        return [[self.paths[i] for i in each] for each in numbers]

    def call(
        self, prompts: list[list[int]], numbers: list[list[int]], **options: Any
    ) -> Call:
        return Call(prompts, NUM_GENERATED, images=self.files(numbers), **options)

    def with_images(self, engine: Engine) -> Engine:
        """Gives the prompts of all calls their images, in place."""
        engine.args |= COMMON
        for call in engine.calls.values():
            pairs = zip(PROMPTS, IMAGES)
            known = {tuple(prompt): numbers for prompt, numbers in pairs}
            numbers = [known.get(tuple(prompt), [0]) for prompt in call.prompts]
            call.images = self.files(numbers)
        return engine

    def from_reference(
        self,
        requests: list[dict[str, Any]],
        prompts: list[list[int]],
        numbers: list[list[int]],
        causal: bool = False,
    ) -> list[list[float]]:
        """Each prompt's divergences from transformers' answers, by position."""
        found = []
        for request, prompt, files in zip(
            requests, prompts, self.files(numbers), strict=True
        ):
            tokens = request["tokens"]
            logprobs = self.reference.logprobs(prompt, files, tokens, causal)
            own = {"tokens": tokens, "logprobs": logprobs}
            found.append(kl_divergences(own, request))
        return found


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Gemma3:
    return Gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def one(gemma3: Gemma3) -> Answers:
    """All ways in one engine, and an engine that attends to tokens as computed."""
    engines = {name: gemma3.with_images(x) for name, x in WAYS.engines().items()}
    few, plain = engines["few"], engines["plain"]
    few.calls["others"] = gemma3.call(PROMPTS, OTHERS, forgets=True)
    few.calls["causal"] = gemma3.call(PROMPTS, IMAGES, forgets=True, causal_images=True)
    raw = Engine(plain.args | RAW, {"batched": gemma3.call(PROMPTS, IMAGES)})
    chosen = {"few": few, "raw": raw}
    return Answers(WAYS, run_job(gemma3.folder / "one", gemma3.model, "v2", chosen))


@pytest.fixture(scope="module")
def each(gemma3: Gemma3) -> Answers:
    """Each way in an engine of its own, and engines that measure packing's cost."""
    engines = {name: gemma3.with_images(x) for name, x in WAYS.engines().items()}
    del engines["few"]
    plain = engines["plain"].args
    means = {
        "images": gemma3.call(MANY, [[i % NUM_IMAGES] for i in range(len(MANY))]),
        "texts": gemma3.call(TEXTS, [[]] * len(TEXTS)),
    }
    engines["stored"] = Engine(plain, means)
    engines["raw"] = Engine(plain | RAW, means)
    own = plain | {"kv_cache_dtype": "auto", "attention_config": {}}
    engines["own"] = Engine(own, {"batched": gemma3.call(PROMPTS, IMAGES)})
    return Answers(WAYS, run_job(gemma3.folder / "each", gemma3.model, "v2", engines))


def test_one_engine(one: Answers):
    """Prompts run in chunks one by one, batched behind hits, and batched in chunks."""
    place = expand(PROMPTS[1]).index(EXPANDED[0])
    # The image would begin in one chunk, and end in the next.
    assert place < CHUNK + WAYS.block < place + len(EXPANDED)
    length = WAYS.lengths[1]
    steps = one.call("few", "alone")["steps"]
    assert [[place, 0]] in steps and [[length - place, place]] in steps
    # A hit ends among an image's tokens.
    place = expand(PROMPTS[0]).index(EXPANDED[0])
    assert place < one.cached("few", "warm")[0] < place + len(EXPANDED)
    assert one.cached("few", "warm") == one.whole_blocks()
    assert not any(one.cached("few", "cold"))
    one.assert_alike("few", "warm", "cold")


def test_images_decide_answers(one: Answers):
    """Guards the test above: answers change with other images."""
    *others, same = one.divergence("few", "others")
    assert min(others) > 100 * KL_TOLERANCE
    assert same < KL_TOLERANCE


def test_tokens_of_an_image_see_each_other(one: Answers):
    """Guards the tests above: answers change if tokens see earlier tokens alone."""
    *causal, same = one.divergence("few", "causal")
    assert min(causal) > 100 * KL_TOLERANCE
    assert same < KL_TOLERANCE


def test_answers_are_those_of_transformers(gemma3: Gemma3, one: Answers):
    """A prefill gives theirs where tokens are attended to as computed.

    Causal attention to images gives others.
    """
    requests = requests_of(one.engines["raw"])
    first_step = one.call("raw", "batched")["steps"][0]
    assert first_step == [[length, 0] for length in WAYS.lengths]
    found = gemma3.from_reference(requests, PROMPTS, IMAGES)
    assert max(kls[0] for kls in found) < ROUNDING
    causal = gemma3.from_reference(requests, PROMPTS, IMAGES, causal=True)
    assert min(kls[0] for kls in causal[:-1]) > KL_TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("prefill", ["raw", "stored"])
def test_packing_costs_no_more_than_of_text(
    gemma3: Gemma3, each: Answers, prefill: str
):
    """The divergence of later tokens, which read the cache, is as small as with text.

    The divergence from causal attention to images is far larger.
    """
    numbers = [[i % NUM_IMAGES] for i in range(len(MANY))]

    def mean(call: str, *args: Any) -> float:
        requests = requests_of(each.engines[prefill], call)
        found = gemma3.from_reference(requests, *args)
        return statistics.fmean(kl for kls in found for kl in kls[1:])

    images = mean("images", MANY, numbers)
    assert images < 2 * mean("texts", TEXTS, [[]] * len(TEXTS))
    assert images < mean("images", MANY, numbers, True) / 4


@pytest.mark.matrix
def test_the_reference_is_the_same_model(gemma3: Gemma3, each: Answers):
    """Its causal answers are those of vLLM's attention for a CPU, without spans."""
    requests = requests_of(each.engines["own"])
    found = gemma3.from_reference(requests, PROMPTS, IMAGES, causal=True)
    assert max(max(kls) for kls in found) < ROUNDING


@pytest.mark.matrix
def test_batched_as_alone(each: Answers):
    each.assert_batched()


@pytest.mark.matrix
def test_prefix_hits(each: Answers):
    assert each.cached("prefix", "warm") == each.whole_blocks()
    each.assert_alike("prefix", "cold", "warm")


@pytest.mark.matrix
def test_one_kind_of_cache(each: Answers):
    """Windows and full attention in one group."""
    assert each.engines["one kind"]["num_kv_cache_groups"] == 1
    each.assert_alike("one kind", "cold", "warm")


@pytest.mark.matrix
def test_chunked_prefill(each: Answers):
    each.assert_chunked()


@pytest.mark.matrix
def test_preemption(each: Answers):
    each.assert_preempted()


@pytest.mark.matrix
def test_attention_decides_every_answer(each: Answers):
    each.assert_attention_decides()
