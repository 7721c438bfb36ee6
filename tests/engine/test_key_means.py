# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engines that take the means of K off: the means are those of the model, answers get
closer to it, and engines share the means by a file.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Call, Engine, mean_divergence, requests_of, run_job
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from turbo_quality.cases import HELD_OUT, MODEL

from vllm.v1.attention.ops.turbo.keys.directions import NEWEST_TOKENS
from vllm.v1.attention.ops.turbo.keys.means import MAX_TOKENS, first_tokens
from vllm.v1.attention.ops.turbo.keys.run_pass import SLICE_TOKENS
from vllm.v1.attention.ops.turbo.keys.text import TEXT

# Models without and with a bias of K, and one whose K is normalised.
MODELS = {name: str(MODEL.with_name(f"needle-{name}")) for name in ("llama", "qwen2")}
MODELS |= {"qwen3": str(MODEL)}
# A model with MLA, whose latents have a mean.
MLA = {"mla": str(MODEL.with_name("needle-deepseek-v3"))}
# The layers whose directions are checked, which takes seconds each.
DIRECTED = (1, 4)
PROMPTS, PROMPT_TOKENS, MAX_NEW_TOKENS = 4, 400, 24
CHUNKS = {"max_num_batched_tokens": 300, "enable_chunked_prefill": True}
OFF = {"attention_config": {"turbo_means": "off"}}
# Without a recent window all tokens are seen as they are stored.
STORED = {"turbo_prefill": "stored"}


def prompts() -> list[list[int]]:
    """Held-out texts, a token a byte."""
    text = HELD_OUT.read_bytes()
    return [list(text[i : i + PROMPT_TOKENS]) for i in range(0, PROMPTS * 2000, 2000)]


def brief(model: str, cache: str = "turbo4", **args: Any) -> Engine:
    """An engine that serves a token, whose answer nothing is compared with."""
    calls = {"batched": Call(prompts()[:1], 1)}
    return Engine({"kv_cache_dtype": cache} | args, calls, model=(MODELS | MLA)[model])


def engine(model: str, cache: str = "turbo4", **args: Any) -> Engine:
    calls = {"batched": Call(prompts(), MAX_NEW_TOKENS)}
    return replace(brief(model, cache, **args), calls=calls)


class Runs:
    """Jobs whose engines have a cache of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.results: dict[str, Any] = {}
        self.logs: dict[str, str] = {}

    def run(self, engines: dict[str, Engine], runner: Any = "v1", **variables: str):
        job = self.folder / "-".join(engines)
        variables |= {"VLLM_CACHE_ROOT": str(self.cache)}
        self.results |= run_job(job, MODEL, runner, engines, variables)
        parts = re.split(r"^engine (\S+)\n", (job / "log").read_text(), flags=re.M)
        self.logs |= dict(zip(parts[1::2], parts[2::2]))

    def line(self, name: str) -> str:
        """Returns the line of an engine on the means of K or latents."""
        (line,) = re.findall("KV cache turbo4: the means of .*", self.logs[name])
        return line

    def file(self, name: str) -> Path:
        """Returns the file that an engine has written or read."""
        path = Path(re.findall(r"\S+\.safetensors", self.line(name))[0])
        assert path.is_relative_to(self.cache)
        return path


def kept(path: Path) -> Path:
    """The copy of a file of means as it was written."""
    return path.with_suffix(".kept")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("means"))
    # The second engine of a checkpoint reads the file of the first, whatever its
    # settings.
    found.run(
        {
            "auto": engine("llama", "auto"),
            "llama": engine("llama"),
            "off": engine("llama", **OFF),
            "qwen2": brief("qwen2"),
            "qwen3": brief("qwen3", **CHUNKS),
            "dummy": brief("llama", load_format="dummy"),
            "untold": brief("llama", skip_tokenizer_init=True),
            "mla-auto": engine("mla", "auto"),
            "mla": engine("mla", attention_config=STORED),
            "mla-off": engine("mla", attention_config=STORED | {"turbo_means": "off"}),
        }
    )
    for name in MODELS | MLA:
        path = found.file(name)
        kept(path).write_bytes(path.read_bytes())
    path = found.file("qwen2")
    tensors = load_file(path)
    next(iter(tensors.values())).add_(1)
    save_file(tensors, path)
    found.run(
        {
            "shared": brief("llama", model_impl="transformers", dtype="float32"),
            "damaged": brief("qwen2", **CHUNKS),
            "mla-shared": brief("mla", dtype="float32"),
        }
    )
    return found


@contextmanager
def recorded(model: nn.Module, name: str) -> Iterator[list[torch.Tensor]]:
    """Records the outputs of modules of a name, (B, T, ...) each."""
    found: list[torch.Tensor] = []
    modules = [x for path, x in model.named_modules() if path.endswith(name)]
    handles = [
        module.register_forward_hook(lambda *args: found.append(args[2]))
        for module in modules
    ]
    yield found
    for handle in handles:
        handle.remove()


@torch.inference_mode()
def exact_means(folder: str, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the means of each layer's K before RoPE, by Transformers in fp32: of
    first tokens, and of a text's others, (H, D) each.

    Args:
        folder: The model's folder.
        name: The last part of the names of modules whose outputs are K.

    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = torch.tensor([tokenizer.encode(TEXT)[:MAX_TOKENS]])
    first = torch.tensor(first_tokens(config.vocab_size))[:, None]
    means = []
    for tokens in (first, text):
        with recorded(model, name) as keys:
            model(tokens)
        start = 0 if tokens is first else 1
        heads = config.num_key_value_heads
        means.append([x[:, start:].flatten(0, 1).mean(0).view(heads, -1) for x in keys])
    return list(zip(*means))


@torch.inference_mode()
def exact_latent_means(folder: str) -> list[torch.Tensor]:
    """Returns the mean of each layer's latents over a text, (D,), likewise."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = AutoTokenizer.from_pretrained(folder).encode(TEXT)[:MAX_TOKENS]
    with recorded(model, "kv_a_layernorm") as latents:
        model(torch.tensor([text]))
    assert len(latents) == model.config.num_hidden_layers
    return [each[0].mean(0) for each in latents]


@torch.inference_mode()
def exact_directions(folder: str, name: str) -> dict[int, torch.Tensor]:
    """Returns the first principal direction of the queries of `DIRECTED` layers, (H, D)
    each, by Transformers in fp32.

    Args:
        folder: The model's folder.
        name: The last part of the names of modules whose outputs are queries.

    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    heads = model.config.num_key_value_heads
    group = model.config.num_attention_heads // heads
    text = AutoTokenizer.from_pretrained(folder).encode(TEXT)[:MAX_TOKENS]
    with recorded(model, name) as queries:
        attentions = model(torch.tensor([text]), output_attentions=True).attentions
    first = (len(text) - 1) // SLICE_TOKENS * SLICE_TOKENS
    assert len(queries) == len(attentions)
    found = {}
    for index in DIRECTED:
        query, weights = queries[index], attentions[index]
        # (H, query heads, T, D) and (H, query heads, T, keys), of the last slice.
        query = query[0, first:].reshape(len(text) - first, heads, group, -1)
        query = query.permute(1, 2, 0, 3)
        weights = weights[0, :, first:].unflatten(0, (heads, -1))
        moment = torch.zeros(())
        for place in range(1, len(text) - NEWEST_TOKENS):
            # Older queries are not NEWEST_TOKENS behind the key.
            start = max(first, place + NEWEST_TOKENS) - first
            away = torch.arange(first + start, len(text))[None] - place
            cos, sin = model.model.rotary_emb(query, away)
            own = query[:, :, start:]
            turned = apply_rotary_pos_emb(own, own, cos, sin)[0]
            turned = turned * weights[:, :, start:, place].sqrt()[..., None]
            turned = turned.flatten(1, 2)
            moment = moment + turned.mT @ turned
        found[index] = torch.linalg.eigh(moment).eigenvectors[..., -1]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_directions_are_those_of_the_model(runs: Runs, name: str):
    """A cosine is smaller where a second direction has nearly as large a share."""
    tensors = load_file(kept(runs.file(name)))
    module = "q_norm" if name == "qwen3" else "q_proj"
    expected = exact_directions(MODELS[name], module)
    cosines = []
    for index, directions in expected.items():
        found = tensors[f"model.layers.{index}.self_attn.attn.direction"]
        cosines.append((found * directions).sum(-1).abs())
    assert torch.cat(cosines).min() > 0.9, cosines
    assert torch.cat(cosines).median() > 0.999, cosines


@pytest.mark.parametrize("name", MODELS)
def test_means_are_those_of_the_model(runs: Runs, name: str):
    """Also those of a pass in several steps, and with a bias of K."""
    tensors = load_file(kept(runs.file(name)))
    expected = exact_means(MODELS[name], "k_norm" if name == "qwen3" else "k_proj")
    assert len(expected) == (8 if name == "qwen3" else 5)
    assert len(tensors) == 4 * len(expected)
    for index, pair in enumerate(expected):
        for part, mean in zip(("first", "rest"), pair):
            found = tensors[f"model.layers.{index}.self_attn.attn.{part}"]
            # The engine computes in fp16.
            assert (found - mean).norm() < 5e-3 * mean.norm(), (index, part)


def test_means_are_those_of_latents(runs: Runs):
    """The first token of a text has its share."""
    means = exact_latent_means(MLA["mla"])
    tensors = load_file(kept(runs.file("mla")))
    assert len(tensors) == 4 * len(means)
    for index, mean in enumerate(means):
        for part in ("first", "rest"):
            (found,) = tensors[f"model.layers.{index}.self_attn.attn.{part}"]
            assert (found - mean).norm() < 5e-3 * mean.norm(), (index, part)


def test_the_log_counts_layers(runs: Runs):
    words = r"are taken off in 5 of 5 layers, and are \d+ to \d+ % as long as K"
    assert re.search(f"{words}; measured, and kept in ", runs.line("llama"))
    assert "K offset: 5 of 5 layers" in runs.logs["llama"]
    assert "K offset: 5 of 5 layers" in runs.logs["qwen2"]
    words = r"of latents are taken off in 3 of 3 layers, and are \d+ to \d+ % as long"
    assert re.search(f"{words} as latents; measured", runs.line("mla"))
    words = "Errors of K are orthogonal to where most queries look"
    assert words in runs.line("llama") and words not in runs.line("mla")
    assert "latents' mean: 3 of 3 layers" in runs.logs["mla"]


@pytest.mark.parametrize(
    "names, share",
    [(("auto", "llama", "off"), 0.6), (("mla-auto", "mla", "mla-off"), 0.7)],
    ids=["K", "latents"],
)
def test_answers_get_closer_to_the_models(runs: Runs, names: list[str], share: float):
    auto, on, off = (requests_of(runs.results[name]) for name in names)
    assert mean_divergence(auto, on) < share * mean_divergence(auto, off)


@pytest.mark.parametrize("name", ["off", "mla-off"])
def test_off_is_off(runs: Runs, name: str):
    assert not runs.results[name]["key_offsets"]
    assert "the means of" not in runs.logs[name]
    assert "mean:" not in runs.logs[name]
    assert re.fullmatch(r"turbo4\.\d+", runs.results[name]["format"])


@pytest.mark.parametrize("name, first", [("shared", "llama"), ("mla-shared", "mla")])
def test_engines_share_the_means(runs: Runs, name: str, first: str):
    """An engine with another dtype and modeling code has the same bytes of pages."""
    assert "read from" in runs.line(name)
    assert runs.file(name) == runs.file(first)
    assert runs.results[name]["format"] == runs.results[first]["format"]
    assert re.fullmatch(r"turbo4\.\d+-[0-9a-f]{16}", runs.results[first]["format"])


def test_a_damaged_file_is_noticed(runs: Runs):
    """The engine measures again, and the file is mended. Steps of another size give
    the same bits.
    """
    assert "measured, and kept in" in runs.line("damaged")
    path = runs.file("damaged")
    assert f"because {path} cannot be used" in runs.logs["damaged"]
    assert path.read_bytes() == kept(path).read_bytes()
    assert runs.results["damaged"]["format"] == runs.results["qwen2"]["format"]


@pytest.mark.parametrize(
    "name, reason", [("dummy", "dummies"), ("untold", "--skip-tokenizer-init")]
)
def test_engines_without_means_say_why(runs: Runs, name: str, reason: str):
    assert "the means of K stay in, because" in runs.line(name)
    assert reason in runs.line(name)
    assert not runs.results[name]["key_offsets"]


@pytest.mark.matrix
def test_ranks_have_the_means_of_one(runs: Runs, tmp_path: Path):
    """Two ranks find the file of one, and measure as it does without the file."""
    for name, cache in (("two", runs.cache), ("alone", tmp_path)):
        ranks = Runs(tmp_path / name)
        ranks.cache = cache
        args: dict[str, Any] = {"tensor_parallel_size": 2, "attention_config": {}}
        engines = {name: brief("llama", **args)}
        ranks.run(engines, "v2", VLLM_CPU_OMP_THREADS_BIND="nobind")
        formats = [x.results[y]["format"] for x, y in ((ranks, name), (runs, "llama"))]
        bare, *_ = formats[0].split(".window")
        if name == "two":
            assert "read from" in ranks.line(name)
            assert bare == formats[1].split(".window")[0]
        else:
            path = runs.file("llama")
            found, expected = (load_file(x) for x in (ranks.file(name), path))
            for key in expected:
                apart = (found[key] - expected[key]).norm()
                assert apart < 1e-2 * expected[key].norm(), key
