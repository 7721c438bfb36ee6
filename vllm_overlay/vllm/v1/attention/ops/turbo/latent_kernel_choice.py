# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which kernels serve MLA: as ``kernel_choice``, for packed latents."""

from functools import cache

from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.kernel_choice import (
    ChosenKernels,
    build_error,
    choose_between,
    may_fall_back,
)
from vllm.v1.attention.ops.turbo.latent_format import LatentFormat
from vllm.v1.attention.ops.turbo.latent_interface import LatentKernels


def triton_latent_kernels(reason: str = "") -> LatentKernels:
    """Triton's, for any GPU."""
    from vllm.v1.attention.ops.turbo.triton.latent_kernels import TritonLatentKernels

    return TritonLatentKernels(reason)


def cuda_latent_kernels(reason: str = "") -> LatentKernels:
    """CUDA's, for layouts and GPUs without a ``cuda_unsupported_reason``."""
    from vllm.v1.attention.ops.turbo.cuda.latent_kernels import CudaLatentKernels

    return CudaLatentKernels(reason)


def cuda_unsupported_reason(layout: LatentFormat) -> str | None:
    """Why there are no CUDA kernels for this device and layout, if so."""
    capability = None
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
    if capability is None:
        return "the CUDA kernels of MLA need an NVIDIA GPU"
    from vllm.v1.attention.ops.turbo.cuda import latent_decode

    return latent_decode.unsupported_reason(layout, capability.to_int())


@cache
def cuda_build_error(
    layout: LatentFormat, num_heads: int, max_query_len: int
) -> str | None:
    """Build and load the CUDA kernels, side by side; why that failed, if it did.

    Args:
        layout: The cache's format.
        num_heads: Query heads.
        max_query_len: Query tokens of a request that attends to packed pages, at most.

    """

    def modules():
        from vllm.v1.attention.ops.turbo.cuda.latent_modules import latent_modules

        return latent_modules(layout, num_heads, max_query_len)

    return build_error(modules)


@cache
def share_latent_kernels(
    choice: str, layout: LatentFormat, num_heads: int, max_query_len: int
) -> ChosenKernels[LatentKernels]:
    """The kernels of layers alike, built: to be called before the first request.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        layout: The cache's format.
        num_heads: Query heads.
        max_query_len: Query tokens of a request that attends to packed pages, at most.

    Raises:
        ValueError: If CUDA's are asked for and cannot be had.

    """
    kernels = choose_between(
        choice,
        lambda: cuda_unsupported_reason(layout),
        lambda: cuda_build_error(layout, num_heads, max_query_len),
        cuda_latent_kernels,
        triton_latent_kernels,
    )
    return may_fall_back(kernels, triton_latent_kernels)
