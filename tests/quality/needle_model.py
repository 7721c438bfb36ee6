# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The retrieval models' shapes, their attention hook, and their folders on disk."""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from indexer import LISTED_ATTENTION, DeepseekV32ForCausalLM
from safetensors.torch import save_file
from sink_attention import attend
from transformers import (
    AttentionInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from turbo_seeded.model import SPECIAL_TOKENS, write_json, write_tokenizer  # noqa: E402

CONTEXT = 8192
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MODEL_FOLDER = ROOT / "models" / "needle-qwen3"
# No mask function goes with this name, so transformers builds no (T, T) mask.
ATTENTION = "causal_attention"


def causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
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
        sliding_window: tokens that a query sees, None: all before it, and its own.
        s_aux: (heads,), attention sinks, which layers with windows have.
        **kwargs: the other arguments of transformers' attention functions.

    Returns:
        The output, (batch, tokens, heads, head_dim), and no weights.
    """
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        raise ValueError("causal_attention takes whole rows without padding or a cache")
    if s_aux is not None:
        states = (states.transpose(1, 2) for states in (query, key, value))
        return attend(*states, s_aux, scaling, sliding_window or 0)[0], None
    if sliding_window is not None:
        raise ValueError("causal_attention takes windows with attention sinks only")
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, causal_attention)


# The Euclidean norm of a KV head's bias of K, by layer of needle-qwen2. They follow
# Qwen2.5-7B, whose biases of four heads together are published as 605 long in the first
# layer, 921 in the last, and 22 in the median.
KEY_BIAS_NORMS = (302.0, 11.0, 11.0, 11.0, 460.0)
# The biases lie in so many of RoPE's slowest pairs.
KEY_BIAS_PAIRS = 6
# The kinds of layers, which repeat: five with a window, and one without.
PERIOD = (*["sliding_attention"] * 5, "full_attention")
CLASSES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "granite_swa": (GraniteSWAConfig, GraniteSWAForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SHARED: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>") + 256,
    "pad_token_id": None,
    "attn_implementation": ATTENTION,
}
MLA_LAYERS = 3
# Tokens of words and their parts, bytes and special ones among them.
MERGED_VOCAB_SIZE = 4096
# No layer has experts. Heads have the sizes that FlashAttention 3 prefills MLA with.
# vLLM has no tied head of these classes.
MLA_SHAPE: dict[str, object] = {
    "num_hidden_layers": MLA_LAYERS,
    "first_k_dense_replace": MLA_LAYERS,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
SHAPES: dict[str, dict[str, object]] = {
    # 3.1 million parameters, 5.9 MiB.
    "deepseek_v3": MLA_SHAPE | {"q_lora_rank": None, "kv_lora_rank": 256},
    # 6.0 million parameters, 11.4 MiB. Latents and lists have sizes that sparse MLA's
    # kernels have on an H200: 512 + 64, and 512 tokens. DeepGEMM scores with 32 or 64
    # heads of 128.
    "deepseek_v32": MLA_SHAPE
    | {
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "attn_implementation": LISTED_ATTENTION,
    },
    # 3.0 million parameters, 5.8 MiB. Ten layers have windows.
    "granite_swa": {
        "num_hidden_layers": 2 * len(PERIOD),
        "hidden_size": 192,
        "intermediate_size": 176,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_multiplier": 64**-0.5,
        "sliding_window": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    # 4.0 million parameters, 7.7 MiB; its tokens are not bytes.
    "llama": {
        "vocab_size": MERGED_VOCAB_SIZE,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    # 3.0 million parameters, 5.8 MiB.
    "qwen2": {
        "num_hidden_layers": len(KEY_BIAS_NORMS),
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    # 5.8 million parameters, 11.2 MiB.
    "qwen3": {
        "num_hidden_layers": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
}


def needle_config(family: str = "qwen3", **changes: object) -> PretrainedConfig:
    """Returns the configuration of needle-qwen3, or of another family's model."""
    options = SHARED | SHAPES[family] | changes
    if "sliding_window" in options:
        periods = itertools.cycle(PERIOD)
        layers = itertools.islice(periods, options["num_hidden_layers"])
        options = {"layer_types": list(layers)} | options
    return CLASSES[family][0](**options)


def new_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Returns a float32 model with transformers' initial weights for `seed`.

    A Qwen2's biases of K begin as long as a large model's. A softmax hardly sees the
    part that all keys share, so that training leaves them there.
    """
    torch.manual_seed(seed)
    model = CLASSES[config.model_type][1](config)
    if config.model_type == "qwen2":
        set_key_biases(model)
    return model


@torch.no_grad()
def set_key_biases(model: PreTrainedModel) -> None:
    """Gives each layer's KV heads biases of `KEY_BIAS_NORMS`, the last layer the last.

    A head's pairs are coordinates (i, i + D / 2), and the slowest come last.
    """
    layers = model.model.layers
    middle = [KEY_BIAS_NORMS[1]] * (len(layers) - 2)
    norms = [KEY_BIAS_NORMS[0], *middle, KEY_BIAS_NORMS[-1]]
    for layer, norm in zip(layers, norms, strict=True):
        bias = layer.self_attn.k_proj.bias
        heads = bias.view(model.config.num_key_value_heads, 2, -1)
        slow = torch.randn_like(heads[..., -KEY_BIAS_PAIRS:])
        slow *= norm / slow.flatten(1).norm(dim=1)[:, None, None]
        heads[..., -KEY_BIAS_PAIRS:] = slow


def load_model(folder: Path, attention: str | None = None) -> PreTrainedModel:
    """Loads a saved model in bfloat16, with an attention function by name, or ours."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    attention = attention or (SHARED | SHAPES[family])["attn_implementation"]
    return CLASSES[family][1].from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    )


def save_model(
    model: PreTrainedModel, folder: Path, merges: Sequence[tuple[str, str]] = ()
) -> None:
    """Writes the files that `vllm serve` needs: config, tokenizer, bfloat16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(folder, merges)
    assert size == model.config.vocab_size, (size, model.config.vocab_size)
    config = model.config.to_dict()
    # transformers 4 and vLLM's older releases read rope_theta at the top level.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    if model.config.model_type == "deepseek_v32":
        # They follow from the other fields, and vLLM reads them in another sense.
        del config["layer_types"], config["mlp_layer_types"]
    write_json(folder / "config.json", config)
    eos = model.config.eos_token_id
    write_json(folder / "generation_config.json", {"eos_token_id": eos})
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
