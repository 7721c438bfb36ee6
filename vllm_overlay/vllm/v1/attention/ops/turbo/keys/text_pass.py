# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of layers in a pass of a text, on raw K and V, or on raw latents.

K and latents are averaged: see ``keys.means``. The queries that look at K have a common
direction: see ``keys.directions``.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import nn
from torch.nn import functional

from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.interface import Scoring
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.keys.directions import query_directions
from vllm.v1.attention.ops.turbo.keys.means import LayerMeans, Means


class PassError(Exception):
    """A model cannot run a pass. The message is the reason."""


class TextPass:
    """A pass of a model: attends to raw K and V or latents, and averages K or latents.

    Args:
        layers: Each layer with K, and the inverse of its RoPE for ``num_text``
            positions; None for a layer without RoPE. A layer whose RoPE is unknown is
            left out, and has no means.
        num_text: Tokens of the text, which come first.
        num_tokens: All tokens; each of the others is a sequence of its own.

    """

    def __init__(
        self,
        layers: Mapping[str, key_offset.Rotary | None],
        num_text: int,
        num_tokens: int,
    ) -> None:
        self.layers = layers
        self.num_text = num_text
        self.num_tokens = num_tokens
        self.means: Means = {}
        self.directions: dict[str, torch.Tensor] = {}
        self.targets: set[str] = set()
        self.start = 0
        self.kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.seen = cache(self._seen)

    @contextmanager
    def running(self, attention: Iterable[Attention | MLAAttention]) -> Iterator[None]:
        """Let layers attend in the pass, and not to a cache."""
        layers = [layer for layer in attention if isinstance(layer, Attention)]
        latents = [layer for layer in attention if isinstance(layer, MLAAttention)]
        targets = (layer.kv_sharing_target_layer_name for layer in layers)
        self.targets = {name for name in targets if name}
        try:
            for layer in layers:
                vars(layer.impl)["forward"] = self.attend
            for latent in latents:
                vars(latent)["forward_impl"] = partial(self.attend_latents, latent)
                # DeepSeek V3.2's layers have it, and call the other one for prefills.
                attend = partial(self.attend_whole, latent)
                vars(latent)["_sparse_indexer_and_attn"] = attend
            yield
        finally:
            for layer in layers:
                vars(layer.impl).pop("forward", None)
            for latent in latents:
                vars(latent).pop("forward_impl", None)
                vars(latent).pop("_sparse_indexer_and_attn", None)
            self.kept.clear()

    def begin(self, start: int) -> None:
        """Begin with the slice of tokens from ``start`` on."""
        self.start = start
        self.seen = cache(self._seen)

    def _seen(
        self, num_queries: int, device: torch.device, window: int | None
    ) -> torch.Tensor:
        """The keys that queries see, (T, S) bool."""
        keys = torch.arange(self.start + num_queries, device=device)
        rows = keys[self.start :, None]
        seen = (keys <= rows) & (rows < self.num_text)
        if window is not None:
            seen &= rows - keys < window
        return seen | (keys == rows)

    def attend(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: object,
        attn_metadata: object,
        output: torch.Tensor,
        **scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend like ``AttentionImpl.forward``, and record K.

        Raises:
            PassError: If the layer's K and V are not known, it has a soft cap, or its
                output is quantised.

        """
        if any(scale is not None for scale in scales.values()):
            raise PassError("attention quantises its output")
        scoring = scoring_of(layer)
        if scoring.soft_cap is not None:
            raise PassError(f"{layer.layer_name} has a soft cap")
        target = layer.kv_sharing_target_layer_name
        if target is not None:
            if target not in self.kept:
                raise PassError(f"{target} has not run before layers that read it")
            key, value = self.kept[target]
        elif key is None or value is None:
            raise PassError(f"{layer.layer_name} has no keys")
        else:
            key, value = self._joined(layer.layer_name, key, value)
        seen = self.seen(len(query), query.device, scoring.sliding_window)
        if target is None and layer.layer_name in self.layers:
            self._measure(layer.layer_name, query, key, seen, scoring)
        output.copy_(attention(query, key, value, seen, scoring))
        return output

    def attend_latents(
        self,
        layer: MLAAttention,
        query: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: object,
        attn_metadata: object,
        output: torch.Tensor,
        **others: object,
    ) -> torch.Tensor:
        """Attend like ``MLAAttention.forward_impl``, and record latents.

        Raises:
            PassError: If the layer's output is quantised.

        """
        if any(other is not None for other in others.values()):
            raise PassError("attention quantises its output")
        latent, rope = self._joined(layer.layer_name, kv_c_normed[:, None], k_pe)
        if len(latent) == self.num_tokens:
            self.means[layer.layer_name] = self._average_latents(latent.float())
        sizes = [layer.qk_nope_head_dim, layer.v_head_dim]
        projected = layer.kv_b_proj(latent[:, 0])[0]
        heads = projected.view(len(latent), layer.num_heads, sum(sizes))
        nope, value = heads.split(sizes, -1)
        key = torch.cat([nope, rope.expand(-1, layer.num_heads, -1)], -1)
        scoring = Scoring(layer.scale, layer.sliding_window)
        seen = self.seen(len(query), query.device, scoring.sliding_window)
        found = attention(query, key, value, seen, scoring)
        return output.copy_(found.reshape(output.shape))

    def attend_whole(self, layer: MLAAttention, *tensors: torch.Tensor) -> None:
        """Attend like ``DeepseekV32Attention``, to all tokens, and record latents.

        Args:
            layer: The layer.
            tensors: The arguments of its ``_sparse_indexer_and_attn``. This reads the
                part of queries without RoPE, (T, Hq, N), normalised latents, (T, L),
                rotated keys, (T, R), and rotated queries, (T, Hq, R). It writes the
                output, (T, Hq * V).

        """
        query, (latent, rope, _, rotated, output) = tensors[2], tensors[7:]
        query = torch.cat([query, rotated], -1)
        self.attend_latents(layer, query, latent, rope[:, None], None, None, output)

    def _joined(
        self, name: str, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's K and V of a slice's tokens behind those of all tokens before."""
        if self.start:
            before = self.kept.pop(name)
            key, value = torch.cat([before[0], key]), torch.cat([before[1], value])
        if len(key) < self.num_tokens or name in self.targets:
            self.kept[name] = key.clone(), value.clone()
        return key, value

    def _measure(
        self,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        seen: torch.Tensor,
        scoring: Scoring,
    ) -> None:
        """Record a layer's direction at the end of the text, and its means at the end.

        Args:
            name: The layer.
            query: (T, Hq, D), of the slice's tokens.
            key: (S, H, D), of all tokens so far.
            seen: (T, S) bool.
            scoring: The layer's.

        """
        inverse = self.layers[name]
        if isinstance(inverse, nn.Module):
            inverse.to(key.device)
        # A slice may have the end of the text and sequences of one token.
        num_text, num_queries = self.num_text, self.num_text - self.start
        if self.start < num_text <= len(key):
            own = query[:num_queries], key[:num_text], seen[:num_queries, :num_text]
            self.directions[name] = query_directions(*own, scoring, inverse)
        if len(key) == self.num_tokens:
            self.means[name] = self._average(key.float(), inverse)._replace(
                direction=self.directions[name]
            )

    def _average(
        self, key: torch.Tensor, inverse: key_offset.Rotary | None
    ) -> LayerMeans:
        """The means of a layer's keys, (T, H, D) fp32."""
        first = key[self.num_text :].mean(0)
        text = key[: self.num_text]
        length = text[1:].square().sum(-1).mean(0).sqrt()
        if inverse is not None:
            text = key_offset.rotate_rows(text, inverse)
        means = first, text[1:].mean(0), length
        return LayerMeans(*(x.cpu() for x in means), torch.zeros_like(first).cpu())

    def _average_latents(self, latents: torch.Tensor) -> LayerMeans:
        """The mean of a layer's latents, (T, 1, L) fp32, with the first token's."""
        text = latents[: self.num_text]
        mean = text.mean(0).cpu()
        length = text.square().sum(-1).mean(0).sqrt()
        return LayerMeans(mean, mean, length.cpu(), torch.zeros_like(mean))


def scoring_of(layer: Attention) -> Scoring:
    """How a layer of any cache dtype scores keys."""
    impl = layer.impl
    if is_turbo_cache_dtype(layer.kv_cache_dtype):
        return impl.runner.scoring  # type: ignore[attr-defined]
    cap = getattr(impl, "logits_soft_cap", None) or None
    sinks = getattr(impl, "sinks", None)
    return Scoring(float(impl.scale), layer.sliding_window, sinks, cap)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention of a slice's queries to all tokens so far.

    Args:
        query: (T, Hq, D).
        key: (S, H, D).
        value: (S, H, Dv).
        seen: (T, S) bool, the keys that a query sees.
        scoring: The layer's. It also has a scale and sinks.

    Returns:
        (T, Hq, Dv).

    """
    mask = seen
    if scoring.sinks is not None:
        # One more key scores zero, to which the sink is added, and has no value.
        key, value = (functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (key, value))
        bias = query.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        sinks = scoring.sinks.to(bias.dtype)[:, None, None]
        mask = torch.cat(
            [bias.expand(len(sinks), -1, -1), sinks.expand(-1, len(seen), 1)], -1
        )
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    found = functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scoring.scale, enable_gqa=True
    )
    return found[0].transpose(0, 1)
