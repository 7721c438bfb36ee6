# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes a drafter with seeded weights for a target model into a folder.

It passes on the target's hidden state and adds some attention of its own, so some
drafts are right and many are not. The head is the target's. EAGLE's attention has heads
of another size and number than the target's. MTP's attention has the target's heads,
and latents if the target has them. The same arguments always write the same bytes.

vLLM makes an MTP layer by the target's configuration, which has to name one.
`target_overrides` returns the needed value of `--hf-overrides`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

# Heads of EAGLE's attention.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
# Deviation of the drafter's own part, beside the target's hidden state.
NOISE = 0.02
ARCHITECTURES = {
    "eagle": ("llama", "LlamaForCausalLM"),
    "eagle3": ("llama", "LlamaForCausalLMEagle3"),
    "mtp": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
}
# MTP's model for a target with latents.
LATENT_MTP = "deepseek_v3", "DeepseekV3ForCausalLM"
# Hidden states of the target that EAGLE 3 takes: the last layer's input and two others.
NUM_AUX = 3


class Weights:
    """Seeded weights of a drafter.

    Args:
        config: Its configuration.
        seed: Seed of the weights.

    """

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self.generator = np.random.Generator(np.random.PCG64(seed))
        self.config = config
        self.hidden = config["hidden_size"]
        self.inner = config["intermediate_size"]

    def normal(self, *shape: int, deviation: float = NOISE) -> torch.Tensor:
        values = self.generator.standard_normal(shape) * deviation
        return torch.from_numpy(values).to(torch.bfloat16)

    def norm(self) -> torch.Tensor:
        return torch.ones(self.hidden, dtype=torch.bfloat16)

    def projection(self, parts: int, kept: int) -> torch.Tensor:
        """A projection from `parts` hidden states to one: the one kept, and noise."""
        weight = self.normal(self.hidden, parts * self.hidden)
        weight[:, kept * self.hidden : (kept + 1) * self.hidden] = torch.eye(
            self.hidden
        )
        return weight

    def attention(self, inputs: int) -> dict[str, torch.Tensor]:
        """Attention whose input is `inputs` hidden states."""
        hidden, head_dim = self.hidden, self.config["head_dim"]
        q_size = self.config["num_attention_heads"] * head_dim
        kv_size = self.config["num_key_value_heads"] * head_dim
        sharp = 4 * hidden**-0.5
        return {
            "self_attn.q_proj.weight": self.normal(
                q_size, inputs * hidden, deviation=sharp
            ),
            "self_attn.k_proj.weight": self.normal(
                kv_size, inputs * hidden, deviation=sharp
            ),
            "self_attn.v_proj.weight": self.normal(
                kv_size, inputs * hidden, deviation=hidden**-0.5
            ),
            "self_attn.o_proj.weight": self.normal(hidden, q_size),
        }

    def latent_attention(self) -> dict[str, torch.Tensor]:
        """Attention to latents, with queries that are not compressed."""
        config, hidden = self.config, self.hidden
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        value = config["v_head_dim"]
        sharp = 4 * hidden**-0.5
        return {
            "self_attn.q_proj.weight": self.normal(
                heads * (nope + rope), hidden, deviation=sharp
            ),
            "self_attn.kv_a_proj_with_mqa.weight": self.normal(
                rank + rope, hidden, deviation=hidden**-0.5
            ),
            "self_attn.kv_a_layernorm.weight": torch.ones(rank, dtype=torch.bfloat16),
            "self_attn.kv_b_proj.weight": self.normal(
                heads * (nope + value), rank, deviation=rank**-0.5
            ),
            "self_attn.o_proj.weight": self.normal(hidden, heads * value),
        }

    def layer(self, inputs: int = 1) -> dict[str, torch.Tensor]:
        """A decoder layer, without the norm before its attention."""
        hidden, inner = self.hidden, self.inner
        has_latents = "kv_lora_rank" in self.config
        attention = self.latent_attention() if has_latents else self.attention(inputs)
        return {
            **attention,
            "mlp.gate_proj.weight": self.normal(inner, hidden),
            "mlp.up_proj.weight": self.normal(inner, hidden),
            "mlp.down_proj.weight": self.normal(hidden, inner),
            "post_attention_layernorm.weight": self.norm(),
        }


def named(prefix: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: weight for name, weight in weights.items()}


def eagle_weights(weights: Weights, target: dict) -> dict[str, torch.Tensor]:
    return named("layers.0.", weights.layer()) | {"fc.weight": weights.projection(2, 1)}


def eagle3_weights(weights: Weights, target: dict) -> dict[str, torch.Tensor]:
    head = "lm_head.weight" if "lm_head.weight" in target else EMBEDDING
    return {
        **named("midlayer.", weights.layer(inputs=2)),
        "midlayer.hidden_norm.weight": weights.norm(),
        "midlayer.input_layernorm.weight": weights.norm(),
        "fc.weight": weights.projection(NUM_AUX, NUM_AUX - 1),
        "norm.weight": target["model.norm.weight"],
        "lm_head.weight": target[head],
    }


def mtp_weights(weights: Weights, target: dict) -> dict[str, torch.Tensor]:
    return {
        **named("model.mtp_block.0.", weights.layer()),
        "model.mtp_block.0.input_layernorm.weight": weights.norm(),
        "model.mtp_emb_norm.0.weight": weights.norm(),
        "model.mtp_hidden_norm.0.weight": weights.norm(),
        "model.mtp_linear_proj.0.weight": weights.projection(2, 1),
    }


def latent_mtp_weights(
    weights: Weights, target: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    own = {
        "input_layernorm.weight": weights.norm(),
        "enorm.weight": weights.norm(),
        "hnorm.weight": weights.norm(),
        "eh_proj.weight": weights.projection(2, 1),
        "embed_tokens.weight": target[EMBEDDING].clone(),
        "shared_head.norm.weight": weights.norm(),
        "shared_head.head.weight": target["lm_head.weight"].clone(),
    }
    prefix = f"model.layers.{weights.config['num_hidden_layers']}."
    return named(prefix, weights.layer() | own)


EMBEDDING = "model.embed_tokens.weight"
WEIGHTS = {"eagle": eagle_weights, "eagle3": eagle3_weights, "mtp": mtp_weights}


def target_overrides(method: str, target: Path) -> dict[str, Any]:
    """Returns the overrides of the target's configuration that a drafter needs."""
    if method != "mtp":
        return {}
    own = json.loads((target / "config.json").read_text())
    if "kv_lora_rank" in own:
        return {"num_nextn_predict_layers": 1}
    layers = ["full_attention"] * (own["num_hidden_layers"] + 1)
    return {"num_nextn_predict_layers": 1, "layer_types": layers}


def draft_config(method: str, own: dict[str, Any]) -> dict[str, Any]:
    """Returns a drafter's configuration.

    Args:
        method: vLLM's speculative method, a key of `WEIGHTS`.
        own: The target's configuration.

    """
    if method == "mtp" and "kv_lora_rank" in own:
        model_type, architecture = LATENT_MTP
        # The drafting layer is dense as well.
        dense = {"first_k_dense_replace": own["num_hidden_layers"] + 1}
        kind = {"architectures": [architecture], "model_type": model_type}
        return own | kind | dense | {"num_nextn_predict_layers": 1}
    model_type, architecture = ARCHITECTURES[method]
    shared = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        *HEADS,
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
    )
    config = {name: own[name] for name in shared} | {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if method == "mtp":
        return config | {"num_nextn_predict_layers": 1}
    return config | HEADS | {"num_hidden_layers": 1}


def write_draft(folder: Path, method: str, target: Path, seed: int = 0) -> None:
    """Writes config and weights of a drafter into `folder`, which it makes.

    Args:
        folder: The drafter's folder.
        method: vLLM's speculative method, a key of `WEIGHTS`.
        target: The target model's folder.
        seed: Seed of the weights.

    """
    own = json.loads((target / "config.json").read_text())
    config = draft_config(method, own)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write = latent_mtp_weights if "kv_lora_rank" in config else WEIGHTS[method]
    tensors = write(Weights(config, seed), load_file(target / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
