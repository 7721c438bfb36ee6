# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The retrieval model's shape, its attention hook, and its folder on disk."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from seeded_model import SPECIAL_TOKENS, write_json, write_tokenizer  # noqa: E402

CONTEXT = 8192
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MODEL_FOLDER = ROOT / "models" / "needle-qwen3"
# No mask function goes with this name, so transformers builds no (T, T) mask.
ATTENTION = "causal_sdpa"


def causal_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attends causally within rows that are neither padded nor cached.

    Args:
        module: the attention layer, unused.
        query: (batch, heads, tokens, head_dim), after RoPE.
        key: (batch, KV heads, tokens, head_dim), after RoPE.
        value: as `key`.
        attention_mask: None; anything else is refused.
        scaling: the softmax scale.
        **kwargs: what transformers passes to every attention function.

    Returns:
        The output, (batch, tokens, heads, head_dim), and no weights.
    """
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        raise ValueError("causal_sdpa takes whole rows without padding or a cache")
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, causal_sdpa)


def needle_config(**changes: object) -> Qwen3Config:
    """Returns the model's configuration: 5.8 million parameters, 11.2 MiB."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>") + 256,
        "pad_token_id": None,
        "attn_implementation": ATTENTION,
    }
    return Qwen3Config(**(settings | changes))


def new_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """Returns a float32 model with transformers' initial weights for `seed`."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def load_model(folder: Path, attention: str = ATTENTION) -> Qwen3ForCausalLM:
    """Loads a saved model in bfloat16, with an attention function by name."""
    return Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    )


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Writes what `vllm serve` needs: config, tokenizer and bfloat16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    config = model.config.to_dict()
    # transformers 4 and vLLM's older releases read rope_theta at the top level.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config |= {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    write_json(folder / "config.json", config)
    eos = model.config.eos_token_id
    write_json(folder / "generation_config.json", {"eos_token_id": eos})
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
