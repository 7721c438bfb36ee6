# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The common part of the turbo cache dtypes' backends, with MLA and without."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cache_dtype import CacheDTypeBackend
from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.reasons import Reason
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker


class TurboPagesBackend(CacheDTypeBackend):
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
            words[-1] += f". {refusals.WAY_OUT}"
        return words

    @classmethod
    def unsupported_features(cls, **configuration: Any) -> list[Reason]:
        """The features that the base class finds unsupported, for a turbo dtype."""
        words = super().validate_configuration(**configuration)
        head_sizes = cls.get_supported_head_sizes()
        found = refusals.borrowed_reasons(words, head_sizes, configuration)
        if not (current_platform.is_cuda() or current_platform.is_cpu()):
            found.append(reasons.PLATFORM.of(name=current_platform.device_name))
        return found

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        # A checkpoint's scales are for FP8, and are not read.
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # All layouts that keep the tokens of a (block, head) contiguous.
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)

    # The hooks below import vLLM's attention layers, which ask for backends.

    @classmethod
    def validate_layers(
        cls, layers: "Mapping[str, AttentionLayerBase]", vllm_config: VllmConfig
    ) -> None:
        """Check the layers that have turbo pages, and the settings that name layers."""
        from vllm.v1.attention.ops.turbo.serving.settings import check_layers

        check_layers(layers, vllm_config)

    @classmethod
    def prepare_weights(cls, model: torch.nn.Module) -> None:
        """Set the offset of K in layers that add a bias to it."""
        from vllm.v1.attention.ops.turbo.keys.loading import prepare_key_biases

        prepare_key_biases(model)

    @classmethod
    def after_loading(cls, worker: "Worker") -> None:
        """Take the means of K off in all layers that can have them."""
        from vllm.v1.attention.ops.turbo.keys.loading import check_key_biases
        from vllm.v1.attention.ops.turbo.serving.means import set_key_means

        with set_current_vllm_config(worker.vllm_config):
            set_key_means(worker.model_runner, worker.vllm_config)
        check_key_biases(worker.model_runner.get_model())

    @classmethod
    def customize_specs(
        cls, specs: dict[str, KVCacheSpec], vllm_config: VllmConfig
    ) -> dict[str, KVCacheSpec]:
        """Set the identity of turbo pages in the cache specs of an engine."""
        from vllm.v1.attention.ops.turbo.serving.format_id import with_format_ids

        return with_format_ids(specs, vllm_config)

    @classmethod
    def before_step(cls, worker: "Worker", step: "SchedulerOutput") -> None:
        """Update the offsets of K to weights that were loaded since the last step."""
        from vllm.v1.attention.ops.turbo.serving.weight_updates import follow_weights

        follow_weights(worker, step)
