# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The common part of the turbo cache dtypes' backends, with MLA and without."""

from typing import Any

import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.reasons import Reason
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
    def validate_configuration(  # type: ignore[override]
        cls, **configuration: Any
    ) -> list[str]:
        """Validate as the base class does; reasons against a turbo dtype are longer.

        They have the values that were met, and the flags that help.
        """
        cache_dtype = configuration["kv_cache_dtype"]
        if not is_turbo_cache_dtype(cache_dtype):
            return super().validate_configuration(**configuration)
        found = cls.unsupported_features(**configuration)
        words = [str(reason) for reason in found]
        if any(reason.needs_dtype for reason in found):
            words.append(refusals.way_out(cache_dtype))
        return words

    @classmethod
    def unsupported_features(cls, **configuration: Any) -> list[Reason]:
        """The features that the base class finds unsupported, for a turbo dtype."""
        words = super().validate_configuration(**configuration)
        head_sizes = cls.get_supported_head_sizes()
        return refusals.borrowed_reasons(words, head_sizes, configuration)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        # A checkpoint's scales are for FP8, and are not read.
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # All layouts that keep the tokens of a (block, head) contiguous.
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)
