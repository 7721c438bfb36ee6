# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The means of K of a model's layers, which are measured on a short text.

K has a mean over positions also in models without a bias of K, and a code of few bits
has better uses for its levels. The model runs once, on raw K and V: the text, and
several sequences of one token each. RoPE turns each key by its position, so keys are
turned back before they are averaged.

The first token of a sequence is an attention sink, whose key is far from the others'.
So it is left out, and the sequences of one token give its mean.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, model_parallel_is_initialized
from vllm.forward_context import set_forward_context
from vllm.lora.layers import LoRAMapping
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import (
    requires_raw_input_tokens,
    supports_multimodal,
)
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.interface import Scoring
from vllm.v1.attention.ops.turbo.keys import offset as key_offset

# The version of the text and of the rule below: a new rule changes the bytes of pages.
VERSION = 1
# Tokens of the text: the most, and the fewest that give means.
MAX_TOKENS, MIN_TOKENS = 1024, 320
# Sequences of one token, whose keys give the mean of first tokens.
FIRST_TOKENS = 64


class LayerMeans(NamedTuple):
    """The means of a layer's keys, fp32 on the CPU.

    Attributes:
        first: (H, D), of first tokens' keys as attention has them.
        rest: (H, D), of other tokens' keys before RoPE.
        length: (H,), the root of the other keys' mean square length.

    """

    first: torch.Tensor
    rest: torch.Tensor
    length: torch.Tensor

    @property
    def share(self) -> float:
        """The length of the mean as a share of the keys' length, over all heads."""
        square = self.rest.square().sum() / self.length.square().sum()
        return square.sqrt().item()

    @property
    def is_usable(self) -> bool:
        """Whether all values are finite, and some key is not zero."""
        is_finite = all(bool(x.isfinite().all()) for x in self)
        return is_finite and bool((self.length > 0).any())

    def heads(self, part: slice) -> "LayerMeans":
        """The means of some heads."""
        return LayerMeans(*(x[part].contiguous() for x in self))

    def table(self, rotary: key_offset.Rotary | None) -> torch.Tensor:
        """The offset that follows from the means: see ``KeyOffset.table``.

        Args:
            rotary: The rotation of K, from ``key_offset.mean_rotary``; None for none.

        Returns:
            (G, H, D) fp32 on the CPU, with two rows if K is not rotated.

        """
        rows = key_offset.mean_rotated(self.rest, rotary)
        if rotary is None:
            rows = rows.repeat(2, 1, 1)
        rows[0] = self.first
        return rows


# Means by the name of the attention layer.
Means = dict[str, LayerMeans]


class PassRunner(Protocol):
    """The part of a model runner that a pass needs."""

    device: torch.device

    def get_model(self) -> nn.Module:
        """The model, without wrappers of CUDA graphs."""


class PassError(Exception):
    """A layer cannot attend in a pass. The message is the reason."""


class KeyPass:
    """A pass of a model: attends to raw K and V, and averages K.

    Args:
        layers: Each attention layer, and the inverse of its RoPE for ``num_text``
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
        self.targets: set[str] = set()
        self.start = 0
        self.kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.mask = cache(self._mask)

    @contextmanager
    def running(self, attention: Mapping[str, Attention]) -> Iterator[None]:
        """Let layers attend in the pass, and not to a cache."""
        targets = (x.kv_sharing_target_layer_name for x in attention.values())
        self.targets = {name for name in targets if name}
        try:
            for layer in attention.values():
                vars(layer.impl)["forward"] = self.attend
            yield
        finally:
            for layer in attention.values():
                vars(layer.impl).pop("forward", None)
            self.kept.clear()

    def begin(self, start: int) -> None:
        """Begin with the slice of tokens from ``start`` on."""
        self.start = start
        self.mask = cache(self._mask)

    def _mask(
        self, num_queries: int, device: torch.device, window: int | None
    ) -> torch.Tensor:
        """The keys that queries do not see, (T, S) bool."""
        rows = torch.arange(self.start, self.start + num_queries, device=device)[
            :, None
        ]
        keys = torch.arange(self.start + num_queries, device=device)
        seen = (keys <= rows) & (rows < self.num_text)
        if window is not None:
            seen &= rows - keys < window
        return ~(seen | (keys == rows))

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
            PassError: If the layer's K and V are not known, or its output is quantised.

        """
        if any(scale is not None for scale in scales.values()):
            raise PassError("attention quantises its output")
        target = layer.kv_sharing_target_layer_name
        if target is not None:
            if target not in self.kept:
                raise PassError(f"{target} has not run before layers that read it")
            key, value = self.kept[target]
        elif key is None or value is None:
            raise PassError(f"{layer.layer_name} has no keys")
        else:
            key, value = self._record(layer.layer_name, key, value)
        scoring = scoring_of(layer)
        device, window = query.device, scoring.sliding_window
        unseen = self.mask(len(query), device, window)
        group = query.shape[1] // key.shape[1]
        for head in range(key.shape[1]):
            own = slice(head * group, (head + 1) * group)
            sinks = None if scoring.sinks is None else scoring.sinks[own]
            output[:, own] = attention(
                query[:, own], key[:, head], value[:, head], unseen, scoring, sinks
            )
        return output

    def _record(
        self, name: str, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add K and V of a slice's tokens; return those of all tokens so far."""
        if self.start:
            before = self.kept[name]
            key, value = torch.cat([before[0], key]), torch.cat([before[1], value])
        is_last = len(key) == self.num_tokens
        self.kept.pop(name, None)
        if not is_last or name in self.targets:
            self.kept[name] = key.clone(), value.clone()
        if is_last and name in self.layers:
            self.means[name] = self._average(key.float(), self.layers[name])
        return key, value

    def _average(
        self, key: torch.Tensor, inverse: key_offset.Rotary | None
    ) -> LayerMeans:
        """The means of a layer's keys, (T, H, D) fp32."""
        first = key[self.num_text :].mean(0)
        text = key[: self.num_text]
        length = text[1:].square().sum(-1).mean(0).sqrt()
        if inverse is not None:
            if isinstance(inverse, nn.Module):
                inverse.to(key.device)
            text = key_offset.rotate_rows(text, inverse)
        return LayerMeans(*(x.cpu() for x in (first, text[1:].mean(0), length)))


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
    unseen: torch.Tensor,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention to one KV head, in fp32.

    Args:
        query: (T, G, D).
        key: (S, D).
        value: (S, D).
        unseen: (T, S) bool, the keys that a query does not see.
        scoring: The layer's. It also has a scale and a soft cap.
        sinks: (G,), logits that join the softmax; None for none.

    Returns:
        (T, G, D) fp32.

    """
    scores = torch.einsum("tgd,sd->gts", query.float(), key.float()) * scoring.scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    scores.masked_fill_(unseen, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("gts,sd->tgd", weights, value.float())


def attention_layers(model: nn.Module) -> dict[str, tuple[Attention, nn.Module]]:
    """A model's layers with K and V of any cache dtype, and the modules around them."""
    return {
        layer.layer_name: (layer, parent)
        for parent in model.modules()
        for layer in parent.children()
        if isinstance(layer, Attention) and layer.attn_type == AttentionType.DECODER
    }


def inverses(
    model: nn.Module, layers: Mapping[str, tuple[Attention, nn.Module]], count: int
) -> dict[str, key_offset.Rotary | None]:
    """The inverse of RoPE of each layer whose RoPE is known, for some positions."""
    known: dict[nn.Module | None, key_offset.Rotary | None] = {None: None}
    found = {}
    for name, (_, parent) in layers.items():
        try:
            rotary = key_offset.find_rotary(parent, model)
            if rotary is not None and rotary not in known:
                known[rotary] = key_offset.inverse_rotary(rotary, count)
        except key_offset.UnknownRotation:
            continue
        found[name] = known[rotary]
    return found


def first_tokens(vocab_size: int) -> list[int]:
    """Different tokens, spread over a vocabulary."""
    count = min(FIRST_TOKENS, vocab_size)
    return [index * vocab_size // count for index in range(count)]


@torch.inference_mode()
def run_pass(
    runner: PassRunner, vllm_config: VllmConfig, text: list[int], first: list[int]
) -> Means:
    """The means of this rank's layers and heads.

    All ranks call this at the same time, before there is a cache.

    Args:
        runner: The engine's model runner, with a loaded model.
        vllm_config: The engine's configuration.
        text: Tokens of a text.
        first: The tokens of sequences of one token.

    Raises:
        PassError: If a layer cannot attend.

    """
    model = runner.get_model()
    layers = attention_layers(model)
    tokens = torch.tensor(text + first, device=runner.device)
    positions = torch.zeros_like(tokens)
    positions[: len(text)] = torch.arange(len(text), device=runner.device)
    known = inverses(model, layers, len(text))
    key_pass = KeyPass(known, len(text), len(tokens))
    step = vllm_config.scheduler_config.max_num_batched_tokens
    with key_pass.running({name: layer for name, (layer, _) in layers.items()}):
        for start in range(0, len(tokens), step):
            key_pass.begin(start)
            part = slice(start, start + step)
            _run_model(runner, vllm_config, tokens[part], positions[part])
    return key_pass.means


def _run_model(
    runner: PassRunner,
    vllm_config: VllmConfig,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Run a slice of a pass through this rank's layers, without compiled graphs."""
    model = runner.get_model()
    model_config = vllm_config.model_config
    if model_config.uses_mrope:
        positions = positions.expand(3, -1).contiguous()
    lora_manager = getattr(runner, "lora_manager", None)
    if lora_manager is not None:
        mapping = LoRAMapping((0,) * len(tokens), (0,), is_prefill=True)
        lora_manager.set_active_adapters(set(), mapping)
    stages = get_pp_group() if model_parallel_is_initialized() else None
    inputs: dict[str, object] = {"input_ids": tokens, "inputs_embeds": None}
    received = None
    with set_forward_context(
        None, vllm_config, num_tokens=len(tokens), skip_compiled=True
    ):
        if stages is not None and not stages.is_first_rank:
            received = IntermediateTensors(stages.recv_tensor_dict())
        elif supports_multimodal(model):
            inputs["inputs_embeds"] = model.embed_input_ids(tokens)
            if not requires_raw_input_tokens(model):
                inputs["input_ids"] = None
        result = model(positions=positions, intermediate_tensors=received, **inputs)
    if stages is not None and not stages.is_last_rank:
        assert isinstance(result, IntermediateTensors)
        stages.send_tensor_dict(result.tensors)
