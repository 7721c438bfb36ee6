# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The MLA layer of vLLM with turbo pages: configurations, weights and batches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall
from vllm.v1.attention.ops.turbo.reference import inverse_rotate
from vllm.v1.attention.ops.turbo.reference import latent as reference
from vllm.v1.worker.utils import customize_attention_spec

from ..backend_utils import make_vllm_config
from ..batch_utils import make_common
from ..utils import DEVICE, gaussian, make_block_table, num_blocks_for, slots_of
from .latent_utils import latent_cache

NUM_HEADS, NOPE, V_SIZE, BLOCK_SIZE = 4, 64, 64, 32
FP32 = torch.float32


def make_mla_config(
    folder: Path,
    cache_dtype: str = "turbo4",
    dtype: torch.dtype = FP32,
    rank: int = 512,
    rope: int = 64,
    **changes: Any,
) -> VllmConfig:
    """The configuration of a DeepSeek-V2 with one layer."""
    sizes = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": NUM_HEADS,
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": rope,
        "v_head_dim": V_SIZE,
        "first_k_dense_replace": 1,
        "n_routed_experts": 2,
    }
    arguments: dict[str, Any] = {"max_num_batched_tokens": 1024} | changes
    return make_vllm_config(folder, cache_dtype, dtype, **(sizes | arguments))


def make_mla_layer(config: VllmConfig, **changes: Any) -> MLAAttention:
    """A layer with weights, as models make it. Call this within ``one_rank``."""
    text = config.model_config.hf_text_config
    rank, rope = text.kv_lora_rank, text.qk_rope_head_dim
    context = config.compilation_config.static_forward_context
    name = f"layers.{len(context)}"
    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype), DEVICE:
        projection = ColumnParallelLinear(
            rank, NUM_HEADS * (NOPE + V_SIZE), bias=False, prefix=f"{name}.kv_b_proj"
        )
        weight = projection.weight
        values = gaussian(*weight.shape, dtype=FP32, seed=1) / rank**0.5
        weight.data.copy_(values)
        arguments: dict[str, Any] = dict(
            num_heads=NUM_HEADS,
            scale=(NOPE + rope) ** -0.5,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=rope,
            v_head_dim=V_SIZE,
            q_lora_rank=None,
            kv_lora_rank=rank,
            kv_b_proj=projection,
            cache_config=config.cache_config,
            prefix=f"{name}.attn",
        )
        layer = MLAAttention(**(arguments | changes))
        projection.quant_method.process_weights_after_loading(projection)
        layer.process_weights_after_loading(dtype)
    return layer


def make_mla_builder(config: VllmConfig, layer: MLAAttention) -> Any:
    """The builder of a layer, as model runners make it."""
    with set_current_vllm_config(config):
        spec = layer.get_kv_cache_spec(config)
        spec = customize_attention_spec(layer.get_attn_backend(), spec)
        builder = layer.get_attn_backend().get_builder_cls()
        return builder(spec, [layer.layer_name], config, DEVICE)


@dataclass
class MLABatch:
    """A batch of an MLA layer, as the model runner hands it over.

    Attributes:
        requests: Query length and context length of each request, decodes and extends
            first.
        layer: The layer that serves them.
        latents: All latents, (S, L), and rotary keys, (S, R), of each request.
        slots: The slots of all tokens of each request, (S,) int64.
        cache: (num_blocks, N, C) uint8.
        common: The model runner's metadata.
        query: (T, Hq, nope + R).
        kv_c: (T, L), latents of the new tokens.
        k_pe: (T, 1, R), rotary keys of the new tokens.

    """

    requests: list[tuple[int, int]]
    layer: MLAAttention
    latents: list[tuple[torch.Tensor, torch.Tensor]]
    slots: list[torch.Tensor]
    cache: torch.Tensor
    common: CommonAttentionMetadata
    query: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor

    @classmethod
    def make(
        cls, layer: MLAAttention, requests: list[tuple[int, int]], padding: int = 0
    ) -> "MLABatch":
        """A batch whose contexts are stored in turbo pages. Other bytes are 0xFF.

        Args:
            layer: The layer that serves it.
            requests: Query length and context length of each request.
            padding: Number of requests without tokens at the end, as in a CUDA graph.

        """
        layout = layer.impl.runner.layout
        batch = cls.of_vectors(layer, requests, layout.rank, layout.rope, padding)
        batch.cache = latent_cache(layout, len(batch.cache), BLOCK_SIZE)
        mean = layer.impl.runner.mean
        if mean is not None:
            batch.latents = [(x + mean.latent.to(x), y) for x, y in batch.latents]
            batch.kv_c += mean.latent.to(batch.kv_c)
        for (_, context), slots, (latent, rope) in zip(
            requests, batch.slots, batch.latents
        ):
            batch.store(batch.cache, slots[:context], latent[:context], rope[:context])
        return batch

    @classmethod
    def of_vectors(
        cls,
        layer: MLAAttention,
        requests: list[tuple[int, int]],
        rank: int,
        rope: int,
        padding: int = 0,
    ) -> "MLABatch":
        """A batch whose cache has no bytes yet, (num_blocks, N, 0)."""
        dtype = layer.kv_b_proj.weight.dtype
        padded = [*requests, *[(0, 0)] * padding]
        seq_lens = [sum(request) for request in padded]
        table = make_block_table(seq_lens, BLOCK_SIZE)
        latents = [
            (
                gaussian(length, rank, dtype=dtype, seed=row + 10),
                gaussian(length, rope, dtype=dtype, seed=row + 40),
            )
            for row, length in enumerate(map(sum, requests))
        ]
        slots = [
            slots_of(table[row], 0, sum(request), BLOCK_SIZE)
            for row, request in enumerate(requests)
        ]
        query_lens = [query_len for query_len, _ in padded]
        # Each padded request has as many rows of padding as the longest request has.
        num_padding = padding * max(query_lens)
        num_tokens = sum(query_lens) + num_padding
        own = [x[context:] for (_, context), x in zip(requests, slots)]
        own.append(torch.full((num_padding,), -1, device=DEVICE))
        common = make_common(query_lens, seq_lens, table, torch.cat(own))
        common = common.replace(num_actual_tokens=num_tokens)
        kv_c, k_pe = (
            torch.cat(
                [
                    *(x[context:] for (_, context), x in zip(requests, vectors)),
                    vectors[0].new_zeros(num_padding, vectors[0].shape[1]),
                ]
            )
            for vectors in zip(*latents)
        )
        blocks = num_blocks_for(seq_lens, BLOCK_SIZE)
        return cls(
            requests,
            layer,
            latents,
            slots,
            torch.empty(blocks, BLOCK_SIZE, 0, dtype=torch.uint8, device=DEVICE),
            common,
            gaussian(num_tokens, NUM_HEADS, NOPE + rope, dtype=dtype, seed=7),
            kv_c,
            k_pe.unsqueeze(1),
        )

    def run(self, config: VllmConfig, metadata: MLACommonMetadata) -> torch.Tensor:
        """The layer's output, (T, Hq, V)."""
        name = self.layer.layer_name
        self.layer.kv_cache = self.cache
        slots = {name: self.common.slot_mapping}
        shape = torch.Size((self.query.shape[0], NUM_HEADS * V_SIZE))
        with set_forward_context({name: metadata}, config, slot_mapping=slots):
            output = self.layer(self.query.clone(), self.kv_c, self.k_pe, shape)
        return output.view(-1, NUM_HEADS, V_SIZE)

    def store(
        self,
        cache: torch.Tensor,
        slots: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
    ) -> None:
        """Store (T, L) and (T, R) at slots as the layer does, by the reference."""
        layout, mean = self.layer.impl.runner.layout, self.layer.impl.runner.mean
        parts = slots, latent, rope if layout.rope else None, layout
        own = None if mean is None else mean.latent
        reference.store(LatentStoreCall(cache, *parts, own))

    def stored(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All stored latents of a request, rotated back, and its rotary keys."""
        layout = self.layer.impl.runner.layout
        latent, rope = reference.load(self.cache, self.slots[row], layout)
        mean = self.layer.impl.runner.mean
        latent = inverse_rotate(latent)
        return latent if mean is None else latent + mean.latent, rope

    def expected(self, raw_from: int | None) -> torch.Tensor:
        """The output in fp32, (T, Hq, V), without absorption, over the cache's tokens.

        Args:
            raw_from: Query length from which on a request sees its own tokens as
                computed; None: no request does.

        """
        seen = []
        for row, (query_len, context) in enumerate(self.requests):
            vectors = self.stored(row)
            if raw_from is not None and query_len >= raw_from:
                vectors = tuple(
                    torch.cat([stored[:context], raw[context:].float()])
                    for stored, raw in zip(vectors, self.latents[row])
                )
            seen.append(vectors)
        return self.attend(seen)

    def attend(
        self,
        seen: list[tuple[torch.Tensor, ...]],
        lists: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output in fp32, (T, Hq, V).

        Args:
            seen: Latents and rotary keys by request.
            lists: (T, K), the positions that query tokens see, -1 for none; None for
                all up to their own.

        """
        weight = self.layer.kv_b_proj.weight.float()
        weight = weight.view(NUM_HEADS, NOPE + V_SIZE, -1)
        outputs, begin = [], 0
        for (query_len, context), (latent, rope) in zip(self.requests, seen):
            projected = torch.einsum("tl,hdl->htd", latent.float(), weight)
            key, value = projected.split([NOPE, V_SIZE], -1)
            key = torch.cat([key, rope.float().expand(NUM_HEADS, -1, -1)], -1)
            query = self.query[begin : begin + query_len].float().transpose(0, 1)
            scores = query @ key.transpose(1, 2) * self.layer.scale
            hidden = torch.ones(query_len, query_len + context, dtype=torch.bool)
            hidden.triu_(context + 1)
            if lists is not None:
                own = lists[begin : begin + query_len, :, None]
                hidden = (own != torch.arange(query_len + context)).all(1)
            scores.masked_fill_(hidden.to(scores.device), -torch.inf)
            outputs.append((scores.softmax(-1) @ value).transpose(0, 1))
            begin += query_len
        return torch.cat(outputs)
