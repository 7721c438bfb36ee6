# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""scripts/smollm2.py makes a checkpoint that is whole and of known weights, or none."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import smollm2
import torch
from smollm2 import CheckpointError, digest_of, in_halves, make, module_name
from tokenizers import Tokenizer

# "Ġ" is a space, as byte-level BPE writes it.
WORDS = ["<|im_end|>", "a", "b", "1", "2", "Ġ", "ab"]
FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.rope.freq_base": 1e5,
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
}
TENSORS = {"model.embed_tokens.weight": torch.ones(7, 8, dtype=torch.bfloat16)}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one tensor, in place of the package's."""
    monkeypatch.setattr(smollm2, "SHA256", digest_of(TENSORS.items()))
    monkeypatch.setattr(smollm2, "download", lambda scratch: None)
    monkeypatch.setattr(smollm2, "read_gguf", lambda scratch: (FIELDS, TENSORS))


def test_names():
    assert module_name("token_embd.weight") == "model.embed_tokens.weight"
    assert module_name("output_norm.weight") == "model.norm.weight"
    name = "model.layers.12.self_attn.o_proj.weight"
    assert module_name("blk.12.attn_output.weight") == name


def test_rows_of_heads_are_in_halves():
    """GGUF stores the two rows of a pair that RoPE turns beside each other."""
    rows = np.arange(2 * 6 * 3).reshape(12, 3)
    pairs = rows.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)
    assert pairs[:4, 0].tolist() == [0, 9, 3, 12]
    assert (in_halves(pairs, 2) == rows).all()


def test_a_checkpoint_is_whole(known: None, tmp_path: Path):
    folder = make(tmp_path / "new" / "model")
    assert files(folder.parent) == {"model"}
    assert files(folder) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] and config["head_dim"] == 4
    tokeniser = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Each digit is a token, and a special token is not split.
    assert tokeniser.encode("ab12<|im_end|>").ids == [6, 3, 4, 0]


def test_what_is_made_is_not_made_again(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make(tmp_path / "model")
    monkeypatch.setattr(smollm2, "download", lambda scratch: pytest.fail("again"))
    assert make(tmp_path / "model") == tmp_path / "model"
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="other files"):
        make(tmp_path / "model")


def test_other_weights_are_refused(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="SHA-256"):
        make(tmp_path / "model")
    assert files(tmp_path) == set()


def test_too_little_disk(known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    space = SimpleNamespace(free=100 << 20)
    monkeypatch.setattr(smollm2.shutil, "disk_usage", lambda path: space)
    with pytest.raises(CheckpointError, match="100 MiB free, and 600 are needed"):
        make(tmp_path / "model")
    assert files(tmp_path) == set()


def test_packages_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(command: list[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        assert "--require-hashes" in command
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching")

    monkeypatch.setattr(smollm2.subprocess, "run", fails)
    with pytest.raises(CheckpointError, match="(?s)PIP_INDEX_URL.*No matching"):
        make(tmp_path / "model")
    assert files(tmp_path) == set()


def test_packages_are_pinned():
    lines = smollm2.PACKAGES.read_text().split("\n")
    pins = [line for line in lines if "==" in line]
    hashes = [line for line in lines if "--hash=sha256:" in line]
    assert len(pins) == len(hashes) == 2
