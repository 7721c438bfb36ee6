# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The choice of kernels for MLA's packed latents, like ``kernel_choice``."""

from functools import cache

from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.choose import (
    ChosenKernels,
    choose_between,
    may_fall_back,
    start_to_build,
)
from vllm.v1.attention.ops.turbo.cuda.module_builds import ModuleBuilds
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.kernels import LatentKernels


def triton_latent_kernels(reason: str = "") -> LatentKernels:
    """Triton's kernels, for any GPU."""
    from vllm.v1.attention.ops.turbo.triton.latent_kernels import TritonLatentKernels

    return TritonLatentKernels(reason)


def cuda_latent_kernels(layout: LatentFormat, reason: str = "") -> LatentKernels:
    """CUDA's kernels, for GPUs without a ``cuda_unsupported_reason``.

    Triton's kernel decodes the layouts that CUDA's does not.
    """
    from vllm.v1.attention.ops.turbo.cuda import latent_decode
    from vllm.v1.attention.ops.turbo.cuda.latent_kernels import CudaLatentKernels

    if latent_decode.serves(layout):
        return CudaLatentKernels(reason)
    triton = triton_latent_kernels()
    return CudaLatentKernels(f"{reason}; Triton's decode {layout.name}")._replace(
        decode_attention=triton.decode_attention,
        num_decode_splits=triton.num_decode_splits,
    )


def cuda_unsupported_reason() -> str | None:
    """The reason why this device has no CUDA kernels; None if it has them."""
    capability = None
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
    if capability is None:
        return "the CUDA kernels of MLA need an NVIDIA GPU"
    from vllm.v1.attention.ops.turbo.cuda import latent_decode

    return latent_decode.unsupported_reason(capability.to_int())


@cache
def cuda_builds(
    layout: LatentFormat, num_heads: int, max_query_len: int
) -> ModuleBuilds:
    """Begin to build and load the CUDA kernels of a shape's layers, in parallel.

    Args:
        layout: The cache's format.
        num_heads: Query heads.
        max_query_len: The most query tokens of a request that attends to packed pages.

    """

    def modules():
        from vllm.v1.attention.ops.turbo.cuda.family import Demand, modules_for
        from vllm.v1.attention.ops.turbo.cuda.latent_modules import LATENT_FAMILIES

        return modules_for(LATENT_FAMILIES, layout, Demand(num_heads, max_query_len))

    return ModuleBuilds(modules)


def cuda_build_error(
    layout: LatentFormat, num_heads: int, max_query_len: int
) -> str | None:
    """Build and load the CUDA kernels; the reason if that failed, else None."""
    return cuda_builds(layout, num_heads, max_query_len).error


def start_latent_builds(
    choice: str, layout: LatentFormat, num_heads: int, max_query_len: int
) -> None:
    """Begin to build the kernels that ``share_latent_kernels`` will wait for."""
    start_to_build(
        choice,
        cuda_unsupported_reason,
        lambda: cuda_builds(layout, num_heads, max_query_len),
    )


@cache
def share_latent_kernels(
    choice: str, layout: LatentFormat, num_heads: int, max_query_len: int
) -> ChosenKernels[LatentKernels]:
    """Choose and build the kernels of a shape's layers, before the first request.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        layout: The cache's format.
        num_heads: Query heads.
        max_query_len: The most query tokens of a request that attends to packed pages.

    Raises:
        ValueError: If the user asks for CUDA's kernels and cannot have them.

    """
    kernels = choose_between(
        choice,
        cuda_unsupported_reason,
        lambda: cuda_build_error(layout, num_heads, max_query_len),
        lambda reason: cuda_latent_kernels(layout, reason),
        triton_latent_kernels,
    )
    return may_fall_back(kernels, triton_latent_kernels)
