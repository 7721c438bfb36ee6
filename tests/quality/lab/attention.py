# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A transformers model whose attention reads a quantised cache.

Whole texts are run at once; a mask says which tokens a query saw before they were
quantised, so the result is that of prefilling in chunks and then decoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
import transformers
from variants import Variant

from vllm.v1.attention.ops.turbo import reference

# Queries at a time: the scores of all would not fit.
QUERY_BLOCK = 512
NAME = "turbo_lab"
_NUMBERS = count()


@dataclass(frozen=True)
class Reading:
    """The tokens that are read from the cache; others are seen unquantised.

    Attributes:
        prompt: Positions below this are prefilled. The others are decoded: each reads
            all tokens, its own as well, from the cache.
        chunk: Tokens of a prefill's chunk. A prefilled token sees its own chunk
            unquantised; 0: it reads that from the cache as well.
        window: The newest tokens, its own among them, that a token sees unquantised.

    """

    prompt: int = 0
    chunk: int = 0
    window: int = 0

    def raw(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether position ``query`` sees ``key`` unquantised."""
        in_window = query - key < self.window
        if not self.chunk:
            return in_window
        own_chunk = query // self.chunk == key // self.chunk
        return in_window | (query < self.prompt) & own_chunk

    def first_raw(self, query: int) -> int:
        """The first position that ``query`` may see unquantised."""
        first = max(query - max(self.window - 1, 0), 0)
        if not self.chunk or query >= self.prompt:
            return first
        return min(first, query // self.chunk * self.chunk)


STORED = Reading()


def int8_query(query: torch.Tensor) -> torch.Tensor:
    """Rotated queries rounded to 8 bits, one scale a head, and rotated back."""
    rotated = reference.rotate(query)
    scale = rotated.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return reference.inverse_rotate(torch.round(rotated / scale) * scale)


def fp16_query(query: torch.Tensor) -> torch.Tensor:
    """Rotated queries rounded to fp16, scaled to at most 1, and rotated back."""
    rotated = reference.rotate(query)
    scale = rotated.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return reference.inverse_rotate((rotated / scale).half().float() * scale)


QUERIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exact": lambda query: query,
    "int8": int8_query,
    "fp16": fp16_query,
}


@dataclass
class Cache:
    """The cache that the model's attention reads.

    Attributes:
        layers: The variant of each layer; None keeps K and V as they are.
        reading: The tokens that are read from these.
        query: The rounding of queries, a key of QUERIES.
        means: (H, 1, D) a layer, the mean of its K on other text, or (H, T, D).
        recorded: If a list, K and V of each layer are appended to it.
        recorded_queries: If a list, q of each layer and the scale of scores likewise.
        window: The variant that rounds all other tokens; None: none does.

    """

    layers: Sequence[Variant | None]
    reading: Reading = STORED
    query: str = "exact"
    means: Sequence[torch.Tensor] = ()
    recorded: list[tuple[torch.Tensor, torch.Tensor]] | None = field(
        default=None, repr=False
    )
    recorded_queries: list[tuple[torch.Tensor, float]] | None = field(
        default=None, repr=False
    )
    window: Variant | None = None


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of (batch, H, Hq / H, T, keys), beside a logit of each query head."""
    if sinks is None:
        return torch.softmax(scores, -1)
    logits = sinks.view(*scores.shape[1:3], 1, 1).expand_as(scores[..., :1])
    return torch.softmax(torch.cat([scores, logits], -1), -1)[..., :-1]


def two_source_attention(
    query: torch.Tensor,
    raw: tuple[torch.Tensor, torch.Tensor],
    stored: tuple[torch.Tensor, torch.Tensor],
    reading: Reading,
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention to raw or stored keys and values, as ``reading`` says.

    Args:
        query: (batch, Hq, T, D).
        raw: K and V, each (batch, H, T, D).
        stored: Likewise.
        reading: The tokens of which the stored ones are seen.
        scale: The factor of the scores.
        sliding_window: Tokens that a query sees, its own the last; None: all.
        sinks: (Hq,), one more logit of each head's softmax; None: none.

    Returns:
        (batch, Hq, T, D).

    """
    key, value = raw
    stored_key, stored_value = stored
    key_gain, value_gain = key - stored_key, value - stored_value
    batch, num_heads, length, size = query.shape
    num_kv_heads = key.shape[1]
    # Heads that share a K are rows of one product.
    query = query.view(batch, num_kv_heads, -1, length, size)
    output = torch.empty_like(query)
    positions = torch.arange(length, device=query.device)
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        rows = query[:, :, :, start:end].flatten(2, 3) * scale
        scores = rows @ stored_key[:, :, :end].mT
        scores = scores.unflatten(2, (-1, end - start))
        mine, theirs = positions[start:end, None], positions[:end]
        lowest = min(reading.first_raw(start), start)
        is_raw = reading.raw(mine, theirs[lowest:])
        sees_raw = reading.window or (reading.chunk and start < reading.prompt)
        if sees_raw:
            extra = rows @ key_gain[:, :, lowest:end].mT
            extra = extra.unflatten(2, (-1, end - start))
            scores[..., lowest:] += extra.masked_fill_(~is_raw, 0)
        unseen = theirs > mine
        if sliding_window is not None:
            unseen |= theirs <= mine - sliding_window
        scores.masked_fill_(unseen, float("-inf"))
        weights = softmax(scores, sinks)
        result = weights.flatten(2, 3) @ stored_value[:, :, :end]
        if sees_raw:
            weights = weights[..., lowest:].masked_fill(~is_raw, 0)
            result += weights.flatten(2, 3) @ value_gain[:, :, lowest:end]
        output[:, :, :, start:end] = result.unflatten(2, (-1, end - start))
    return output.view(batch, num_heads, length, size)


class LabModel:
    """A causal language model with a replaceable cache, in fp32.

    Args:
        folder: The model, as transformers saves it.
        device: The device that it runs on.

    """

    def __init__(self, folder: Path, device: str):
        # Models that live at the same time attend by functions of their own.
        name = f"{NAME}_{next(_NUMBERS)}"
        transformers.AttentionInterface.register(name, self._attend)
        # The mask is ours as well: no mask of (T, T) is built.
        transformers.AttentionMaskInterface.register(name, lambda *_, **__: None)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=name
        )
        self.model.to(device).eval()
        self.device = device
        config = self.model.config
        self.num_layers = config.num_hidden_layers
        self.head_size = getattr(
            config, "head_dim", config.hidden_size // config.num_attention_heads
        )
        self.cache = Cache([None] * self.num_layers)

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **_,
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer; K and q have had their norm and RoPE."""
        cache, layer = self.cache, module.layer_idx
        if cache.recorded is not None:
            cache.recorded.append((key, value))
        if cache.recorded_queries is not None:
            cache.recorded_queries.append((query, scaling))
        variant = cache.layers[layer]
        stored = raw = key, value
        mean = cache.means[layer] if cache.means else None
        if variant is not None:
            stored = variant.round_trip(key, value, mean)
        if cache.window is not None:
            raw = cache.window.round_trip(key, value, mean)
        query = QUERIES[cache.query](query)
        output = two_source_attention(
            query, raw, stored, cache.reading, scaling, sliding_window, s_aux
        )
        return output.transpose(1, 2).contiguous(), None

    @torch.inference_mode()
    def log_probs(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Log-probabilities of the next token, (batch, T, vocabulary) fp32."""
        self.cache = cache
        logits = self.model(tokens, use_cache=False).logits
        return torch.log_softmax(logits.float(), -1)

    def key_means(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """The mean of each layer's K over ``tokens``, (H, 1, D)."""
        cache = Cache([None] * self.num_layers, recorded=[])
        self.log_probs(tokens, cache)
        assert cache.recorded is not None
        return [key.mean((0, 2))[:, None] for key, _ in cache.recorded]
