# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The file of the means of K, its key, and the settings that rule means out."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.keys.means import MIN_TOKENS, LayerMeans, Means
from vllm.v1.attention.ops.turbo.keys.text import TEXT
from vllm.v1.attention.ops.turbo.serving import means as serving_means
from vllm.v1.attention.ops.turbo.serving import means_file
from vllm.v1.attention.ops.turbo.serving.means_file import (
    checksum,
    means_path,
    read_means,
    weight_files,
    write_means,
)

from ..backend_utils import make_vllm_config
from ..keys.test_key_bias import make_module
from ..utils import gaussian

KEY = "0123456789abcdef"


def make_means(seed: int = 0) -> Means:
    """The means of layers of different shapes."""
    found = {}
    for index, (heads, size) in enumerate(((2, 64), (4, 128))):
        vectors = gaussian(3, heads, size, seed=seed + index).float().cpu()
        first, rest, direction = vectors
        lengths = rest.norm(dim=-1)
        found[f"model.layers.{index}.attn"] = LayerMeans(
            first, rest, lengths, direction
        )
    return found


def assert_equal(found: Means | None, expected: Means) -> None:
    assert found is not None and list(found) == list(expected)
    for name in expected:
        assert all(map(torch.equal, found[name], expected[name]))


def test_a_file_gives_the_same_bits(tmp_path):
    path = tmp_path / "new" / "means.safetensors"
    assert read_means(path, KEY) is None
    assert_equal(write_means(path, KEY, make_means()), make_means())
    assert_equal(read_means(path, KEY), make_means())
    # No other file is left.
    assert list(path.parent.iterdir()) == [path]


def test_the_first_engine_that_writes_counts(tmp_path):
    path = tmp_path / "means.safetensors"
    write_means(path, KEY, make_means())
    assert_equal(write_means(path, KEY, make_means(seed=7)), make_means())
    assert_equal(read_means(path, KEY), make_means())


def flip(path: Path) -> None:
    """Change one bit of the last tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Any] = {
    "its bytes have changed": flip,
    "SafetensorError": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "Safetensor": lambda path: path.write_bytes(b""),
    "of other weights": lambda path: path.write_bytes(
        write_means_of(path.with_suffix(".other"), "f" * 16).read_bytes()
    ),
    "other weights": lambda path: save_file({"x": torch.zeros(2)}, path),
}


def write_means_of(path: Path, key: str) -> Path:
    write_means(path, key, make_means())
    return path


@pytest.mark.parametrize("problem", DAMAGES)
def test_a_file_of_no_use_is_warned_of_and_replaced(tmp_path, log, problem):
    path = write_means_of(tmp_path / "means.safetensors", KEY)
    DAMAGES[problem](path)
    assert read_means(path, KEY) is None
    (line,) = log.warnings
    assert problem in line and str(path) in line
    assert_equal(write_means(path, KEY, make_means(seed=5)), make_means(seed=5))
    assert_equal(read_means(path, KEY), make_means(seed=5))


def test_a_folder_that_cannot_be_written(tmp_path, log):
    """Means serve all the same."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "means.safetensors"
    assert_equal(write_means(path, KEY, make_means()), make_means())
    (line,) = log.warnings
    assert "at each start" in line and str(path) in line


def write_weights(folder: Path, seed: int = 0, name: str = "w", **files: int) -> Path:
    folder.mkdir(exist_ok=True)
    for file, size in (files or {"model": 4}).items():
        tensors = {name: gaussian(size, 64, seed=seed).float().cpu()}
        save_file(tensors, folder / f"{file}.safetensors")
    return folder


def checksum_of(folder: Path) -> str:
    return checksum(sorted(folder.glob("*.safetensors")))


def test_checksums_tell_weights_apart(tmp_path):
    base = checksum_of(write_weights(tmp_path / "base"))
    assert len(base) == 16
    assert checksum_of(write_weights(tmp_path / "copy")) == base
    others = [
        checksum_of(write_weights(tmp_path / "seed", seed=1)),
        checksum_of(write_weights(tmp_path / "name", name="v")),
        checksum_of(write_weights(tmp_path / "size", model=5)),
        checksum_of(write_weights(tmp_path / "files", model=4, other=4)),
    ]
    assert len({base, *others}) == 5


def test_a_large_checkpoint_is_sampled(tmp_path, monkeypatch):
    """A checksum reads a piece in each stride, whatever the size."""
    monkeypatch.setattr(means_file, "NUM_PIECES", 4)
    monkeypatch.setattr(means_file, "PIECE_BYTES", 16)
    folder = write_weights(tmp_path / "large", model=1000)
    path = folder / "model.safetensors"
    before = checksum_of(folder)
    data = bytearray(path.read_bytes())
    stride = len(data) // 4
    data[2 * stride + 17] ^= 1
    path.write_bytes(data)
    assert checksum_of(folder) == before
    data[2 * stride + 15] ^= 1
    path.write_bytes(data)
    assert checksum_of(folder) != before


def test_weight_files(tmp_path):
    """Files are those that a loader reads, as an index names them if there is one."""
    config = make_vllm_config(tmp_path)
    config.model_config.model = str(write_weights(tmp_path / "m", a=4, b=4))
    (tmp_path / "m" / "pytorch_model.bin").touch()
    names = [path.name for path in weight_files(config)]
    assert names == ["a.safetensors", "b.safetensors"]
    index = {"weight_map": {"w": "b.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(config)] == ["b.safetensors"]
    file = tmp_path / "m" / "model.gguf"
    file.touch()
    config.model_config.model = str(file)
    assert weight_files(config) == [file]
    config.model_config.model = "nobody/no-such-model"
    assert weight_files(config) == []


def test_the_path_is_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    path = means_path(KEY)
    assert path.parent == tmp_path / "turbo_means" and path.name.startswith(KEY)


@pytest.mark.parametrize(
    "part, field, value, words",
    [
        ("load_config", "load_format", "dummy", "--load-format"),
        ("model_config", "skip_tokenizer_init", True, "--skip-tokenizer-init"),
        ("parallel_config", "decode_context_parallel_size", 2, "share the context"),
        ("model_config", "runner_type", "draft", "drafter"),
    ],
)
def test_settings_without_means(tmp_path, part, field, value, words):
    config = make_vllm_config(tmp_path)
    config.load_config.load_format = "auto"
    config.model_config.skip_tokenizer_init = False
    assert refusals.means_problem(config) is None
    setattr(getattr(config, part), field, value)
    assert words in refusals.means_problem(config)


class Tokenizer:
    """A tokenizer with a token a word, after one that begins a text."""

    def __init__(self, words: int) -> None:
        self.words = words

    def encode(self, text: str) -> list[int]:
        return [1] + [2 + len(word) for word in text.split()[: self.words]]


@pytest.mark.parametrize("words, positions", [(900, 2048), (900, 500), (100, 2048)])
def test_the_text_is_cut(tmp_path, monkeypatch, words, positions):
    config = make_vllm_config(tmp_path)
    config.model_config.hf_text_config.max_position_embeddings = positions
    tokenizer = Tokenizer(words)
    monkeypatch.setattr(
        serving_means, "cached_tokenizer_from_config", lambda _: tokenizer
    )
    start = serving_means._start(config)
    if words < MIN_TOKENS:
        assert start.problem == serving_means.Problem(serving_means.SHORT_TEXT)
        return
    assert start.text == tokenizer.encode(TEXT)[:positions]
    assert start.problem is None and start.means is None


def test_a_tokenizer_of_another_model(tmp_path, monkeypatch):
    """A token without an embedding would end a process with a GPU."""
    config = make_vllm_config(tmp_path)
    found = []
    for size in (1000, max(Tokenizer(900).encode(TEXT))):
        config.model_config.hf_text_config.vocab_size = size
        config.model_config.model_arch_config.vocab_size = size
        monkeypatch.setattr(
            serving_means, "cached_tokenizer_from_config", lambda _: Tokenizer(900)
        )
        found.append(serving_means._start(config).problem)
    assert found == [None, serving_means.Problem(serving_means.OTHER_TOKENS)]


def test_no_tokenizer(tmp_path, monkeypatch):
    def fail(_: object) -> None:
        raise OSError("there is no tokenizer.json")

    monkeypatch.setattr(serving_means, "cached_tokenizer_from_config", fail)
    start = serving_means._start(make_vllm_config(tmp_path))
    assert start.problem is not None and start.problem.is_error
    assert "OSError: there is no tokenizer.json" in start.problem.reason


def test_the_text_is_long_enough():
    """Tokenizers of large vocabularies have four to five letters a token."""
    assert len(TEXT) > 4.5 * 1024 and TEXT.isascii()


def test_layers_are_grouped_by_reason():
    without = {f"model.layers.{i}.attn": "a" if i % 2 else "b" for i in range(4)}
    assert list(serving_means._grouped(without)) == [
        "Layers 0, 2 have none, because of b",
        "Layers 1, 3 have none, because of a",
    ]


class Model(torch.nn.Module):
    """A model with a layer, whose forward pass is a function."""

    def __init__(self, config: Any, forward: Any, **scoring: Any) -> None:
        super().__init__()
        self.attention = make_module(config)
        self.forward = forward
        runner = self.attention.attn.impl.runner
        runner.means_problem = refusals.means_problem(config, **scoring)


def out_of_memory(input_ids, positions, intermediate_tensors, inputs_embeds):
    raise torch.OutOfMemoryError("2 GiB are missing")


def other_arguments(input_ids, positions, token_types):
    raise AssertionError


@pytest.mark.parametrize(
    "forward, words, is_error",
    [
        (out_of_memory, "OutOfMemoryError: 2 GiB are missing", True),
        (other_arguments, "the model takes other arguments: missing a required", False),
    ],
)
def test_a_failing_pass_fails_no_start(
    rank_config, monkeypatch, log, forward, words, is_error
):
    """A user is warned of errors, and of the way out."""
    config = rank_config
    config.load_config.load_format = "auto"
    config.model_config.skip_tokenizer_init = False
    monkeypatch.setattr(
        serving_means, "cached_tokenizer_from_config", lambda _: Tokenizer(900)
    )
    model = Model(config, forward)
    runner = SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"))
    serving_means.set_key_means(runner, config)
    (line,) = (line for line in log if "means of K stay in" in line.text)
    assert f"because a pass of text fails: {words}" in line.text
    assert (line.level == logging.WARNING) == is_error
    assert ("turbo_means off" in line.text) == is_error
    assert "forward" not in vars(model.attention.attn.impl)


def test_no_pass_for_layers_with_soft_caps(rank_config, log):
    config = rank_config
    config.load_config.load_format = "auto"
    config.model_config.skip_tokenizer_init = False
    model = Model(config, pytest.fail, soft_cap=50.0)
    runner = SimpleNamespace(get_model=lambda: model)
    serving_means.set_key_means(runner, config)
    assert "because all layers have a soft cap." in log[-1].text


def test_nothing_is_done_where_it_is_off(tmp_path):
    config = make_vllm_config(tmp_path)
    config.attention_config.turbo_means = "off"
    runner = SimpleNamespace(get_model=lambda: pytest.fail("the model is not asked"))
    serving_means.set_key_means(runner, config)
