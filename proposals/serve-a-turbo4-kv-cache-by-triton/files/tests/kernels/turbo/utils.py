# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pages of turbo4, what attention to them should give, and a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.format import KEY_GAIN, TurboFormat

from . import reference

DEVICE = torch.device("cuda" if current_platform.is_cuda() else "cpu")


def pages(num_blocks: int, num_heads: int, block_size: int, head_size: int):
    """Pages (B, H, N, C) of old bytes, which are NaN if they are read as scales."""
    shape = (num_blocks, num_heads, block_size, TurboFormat(head_size).slot_size)
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)


@dataclass
class Sequences:
    """Sequences whose K and V are stored in pages, in blocks of any order.

    ``key`` and ``value`` have (tokens, H, D) of each, dequantised and not rotated.
    """

    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    key: list[torch.Tensor]
    value: list[torch.Tensor]

    @classmethod
    def make(
        cls, lens: list[int], num_heads: int, head_size: int, block_size: int = 16
    ) -> "Sequences":
        torch.manual_seed(0)
        layout = TurboFormat(head_size)
        per_seq = max(1, -(-max(lens) // block_size))
        num_blocks = len(lens) * per_seq + 1
        cache = pages(num_blocks, num_heads, block_size, head_size).cpu()
        table = torch.randperm(num_blocks - 1).view(len(lens), per_seq) + 1
        keys, values = [], []
        for row, n in enumerate(lens):
            where = torch.arange(n)
            slots = table[row, where // block_size] * block_size + where % block_size
            x = torch.randn(2, n, num_heads, head_size).bfloat16()
            x[0] += 4 * torch.randn(num_heads, head_size).bfloat16()
            reference.store(x[0], x[1], cache, slots)
            key, value = reference.load(cache, slots, layout)
            keys.append(reference.inverse_rotate(key * KEY_GAIN))
            values.append(reference.inverse_rotate(value))
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        tensors = (cache, table.int(), seq_lens)
        return cls(*(x.to(DEVICE) for x in tensors), keys, values)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention in fp64 of the newest tokens of one sequence: (Q, Hq, D)."""
    query, key, value = (x.double().cpu() for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    last = torch.arange(len(key) - len(query), len(key))[:, None]
    distance = last - torch.arange(len(key))
    seen = (distance >= 0) & (distance < (window or len(key) + 1))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def assert_near(output: torch.Tensor, expected: torch.Tensor, rounding: float) -> None:
    """The largest error is at most ``rounding`` of the largest output."""
    error = (output.double().cpu() - expected).abs().max() / expected.abs().max()
    assert error <= rounding


def write_model(folder: Path) -> str:
    """A small model of random weights, whose second layer has a sliding window."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        # Larger than usual, so that attention decides the answers.
        initializer_range=0.06,
        dtype="float16",
    )
    model = AutoModelForCausalLM.from_config(config).half()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    model.config.sliding_window = 40
    model.save_pretrained(folder)
    return str(folder)


def engine_args(folder: str, **changes: Any) -> dict[str, Any]:
    """Arguments of an engine or an ``EngineArgs`` with turbo4."""
    args: dict[str, Any] = {
        "model": folder,
        "dtype": "float16",
        "kv_cache_dtype": "turbo4",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "block_size": 32,
        "num_gpu_blocks_override": 64,
        "gpu_memory_utilization": 0.2,
    }
    if not current_platform.is_cuda():
        args |= {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}}
    return args | changes
