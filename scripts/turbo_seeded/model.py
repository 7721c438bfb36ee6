# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes a small Qwen3 with seeded weights and a byte tokenizer into a folder.

Its text has no meaning, but attention decides its tokens. With vLLM's dummy weights (at
most 1e-3) a zeroed attention would change no greedy token. The same arguments always
write the same bytes.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Tokens whose rows of the head are not zero, so that greedy text is printable.
PRINTABLE = (10, *range(32, 127))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Returns the character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself. The others take code points from 256 on.
    """
    own = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


def tokenizer_content(
    merges: Sequence[tuple[str, str]], of_words: bool
) -> dict[str, Any]:
    """Returns the content of tokenizer.json, byte-level.

    Args:
        merges: Pairs of tokens that become one, in this order.
        of_words: Whether no merge crosses the border of a word or a digit.

    """
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    first = len(vocab)
    if merges:
        # Two pairs may make the same token.
        tokens = (*SPECIAL_TOKENS, *dict.fromkeys("".join(pair) for pair in merges))
        vocab |= {token: first + index for index, token in enumerate(tokens)}
    special = [
        {
            "id": first + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": of_words,
    }
    digits = {"type": "Digits", "individual_digits": True}
    words = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": words if of_words else byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }


def write_tokenizer(folder: Path, merges: Sequence[tuple[str, str]] = ()) -> int:
    """Writes a byte-level tokenizer, and returns its vocabulary's size.

    Args:
        folder: The model's folder.
        merges: Pairs of tokens that become one, in this order, within words; digits
            stay apart. Without merges, each token is a byte.

    """
    tokenizer = tokenizer_content(merges, of_words=bool(merges))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", settings)
    special = {token["id"] for token in tokenizer["added_tokens"]}
    return len(special | set(tokenizer["model"]["vocab"].values()))


def model_config(args: argparse.Namespace, vocab_size: int) -> dict:
    """Returns config.json's content."""
    eos = vocab_size - 1
    if args.experts:
        kind = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": args.experts,
            "num_experts_per_tok": args.experts_per_token,
            "moe_intermediate_size": args.hidden_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    elif args.llama:
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    else:
        kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {
        **kind,
        "hidden_size": args.hidden_size,
        "intermediate_size": 2 * args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": args.initializer_range,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def seeded_weights(
    config: dict, seed: int, head_range: float | None
) -> "dict[str, torch.Tensor]":
    """Returns the checkpoint's tensors, in bfloat16.

    Norm weights are one, except the query norm's. A larger weight sharpens the softmax,
    so that single distant tokens still decide the output.
    """
    # Commands that only need this module's tokens need not wait for the import.
    import torch

    generator = np.random.Generator(np.random.PCG64(seed))
    hidden = config["hidden_size"]
    head_dim, vocab = config["head_dim"], config["vocab_size"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim

    def normal(*shape: int, scale: float | None = None) -> "torch.Tensor":
        scale = config["initializer_range"] if scale is None else scale
        values = generator.standard_normal(shape) * scale
        return torch.from_numpy(values).to(torch.bfloat16)

    def constant(size: int, value: float = 1.0) -> "torch.Tensor":
        return torch.full((size,), value, dtype=torch.bfloat16)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": constant(hidden),
            name + "self_attn.q_proj.weight": normal(q_size, hidden),
            name + "self_attn.k_proj.weight": normal(kv_size, hidden),
            name + "self_attn.v_proj.weight": normal(kv_size, hidden),
            name + "self_attn.o_proj.weight": normal(hidden, q_size),
            name + "post_attention_layernorm.weight": constant(hidden),
        }
        if config["model_type"] != "llama":
            weights |= {
                name + "self_attn.q_norm.weight": constant(head_dim, 2.0),
                name + "self_attn.k_norm.weight": constant(head_dim),
            }
        mlps = {name + "mlp.": config["intermediate_size"]}
        if "num_experts" in config:
            experts = range(config["num_experts"])
            inner = config["moe_intermediate_size"]
            mlps = {f"{name}mlp.experts.{expert}.": inner for expert in experts}
            weights[name + "mlp.gate.weight"] = normal(len(experts), hidden)
        for mlp, size in mlps.items():
            weights |= {
                mlp + "gate_proj.weight": normal(size, hidden),
                mlp + "up_proj.weight": normal(size, hidden),
                mlp + "down_proj.weight": normal(hidden, size),
            }
    weights["model.norm.weight"] = constant(hidden)
    head = torch.zeros(vocab, hidden, dtype=torch.bfloat16)
    head[list(PRINTABLE)] = normal(len(PRINTABLE), hidden, scale=head_range)
    weights["lm_head.weight"] = head
    return weights


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """Writes config, weights and tokenizer into `folder`, which it makes."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(args, write_tokenizer(folder))
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]}
    )
    weights = seeded_weights(config, args.seed, args.head_range)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--initializer-range", type=float, default=0.3)
    parser.add_argument("--head-range", type=float, help="deviation of the head")
    parser.add_argument("--experts", type=int, default=0, help="0: no experts")
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--llama", action="store_true", help="no norms of q and k")
    return parser


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    write_model(arguments.folder, arguments)
