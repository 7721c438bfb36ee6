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
    """One layer's, as far as they are on a GPU.

    Attributes:
        size: Bytes of all of them.
        count: Of all GPUs'.
        chosen: By a token.

    """

    size: int
    count: int
    chosen: int

    def read(self, users: int) -> float:
        """Bytes that a step reads, if a token's experts are any."""
        return self.size * (1 - (1 - self.chosen / self.count) ** users)


@dataclass(frozen=True)
class Weights:
    """A GPU's share.

    Attributes:
        size: Bytes in memory.
        dense: Bytes that each step reads.
        layers: How many layers a step runs.
        experts: By layer.

    """

    size: int
    dense: int
    layers: int
    experts: Sequence[Experts] = ()


@dataclass(frozen=True)
class LayerCache:
    """What a layer of a GPU keeps of a sequence.

    Attributes:
        token: Bytes a token; 0 of a state.
        state: Bytes, whatever the context.
        window: Tokens that are attended to, if not all.
        head_size: Of attention.
        dtype: The cache's, if the layer has the model's own instead of the asked one.
        queries: Heads that attend to a KV head, if that is known.
        readings: How often a step reads it.
        is_latent: Whether it is of MLA, whose heads share one vector.

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
        """Bytes of attention that a sequence has to be read of, once."""
        return self.token * min(context, self.window or context)

    def seconds(self, gpu: Gpu, dtype: str, context: int) -> float | None:
        """Seconds that attention takes of a sequence; None if nothing tells them."""
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
    """What a decode step reads.

    Attributes:
        weights: The model's.
        cache: By layer.

    """

    weights: Weights
    cache: Sequence[LayerCache] = field(default_factory=tuple)

    @property
    def token_bytes(self) -> float:
        """What each token of a context adds."""
        return sum(layer.token for layer in self.cache if not layer.window)

    @property
    def state_bytes(self) -> int:
        """What a sequence has of states, whatever its context."""
        return sum(layer.state for layer in self.cache)

    def user_bytes(self, context: int) -> float:
        """What a sequence with so much context takes in all."""
        return self.state_bytes + sum(layer.read(context) for layer in self.cache)

    def tpot(self, gpu: Gpu, dtype: str, users: int, context: int) -> float | None:
        """Seconds to an output token, of so many users with so much context each.

        None if nothing was measured that tells them.
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
