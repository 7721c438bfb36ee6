# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The time of a decode step, from the bytes that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from turbo_plan.gpus import (
    ATTENTION,
    LATENT_SIZE,
    LAYER_S,
    SEQUENCE_S,
    SMALL_HEAD,
    WEIGHTS,
    Gpu,
    latent_seconds,
)


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        size: Bytes of a GPU's experts.
        count: Experts on all GPUs.
        chosen: Experts that a token takes.

    """

    size: int
    count: int
    chosen: int

    def read(self, users: int) -> float:
        """Bytes that a step reads, if tokens choose experts at random."""
        return self.size * (1 - (1 - self.chosen / self.count) ** users)


@dataclass(frozen=True)
class Weights:
    """A GPU's share of the weights.

    Attributes:
        size: Bytes in memory.
        dense: Bytes that each step reads, without experts.
        layers: Layers that a step runs.
        experts: Experts by layer.

    """

    size: int
    dense: int
    layers: int
    experts: Sequence[Experts] = ()


@dataclass(frozen=True)
class LayerCache:
    """The cache of one sequence in one layer of a GPU.

    Attributes:
        token: Bytes per token; 0 for a state.
        state: Bytes of a state, whatever the context.
        window: Tokens that are attended to, if not all.
        head_size: Attention's head size.
        dtype: The cache's dtype, if the layer keeps the model's instead of the one
            asked for.
        queries: Query heads per KV head, if known.
        readings: How often a step reads it.
        is_latent: Whether the layer is MLA's, whose heads share one vector.

    """

    token: float = 0
    state: int = 0
    window: int | None = None
    head_size: int = 0
    dtype: str | None = None
    queries: int = 0
    readings: int = 1
    is_latent: bool = False

    def read(self, context: int) -> float:
        """Bytes of a sequence that one reading takes."""
        return self.token * min(context, self.window or context)

    def seconds(self, gpu: Gpu, dtype: str, context: int) -> float | None:
        """Seconds of attention to a sequence; None if nothing like it was measured."""
        dtype = self.dtype or dtype
        if self.is_latent:
            if self.head_size != LATENT_SIZE or self.window:
                return None
            token = latent_seconds(gpu, dtype, self.queries, self.token)
            return None if token is None else token * context
        efficiency = ATTENTION[dtype][self.head_size > SMALL_HEAD]
        return self.readings * self.read(context) / efficiency / gpu.bandwidth


@dataclass(frozen=True)
class Model:
    """The parts of a model that a decode step reads.

    Attributes:
        weights: The weights.
        cache: The cache by layer.

    """

    weights: Weights
    cache: Sequence[LayerCache] = field(default_factory=tuple)

    @property
    def token_bytes(self) -> float:
        """Bytes that each token of a context adds."""
        return sum(layer.token for layer in self.cache if not layer.window)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states, whatever its context."""
        return sum(layer.state for layer in self.cache)

    def user_bytes(self, context: int) -> float:
        """Bytes of a sequence with so much context."""
        return self.state_bytes + sum(layer.read(context) for layer in self.cache)

    def tpot(self, gpu: Gpu, dtype: str, users: int, context: int) -> float | None:
        """Seconds per output token, for so many users with so much context each.

        None if nothing like it was measured.
        """
        weights = self.weights
        read = weights.dense + sum(each.read(users) for each in weights.experts)
        # A state is read and written.
        read += 2 * users * self.state_bytes
        seconds = read / WEIGHTS / gpu.bandwidth
        for layer in self.cache:
            attention = layer.seconds(gpu, dtype, context)
            if attention is None:
                return None
            seconds += users * attention
        return seconds + weights.layers * LAYER_S + users * SEQUENCE_S
