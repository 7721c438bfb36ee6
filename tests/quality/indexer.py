# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek V3.2 whose indexers score and list tokens as vLLM's do.

An indexer's queries come from those of the attention, before they are projected up, and
its one key from the hidden state. The first dimensions are rotary, in halves. A token's
score sums the heads' products where they are positive, each times a weight. Queries and
keys are rounded to FP8 with a power of two as the scale of a head.

transformers has the same scores without FP8, and computes those of a whole row at once.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as upstream

# The attention of rows that are neither padded nor cached, by lists or to all tokens.
LISTED_ATTENTION = "listed_attention"
MAX_FP8 = 448.0
SMALLEST_PEAK = 1e-4
# Products of heads and tokens that are computed at once.
PRODUCTS_AT_ONCE = 1 << 28
# Query tokens whose masks are made at once.
QUERIES_AT_ONCE = 512

Rotary = tuple[torch.Tensor, torch.Tensor]


def rotate(states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotates the first dimensions, whose pairs are (i, i + half).

    Args:
        states: (..., head_dim).
        rotary: Cosines and sines of all rotary dimensions, as wide as `states` or 1.

    """
    cos, sin = (table.float() for table in rotary)
    size = cos.shape[-1]
    turned, rest = states[..., :size].float(), states[..., size:]
    turned = turned * cos + upstream.rotate_half(turned) * sin
    return torch.cat([turned.to(states.dtype), rest], -1)


def round_to_fp8(states: torch.Tensor) -> torch.Tensor:
    """Returns what FP8 keeps of vectors, whose scales are powers of two."""
    exact = states.float()
    peak = exact.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK)
    scale = (peak / MAX_FP8).log2().ceil().exp2()
    codes = (exact / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(states.dtype)


def index_scores(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns each token's score for each query token, (rows, Q, T) float32.

    Args:
        queries: (rows, Q, heads, head_dim).
        keys: (rows, T, head_dim).
        weights: (rows, Q, heads) float32.

    """
    products = queries.flatten(1, 2) @ keys.transpose(1, 2)
    positive = products.unflatten(1, queries.shape[1:3]).relu().float()
    return (positive * weights.unsqueeze(-1)).sum(2)


def is_later(places: torch.Tensor, length: int) -> torch.Tensor:
    """Returns which of a row's tokens come after each of some places.

    Args:
        places: (..., Q), positions of query tokens.
        length: Tokens of a row.

    """
    return torch.arange(length, device=places.device) > places.unsqueeze(-1)


class Indexer(upstream.DeepseekV32Indexer):
    """An indexer, which lists tokens unless `lists` is False.

    Attributes:
        lists: Whether the layer's attention is to listed tokens.
        observer: A function of this indexer and the layer's queries, keys and scale,
            called when the layer attends.
        inputs: Arguments of the last call, for an observer.

    """

    lists = True
    observer: Callable[["Indexer", torch.Tensor, torch.Tensor, float], None] | None
    observer = None
    inputs: tuple[torch.Tensor, torch.Tensor, Rotary]

    def queries(self, compressed: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Returns (rows, Q, heads, head_dim) of compressed queries, (rows, Q, rank)."""
        states = project(self.wq_b, compressed).unflatten(-1, (self.n_heads, -1))
        cos, sin = rotary
        return rotate(states, (cos.unsqueeze(2), sin.unsqueeze(2)))

    def keys(self, hidden: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Returns (rows, T, head_dim) of hidden states, (rows, T, hidden size)."""
        states, norm = project(self.wk, hidden).float(), self.k_norm
        weight, bias = norm.weight.float(), norm.bias.float()
        states = F.layer_norm(states, norm.normalized_shape, weight, bias, norm.eps)
        return rotate(states.to(hidden.dtype), rotary)

    def head_weights(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns (rows, Q, heads) float32, with the scale of the products."""
        scale = self.softmax_scale * self.n_heads**-0.5
        return project(self.weights_proj, hidden).float() * scale

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: Rotary,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: object = None,
    ) -> torch.Tensor | None:
        """Returns the lists, (rows, T, index_topk) integers; None to attend to all.

        A list of a token that has fewer before it also has later ones. A row that is no
        longer than the lists needs none.
        """
        if past_key_values is not None:
            raise ValueError("the indexer takes whole rows without a cache")
        if self.observer is not None:
            self.inputs = hidden_states, q_resid, position_embeddings
        if not self.lists or hidden_states.shape[1] <= self.index_topk:
            return None
        return self.list_tokens(hidden_states, q_resid, position_embeddings)

    @torch.no_grad()
    def list_tokens(
        self, hidden: torch.Tensor, compressed: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        """Lists the tokens of whole rows, some query tokens at a time."""
        num_rows, length = hidden.shape[:2]
        queries = round_to_fp8(self.queries(compressed, rotary))
        keys = round_to_fp8(self.keys(hidden, rotary))
        weights = self.head_weights(hidden)
        size = max(1, PRODUCTS_AT_ONCE // (num_rows * self.n_heads * length))
        places = torch.arange(length, device=hidden.device)
        lists = []
        for own in places.split(size):
            part = slice(int(own[0]), int(own[-1]) + 1)
            seen = max(part.stop, self.index_topk)
            scores = index_scores(queries[:, part], keys[:, :seen], weights[:, part])
            scores.masked_fill_(is_later(own, seen), float("-inf"))
            lists.append(scores.topk(self.index_topk, dim=-1).indices)
        return torch.cat(lists, 1)


def project(layer: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """Applies a layer in the dtype of the states, whatever the weights have."""
    return F.linear(states, layer.weight.to(states.dtype))


def listed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    indices: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attends causally to listed tokens, or to all.

    Args:
        module: The attention layer.
        query: (rows, heads, tokens, head_dim), after RoPE.
        key: As `query`.
        value: As `query`, of a size of its own.
        attention_mask: `no_mask`'s; another one is refused.
        scaling: The softmax scale.
        indices: (rows, tokens, n), the lists; None for all tokens.
        **kwargs: The other arguments of transformers' attention functions.

    Returns:
        The output, (rows, tokens, heads, value's size), and no weights.

    """
    if attention_mask.numel() != 1 or query.shape[2] != key.shape[2]:
        raise ValueError("listed_attention takes whole rows without padding or a cache")
    indexer = getattr(module, "indexer", None)  # other models have none
    if indexer is not None and indexer.observer is not None:
        indexer.observer(indexer, query, key, scaling)
    if indices is None:
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        return output.transpose(1, 2).contiguous(), None
    length = query.shape[2]
    outputs = []
    for own in torch.arange(length, device=query.device).split(QUERIES_AT_ONCE):
        lists = indices[:, own]
        mask = lists.new_zeros(*lists.shape[:2], length, dtype=torch.bool)
        mask.scatter_(2, lists, True)
        mask &= ~is_later(own, length)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, own], key, value, mask.unsqueeze(1), scale=scaling
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def no_mask(*args: object, device: torch.device, **kwargs: object) -> torch.Tensor:
    """Returns the mask of rows without padding: transformers' layers index it."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


AttentionInterface.register(LISTED_ATTENTION, listed_attention)
AttentionMaskInterface.register(LISTED_ATTENTION, no_mask)


class DeepseekV32ForCausalLM(upstream.DeepseekV32ForCausalLM):
    """transformers' model with the indexers above."""

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        for layer in self.model.layers:
            own = layer.self_attn.indexer
            layer.self_attn.indexer = Indexer(config, own.layer_idx)
            layer.self_attn.indexer.load_state_dict(own.state_dict())


def indexers(model: nn.Module) -> Iterator[Indexer]:
    """Yields the indexers of a model's layers in their order, if it has any."""
    return (module for module in model.modules() if isinstance(module, Indexer))


def attend_to_all(model: nn.Module) -> None:
    """Leaves the indexers out of a model's training, and of its attention."""
    for indexer in indexers(model):
        indexer.lists = False
        indexer.requires_grad_(False)
