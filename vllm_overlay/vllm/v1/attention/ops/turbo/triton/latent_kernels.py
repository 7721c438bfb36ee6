# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Triton kernels of MLA as ``LatentKernels``."""

from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import TRITON, SplitsFn
from vllm.v1.attention.ops.turbo.latent.interface import (
    GatherFn,
    LatentAttentionFn,
    LatentSizesFn,
    LatentStoreFn,
)
from vllm.v1.attention.ops.turbo.triton import (
    latent_decode,
    latent_gather,
    latent_store,
)


class TritonLatentKernels(NamedTuple):
    """The ``LatentKernels`` for any GPU."""

    reason: str = ""
    name: str = TRITON
    store: LatentStoreFn = latent_store.store
    decode_attention: LatentAttentionFn = latent_decode.decode_attention
    num_decode_splits: SplitsFn = latent_decode.num_decode_splits
    gather: GatherFn = latent_gather.gather
    store_sizes: LatentSizesFn = latent_store.store_sizes

    def make_matrices(self, size: int, device: torch.device) -> None:
        latent_store.encoder_matrix(size, device)
        rotation_matrix(size, device, inverse=True)
