# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Small models that draft with layers of their own, or with their target's caches."""

import json
import math
from pathlib import Path

import torch
from families import write_family
from safetensors.torch import load_file, save_file


def write_drafting_hybrid(folder: Path) -> Path:
    """Writes a hybrid whose checkpoint has a layer that predicts a further token.

    It generates two tokens alone, so that half of its drafts are right by chance.
    """
    write_family(folder, "qwen3_next")
    weights = load_file(folder / "model.safetensors")
    head, first = weights["lm_head.weight"], ord("a")
    # All other rows are zero, so that this row wins or its negative.
    row = head[first].clone()
    head.zero_()
    head[first], head[first + 1] = row, -row
    generator = torch.Generator().manual_seed(1)
    hidden = head.shape[1]
    drafter = {"fc": torch.empty(hidden, 2 * hidden)}
    norms = ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")
    drafter |= {name: torch.zeros(hidden) for name in norms}
    drafter = {f"mtp.{name}.weight": tensor for name, tensor in drafter.items()}
    last = "model.layers.3."
    drafter |= {
        name.replace(last, "mtp.layers.0."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(last)
    }
    for tensor in drafter.values():
        if tensor.dim() > 1:
            tensor.normal_(0, 0.3, generator=generator)
    weights |= {name: tensor.bfloat16() for name, tensor in drafter.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_drafting_target(folder: Path) -> None:
    """Writes a Gemma 4 that its last two layers decide, which read others' caches.

    A drafter with the same layers lacks the K and V of the newest tokens, and is at the
    position of the one before them. It is right all the same, most of the time, because
    positions are close to each other, and no token attends to itself.
    """
    write_family(folder, "gemma4")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = {"rope_type": "linear", "factor": 64.0, "rope_theta": 10_000}
    config["rope_parameters"] = dict.fromkeys(config["rope_parameters"], rope)
    path.write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    size = config["head_dim"]
    num_own = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    for name, tensor in weights.items():
        layer = int(name.split(".")[2]) if ".layers." in name else num_own
        if layer < num_own and "post_" in name:
            tensor.zero_()
        # Else each token would repeat itself, and earlier tokens hardly count.
        if layer >= num_own:
            factors = {"post_attention": 4, "q_norm": 3}
            tensor *= math.prod(x for part, x in factors.items() if part in name)
    for layer in range(num_own, config["num_hidden_layers"]):
        query = weights[f"model.layers.{layer}.self_attn.q_proj.weight"]
        heads = query.float().unflatten(0, (config["num_key_value_heads"], -1, size))
        # The earlier layer of the same kind, whose cache this one reads.
        key = f"model.layers.{layer - 2}.self_attn.k_proj.weight"
        weights[key] = -heads.sum(1).flatten(0, 1).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_assistant(folder: Path, target: Path) -> None:
    """Writes Gemma 4's drafter, with the layers of a target that read others' caches.

    It has two of each query head of the target, which count half.
    """
    own = json.loads((target / "config.json").read_text())
    num_layers, hidden = own["num_kv_shared_layers"], own["hidden_size"]
    first = own["num_hidden_layers"] - num_layers
    text_config = own | {
        "num_hidden_layers": num_layers,
        "layer_types": own["layer_types"][first:],
        "num_attention_heads": 2 * own["num_attention_heads"],
        "vocab_size_per_layer_input": 0,
    }
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": hidden,
        "text_config": text_config,
        "dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    heads = (-1, own["head_dim"])
    # It takes the embedding, and ignores the target's hidden state.
    identity = torch.eye(hidden)
    weights = {
        "pre_projection.weight": torch.cat((identity, 0 * identity), dim=1),
        "post_projection.weight": identity,
    }
    for name, tensor in load_file(target / "model.safetensors").items():
        if ".layers." in name:
            layer = int(name.split(".")[2])
            if layer < first:
                continue
            name = name.replace(f".{layer}.", f".{layer - first}.")
        if "q_proj" in name:
            tensor = tensor.unflatten(0, heads).repeat_interleave(2, 0).flatten(0, 1)
        if "o_proj" in name:
            tensor = tensor.unflatten(1, heads).repeat_interleave(2, 1).flatten(1, 2)
            tensor = tensor / 2
        weights[name] = tensor
    weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
