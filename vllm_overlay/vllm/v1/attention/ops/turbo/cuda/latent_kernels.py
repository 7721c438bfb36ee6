# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA kernels of MLA as ``LatentKernels``."""

from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.cuda import latent_decode, latent_gather, latent_store
from vllm.v1.attention.ops.turbo.interface import CUDA, SplitsFn
from vllm.v1.attention.ops.turbo.latent.interface import (
    GatherFn,
    LatentAttentionFn,
    LatentSizesFn,
    LatentStoreFn,
)


class CudaLatentKernels(NamedTuple):
    """The ``LatentKernels`` for layouts that ``latent_decode.serves``."""

    reason: str = ""
    name: str = CUDA
    store: LatentStoreFn = latent_store.store
    decode_attention: LatentAttentionFn = latent_decode.decode_attention
    num_decode_splits: SplitsFn = latent_decode.num_decode_splits
    gather: GatherFn = latent_gather.gather
    store_sizes: LatentSizesFn = latent_store.store_sizes

    def make_matrices(self, size: int, device: torch.device) -> None:
        latent_store.make_tables(size, device)
