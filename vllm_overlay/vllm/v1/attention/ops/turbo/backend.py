# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the backends of the turbo cache dtypes have in common, with MLA and without."""

from typing import Any

import torch

from vllm.config.cache import CacheDType
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.kv_cache_interface import KVCacheLayout


class TurboPagesBackend(AttentionBackend):
    """A backend whose pages are packed."""

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        # The kernels' operands are 16-bit; PyTorch's attention on a CPU takes any.
        if dtype == torch.float32:
            return current_platform.is_cpu()
        return super().supports_dtype(dtype)

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        *args: Any,
        **kwargs: Any,
    ) -> list[str]:
        """As the base class; of a turbo dtype the last reason is the way out."""
        reasons = cls.unsupported_features(
            head_size, dtype, kv_cache_dtype, *args, **kwargs
        )
        if reasons and is_turbo_cache_dtype(kv_cache_dtype):
            reasons.append(refusals.way_out(kv_cache_dtype))
        return reasons

    @classmethod
    def unsupported_features(cls, *args: Any, **kwargs: Any) -> list[str]:
        """What the base class finds in a configuration."""
        return super().validate_configuration(*args, **kwargs)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # All that keep the tokens of a (block, head) contiguous.
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)
