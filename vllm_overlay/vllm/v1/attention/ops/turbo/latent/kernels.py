# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The entry points of a set of kernels for MLA, which a layer calls."""

from typing import Protocol

from vllm.v1.attention.ops.turbo.latent.interface import (
    GatherFn,
    LatentAttentionFn,
    LatentSizesFn,
    LatentStoreFn,
)
from vllm.v1.attention.ops.turbo.layer.kernels import Kernels


class LatentKernels(Kernels, Protocol):
    """The entry points of one set of kernels for packed latents."""

    @property
    def store(self) -> LatentStoreFn:
        """Quantises latents and rotary keys into their slots."""

    @property
    def decode_attention(self) -> LatentAttentionFn:
        """Attends from the last tokens of sequences, absorbed: to each split of the
        sequences, and then merges the results. The size of the partial results bounds
        the splits. With one split a result does not depend on the rest of the batch.
        """

    @property
    def gather(self) -> GatherFn:
        """Dequantises contexts, for prefill."""

    @property
    def store_sizes(self) -> LatentSizesFn:
        """Numbers of tokens, ascending, that each launch a different kernel of
        ``store``.
        """
