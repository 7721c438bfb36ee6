# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Backends that alone read a KV cache dtype.

The dtype selects such a backend on every platform. And the backend has hooks that an
engine calls for the dtype, rather than for a layer.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.config import AttentionConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, get_kv_quant_mode

if TYPE_CHECKING:
    from torch import nn

    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

# Fields of ``AttentionConfig`` that only such backends read.
OPTIONS = ("turbo_prefill", "turbo_kernel", "turbo_window", "turbo_means")


def warn_of_options(attention_config: AttentionConfig, cache_dtype: str) -> None:
    """Warn of options that are set although no layer's backend reads them."""
    defaults = AttentionConfig()
    options = {name: getattr(attention_config, name) for name in OPTIONS}
    idle = [
        f"--attention-config.{name} {value}"
        for name, value in options.items()
        if value != getattr(defaults, name)
    ]
    if idle:
        logger.warning_once(
            "%s: no effect with --kv-cache-dtype %s. Pass turbo4, k4v3 or turbo3.",
            ", ".join(idle),
            cache_dtype,
        )


class CacheDTypeBackend(AttentionBackend):
    """A backend that alone reads its cache dtypes. The hooks are those of an engine
    that has none of these dtypes.
    """

    @classmethod
    def validate_layers(
        cls, layers: "Mapping[str, AttentionLayerBase]", vllm_config: "VllmConfig"
    ) -> None:
        """Check all layers of a loaded model, of any backend.

        Args:
            layers: The layers that have a cache on this rank, by name, also those of a
                drafter.
            vllm_config: The engine's configuration.

        Raises:
            ValueError: If a layer has the dtype and is not served.

        """
        warn_of_options(
            vllm_config.attention_config, vllm_config.cache_config.cache_dtype
        )

    @classmethod
    def prepare_weights(cls, model: "nn.Module") -> None:
        """Read weights as loaded, before quantization methods process them."""

    @classmethod
    def after_loading(cls, worker: "Worker") -> None:
        """Prepare a worker whose model is loaded, and whose cache is not planned. All
        ranks call this.
        """

    @classmethod
    def customize_specs(
        cls, specs: dict[str, KVCacheSpec], vllm_config: "VllmConfig"
    ) -> dict[str, KVCacheSpec]:
        """Adjust the cache specs of all layers. All ranks call this with their own.

        Args:
            specs: The specs of a rank's layers, by name.
            vllm_config: The engine's configuration.

        """
        return specs

    @classmethod
    def before_step(cls, worker: "Worker", step: "SchedulerOutput") -> None:
        """Prepare a worker for its next step."""


def own_backend(
    kv_cache_dtype: str | None, use_mla: bool = False, use_sparse: bool = False
) -> AttentionBackendEnum | None:
    """The backend that alone reads a cache dtype; None if there is no such backend."""
    if kv_cache_dtype and get_kv_quant_mode(kv_cache_dtype).is_turbo:
        if use_mla and use_sparse:
            return AttentionBackendEnum.TURBO_MLA_SPARSE
        return AttentionBackendEnum.TURBO_MLA if use_mla else AttentionBackendEnum.TURBO
    return None


def backend_beside(
    kv_cache_dtype: str | None, chosen: type[AttentionBackend] | None
) -> type[AttentionBackend] | None:
    """The backend that a model chose for a layer; None if the cache dtype selects one.

    Models whose V has another head size than K choose one of vLLM's backends for two
    sizes, whatever the dtype. The backend of a dtype of its own serves them as well.

    Args:
        kv_cache_dtype: The layer's cache dtype.
        chosen: The model's choice; None if it made none.

    """
    if chosen is None or own_backend(kv_cache_dtype) is None:
        return chosen
    is_for_two_sizes = chosen.get_name() in ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
    return None if is_for_two_sizes else chosen


def select_own_backend(
    selected: AttentionBackendEnum | None, config: "AttentionSelectorConfig"
) -> type[AttentionBackend] | None:
    """Select the backend that alone reads a layer's cache dtype.

    Args:
        selected: The backend that the user or the model's configuration asks for.
        config: The layer's requirements.

    Returns:
        The backend; None if platforms choose one for this dtype.

    Raises:
        ValueError: If the backend does not serve the layer, or another is asked for.

    """
    own = own_backend(config.kv_cache_dtype, config.use_mla, config.use_sparse)
    if own is None:
        return None
    # Imported here, because platforms import the registry.
    from vllm.platforms import current_platform

    backend = own.get_class()
    reasons = backend.validate_configuration(
        device_capability=current_platform.get_device_capability(),  # type: ignore[arg-type]
        **config._asdict(),
    )
    if selected is not None and selected is not own:
        reasons.insert(
            0,
            f"attention backend {selected.name} (supported: {own.name}; drop "
            f"--attention-backend, or pass {own.name} if the model chose another)",
        )
    if reasons:
        raise ValueError(
            f"--kv-cache-dtype {config.kv_cache_dtype} does not support this: "
            f"{'; '.join(reasons)}."
        )
    return backend


def engine_backend(vllm_config: "VllmConfig") -> type[CacheDTypeBackend]:
    """The backend that alone reads a cache dtype of an engine or of its drafter.

    If there is none, it is the base class.
    """
    model_config = vllm_config.model_config
    use_mla = model_config is not None and model_config.use_mla
    dtypes: list[str | None] = [vllm_config.cache_config.cache_dtype]
    if vllm_config.speculative_config is not None:
        dtypes.append(vllm_config.speculative_config.kv_cache_dtype)
    for dtype in dtypes:
        if own := own_backend(dtype, use_mla):
            backend = own.get_class()
            assert issubclass(backend, CacheDTypeBackend)
            return backend
    return CacheDTypeBackend
