# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Small models of other families than Qwen3's, with seeded weights.

transformers writes them, under the names that its own checkpoints have. Their tokens
mean nothing, but attention decides them: see `scripts/turbo_seeded/model.py`.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from turbo_seeded.model import write_tokenizer

WINDOW = 48
SOFT_CAP = 4.0
SLIDING = ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 64
# MiMo-V2's sizes, of full and, with a prefix, of windowed layers.
MIMO = (
    ("num_attention_heads", HEADS),
    ("num_key_value_heads", KV_HEADS),
    ("head_dim", 192),
    ("v_head_dim", 128),
)


class Family(NamedTuple):
    """A kind of model.

    Attributes:
        model_type: The name that transformers has for it.
        changes: Fields of its configuration beyond `common_config`.
        added: Numbers that are added to parameters whose names contain the key.
        factors: Factors of parameters whose names contain the key.
        has_sinks: Whether layers have attention sinks, which the class lacks.

    """

    model_type: str
    changes: dict[str, Any] = {}
    added: dict[str, float] = {}
    factors: dict[str, float] = {}
    has_sinks: bool = False


FAMILIES = {
    # Its heads' logits have a soft cap, here one that most scores feel.
    "gemma2": Family(
        "gemma2",
        {
            "layer_types": SLIDING,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": HEAD_DIM,
            "attn_logit_softcapping": SOFT_CAP,
        },
        # Else the embedding, which is also the head, would decide every token.
        {"post_attention_layernorm": 7},
        # The model has no norm of q.
        {"q_proj": 2},
    ),
    "gemma3": Family(
        "gemma3_text",
        {
            "layer_types": SLIDING,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": HEAD_DIM,
        },
        # The embedding as in Gemma 2.
        {"post_attention_layernorm": 7},
    ),
    # The last two layers read the caches of the two before them, as below.
    "gemma3n": Family(
        "gemma3n_text",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 16,
        },
        # As in Gemma 4, but half as much: its streams amplify each code that flips by
        # rounding, and hardly mix then.
        {"q_norm": -0.75, "post_attention_layernorm": 3},
        {"prediction_coefs": 0.3, "correction_coefs": 0.3},
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "global_head_dim": HEAD_DIM,
            "hidden_size_per_layer_input": 0,
        },
        # Scores are not scaled; the embedding as in Gemma 2.
        {"q_norm": -0.75, "post_attention_layernorm": 7},
    ),
    "cohere2": Family(
        "cohere2",
        {"layer_types": SLIDING, "sliding_window": WINDOW, "logit_scale": 1.0},
    ),
    # With attention sinks beside windows, as vLLM has it.
    "granite": Family(
        "granite",
        {
            "layer_types": SLIDING,
            "sliding_window": WINDOW,
            "attention_sinks": True,
            "attention_multiplier": HEAD_DIM**-0.5,
        },
        has_sinks=True,
    ),
    "llama4": Family(
        "llama4_text",
        {
            "layer_types": [kind.replace("sliding", "chunked") for kind in SLIDING],
            "attention_chunk_size": 64,
            "no_rope_layers": [int(kind[0] == "s") for kind in SLIDING],
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "intermediate_size_mlp": 2 * HIDDEN,
            "num_local_experts": 2,
        },
    ),
    # Every other layer is a short convolution.
    "lfm2": Family(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            # Published configurations have these fields, and the class lacks them.
            "conv_dim": HEADS * HEAD_DIM,
            "block_dim": HEADS * HEAD_DIM,
            "hidden_size": HEADS * HEAD_DIM,
        },
        # Else convolutions would decide every token.
        {},
        {"self_attn.out_proj": 4},
    ),
    # Every third layer is Mamba2's, with a state as large as 77.2 tokens of turbo4.
    "nemotron_h": Family(
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp"] * 2,
            "num_hidden_layers": 6,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 32,
            "n_groups": 2,
            "chunk_size": 16,
        },
        # Else Mamba2 would decide every token.
        {},
        {"o_proj": 4},
    ),
    # Every other layer is a gated delta net, with a state as large as 68.7 tokens of
    # turbo4. Attention is as the published models have it: heads of 256 and a gate.
    "qwen3_next": Family(
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 256,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
            # Each token has all experts: rounding cannot leave one out.
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": HIDDEN,
            "shared_expert_intermediate_size": HIDDEN,
        },
        # States hardly last without this.
        {"A_log": -6},
        # Else the delta nets would decide every token.
        {"o_proj": 4},
    ),
    # Multi-head latent attention, dense, of the published models' sizes of latents, and
    # of heads that Hopper's prefill takes.
    "deepseek_v2": Family(
        "deepseek_v2",
        {
            "num_key_value_heads": HEADS,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": HEAD_DIM,
            "v_head_dim": 2 * HEAD_DIM,
            "first_k_dense_replace": 4,
            "n_routed_experts": 2,
        },
        {},
        # Latents are normalised, and twice as long as the hidden state.
        {"kv_b_proj": 0.2, "q_proj": 0.6},
    ),
    "olmo3": Family("olmo3", {"layer_types": SLIDING, "sliding_window": WINDOW}),
}


def common_config(vocab_size: int) -> dict[str, Any]:
    """Returns the fields that all configurations have."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": vocab_size - 1,
        "pad_token_id": vocab_size - 3,
    }


def seed_weights(model: nn.Module, family: Family, seed: int) -> None:
    """Draws a model's weights.

    Matrices are normal. The norm of q, if there is one, is doubled, so that single
    tokens far back still decide the output.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.3, generator=generator)
            added = {"q_norm": 1, "q_layernorm": 1} | family.added
            tensor += sum(x for part, x in added.items() if part in key)
            tensor *= math.prod(x for part, x in family.factors.items() if part in key)


def write_mimo(folder: Path, seed: int = 0) -> Path:
    """Writes a dense MiMo-V2 as ``write_family`` does: K of 192 and V of 128.

    Its windowed layers have attention sinks. The fields and names are those of the
    published checkpoints, which transformers changes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    windowed = [int(kind[0] == "s") for kind in SLIDING]
    config = common_config(write_tokenizer(folder)) | {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        **{f"{kind}{name}": size for kind in ("", "swa_") for name, size in MIMO},
        "sliding_window": WINDOW,
        "sliding_window_size": WINDOW,
        "hybrid_layer_pattern": windowed,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "moe_layer_freq": [0] * len(windowed),
        "n_routed_experts": 2,
        "moe_intermediate_size": HIDDEN,
        "partial_rotary_factor": 0.334,
        "swa_rope_theta": 10000,
        "attention_value_scale": 0.707,
        "layernorm_epsilon": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    sizes = dict(MIMO)
    queries, outputs = HEADS * sizes["head_dim"], HEADS * sizes["v_head_dim"]
    keys, values = KV_HEADS * sizes["head_dim"], KV_HEADS * sizes["v_head_dim"]
    shapes = {"model.embed_tokens": (config["vocab_size"], HIDDEN)}
    shapes["lm_head"] = shapes["model.embed_tokens"]
    weights = {"model.norm.weight": torch.ones(HIDDEN)}
    for index, has_window in enumerate(windowed):
        layer = f"model.layers.{index}"
        for name, rows in (("q", queries), ("k", keys), ("v", values)):
            shapes[f"{layer}.self_attn.{name}_proj"] = (rows, HIDDEN)
        shapes[f"{layer}.self_attn.o_proj"] = (HIDDEN, outputs)
        for name in ("gate", "up"):
            shapes[f"{layer}.mlp.{name}_proj"] = (2 * HIDDEN, HIDDEN)
        shapes[f"{layer}.mlp.down_proj"] = (HIDDEN, 2 * HIDDEN)
        for name in ("input", "post_attention"):
            weights[f"{layer}.{name}_layernorm.weight"] = torch.ones(HIDDEN)
        if has_window:
            sinks = torch.linspace(0, 5, HEADS)
            weights[f"{layer}.self_attn.attention_sink_bias"] = sinks
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        # The model has no norm of q.
        factor = 0.15 if "q_proj" in name else 0.3
        weights[f"{name}.weight"] = factor * torch.randn(shape, generator=generator)
    stored = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_family(folder: Path, name: str, seed: int = 0) -> Path:
    """Writes a model's config, weights and tokenizer into a folder, and returns it."""
    if name == "mimo_v2":
        return write_mimo(folder, seed)
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    common = common_config(write_tokenizer(folder))
    config = AutoConfig.for_model(family.model_type, **common | family.changes)
    # The seed of the parameters that the class draws, and that are kept.
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if family.has_sinks:
        for layer in model.model.layers:
            # A sink weighs as much as a key or two.
            layer.self_attn.sinks = nn.Parameter(torch.linspace(0, 5, HEADS))
    seed_weights(model, family, seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
