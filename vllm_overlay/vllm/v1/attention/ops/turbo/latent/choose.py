# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernels for MLA's packed latents, to choose from: see ``turbo.choose``."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.choose import KernelSource, current_capability
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.kernels import LatentKernels

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.cuda.family import ServingModule


@dataclass(frozen=True)
class LatentSource(KernelSource[LatentKernels]):
    """The kernels for an MLA layer.

    Attributes:
        layout: The cache's format.
        num_heads: Query heads.
        max_query_len: The most query tokens of a request that attends to packed pages.
        is_sparse: Whether query tokens attend to lists of tokens.

    """

    layout: LatentFormat
    num_heads: int
    max_query_len: int
    is_sparse: bool = False

    def unsupported_reason(self) -> str | None:
        capability = current_capability() if current_platform.is_cuda() else None
        if capability is None:
            return "the CUDA kernels of MLA need an NVIDIA GPU"
        from vllm.v1.attention.ops.turbo.cuda import latent_decode

        return latent_decode.unsupported_reason(capability)

    def modules(self) -> list["ServingModule"]:
        from vllm.v1.attention.ops.turbo.cuda.family import Demand, modules_for
        from vllm.v1.attention.ops.turbo.cuda.latent_modules import LATENT_FAMILIES

        # Query tokens with lists share no rows of a pass.
        query_len = 1 if self.is_sparse else self.max_query_len
        demand = Demand(self.num_heads, query_len, has_lists=self.is_sparse)
        return modules_for(LATENT_FAMILIES, self.layout, demand)

    def cuda(self, reason: str) -> LatentKernels:
        """CUDA's kernels; Triton's decodes some layouts, and most GPUs' lists."""
        from vllm.v1.attention.ops.turbo.cuda import latent_decode
        from vllm.v1.attention.ops.turbo.cuda.latent_kernels import CudaLatentKernels
        from vllm.v1.attention.ops.turbo.cuda.latent_plans import plans_of

        kernels = CudaLatentKernels(reason)
        capability = current_capability()
        assert capability is not None
        plans = plans_of(capability, self.layout.head_size, self.is_sparse)
        if plans and latent_decode.serves(self.layout):
            splits = partial(latent_decode.num_decode_splits, plans=plans)
            return kernels._replace(num_decode_splits=splits)
        triton = self.triton(reason)
        what = "lists of tokens" if self.is_sparse else self.layout.name
        return kernels._replace(
            reason=f"{reason}; Triton's decode {what}",
            decode_attention=triton.decode_attention,
            num_decode_splits=triton.num_decode_splits,
        )

    def triton(self, reason: str) -> LatentKernels:
        from vllm.v1.attention.ops.turbo.triton import latent_kernels

        return latent_kernels.TritonLatentKernels(reason)
