# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks and log lines of a turbo KV cache at an engine's start."""

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, cast

from vllm.config import CacheConfig, VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_tp_group, model_parallel_is_initialized
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.turbo_tail import TurboTail
from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.format import (
    TILE_TOKENS,
    TurboFormat,
    is_turbo_cache_dtype,
)
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.serving.rank_report import report_kernels
from vllm.v1.kv_cache_interface import AttentionSpec, get_kv_quant_mode

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.latent.runner import LatentRunner

logger = init_logger(__name__)


class TurboImpl(Protocol):
    """The part of ``TurboAttentionImpl``, a layer with K and V, that is used here."""

    num_kv_heads: int
    head_size: int
    kv_cache_dtype: str
    tail: TurboTail | None
    runner: TurboRunner


class TurboLatentImpl(Protocol):
    """The part of ``TurboMLAImpl``, a layer with latents, that is used here."""

    num_heads: int
    head_size: int
    kv_cache_dtype: str
    runner: "LatentRunner"


def check_layer(name: str, layer: AttentionLayerBase, vllm_config: VllmConfig) -> None:
    """Check that TURBO serves a layer of any class that has a turbo dtype.

    Args:
        name: The layer's name in the model.
        layer: A layer whose ``kv_cache_dtype`` is a turbo dtype, or that has none. A
            layer that has none passes if its cache spec has no turbo mode.
        vllm_config: The engine's configuration.

    Raises:
        ValueError: If the layer's backend or implementation is not TURBO's, or its
            cache spec does not have TURBO's bytes. With MLA also if its class is not
            vLLM's, because other classes store latents with their own kernels.

    """
    if isinstance(layer, TurboTail):
        # Only the layer that made it reads its bytes.
        return
    spec = layer.get_kv_cache_spec(vllm_config)
    cache_dtype: Any = getattr(layer, "kv_cache_dtype", None)
    if cache_dtype is None:
        if not isinstance(spec, AttentionSpec) or not spec.kv_quant_mode.is_turbo:
            return
        cache_dtype = spec.kv_quant_mode.name.lower()
    backend = layer.get_attn_backend()
    if (
        backend.supports_kv_cache_dtype(cache_dtype)
        and isinstance(getattr(layer, "impl", None), backend.get_impl_cls())
        and isinstance(spec, AttentionSpec)
        and spec.kv_quant_mode == get_kv_quant_mode(cache_dtype)
    ):
        is_served = True
        layout: TurboFormat | LatentFormat
        if backend.is_mla():
            is_served = stores_by_implementation(layer)
            layout = LatentFormat.from_cache_dtype(cache_dtype, spec.head_size)
        else:
            sizes = spec.head_size, spec.head_size_v
            layout = TurboFormat.from_cache_dtype(cache_dtype, *sizes)
        content = backend.customize_spec(spec).state_content_bytes
        if is_served and content == layout.slot_size:
            if backend.is_mla() and turbo_impls(vllm_config):
                found = [reasons.MLA_BESIDE_K_AND_V]
                raise ValueError(refusals.refusal(cache_dtype, found))
            return
    model = vllm_config.model_config.architecture
    kind = type(layer).__name__
    reason = reasons.LAYER.of(
        name=name, model=model, kind=kind, backend=backend.get_name()
    )
    raise ValueError(refusals.refusal(cache_dtype, [reason]))


def stores_by_implementation(layer: AttentionLayerBase) -> bool:
    """Tell whether an MLA layer leaves the storing of latents to its backend."""
    if type(layer) is MLAAttention:
        return True
    # Imported here, because the module has kernels of one model.
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention

    return type(layer) is DeepseekV32Attention


def turbo_impls(vllm_config: VllmConfig) -> list[TurboImpl]:
    """The layers on this rank that store K and V in a turbo dtype."""
    return [
        cast(TurboImpl, layer.impl)
        for layer in get_layers_from_vllm_config(vllm_config, Attention).values()
        if is_turbo_cache_dtype(layer.kv_cache_dtype)
    ]


def turbo_mla_impls(vllm_config: VllmConfig) -> list[TurboLatentImpl]:
    """The layers on this rank that store latents in a turbo dtype."""
    return [
        cast(TurboLatentImpl, layer.impl)
        for layer in get_layers_from_vllm_config(vllm_config, MLAAttention).values()
        if is_turbo_cache_dtype(layer.kv_cache_dtype)
    ]


def share_caches(vllm_config: VllmConfig) -> None:
    """Tell layers that read another's cache, and check that their dtypes agree.

    Gemma 4's drafter learns only after its layers are made whose caches it reads.

    Raises:
        ValueError: If a layer's dtype differs from that of the layer whose cache it
            reads, and one of them is a turbo dtype.

    """
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    for layer in layers.values():
        if layer.kv_sharing_target_layer_name is None:
            continue
        target = layers.get(layer.kv_sharing_target_layer_name, layer)
        if target.kv_cache_dtype != layer.kv_cache_dtype:
            dtypes = [target.kv_cache_dtype, layer.kv_cache_dtype]
            for dtype, other in (dtypes, dtypes[::-1]):
                if is_turbo_cache_dtype(dtype):
                    reason = reasons.KV_SHARING_OF_OTHER_DTYPES.of(
                        dtype=dtype, other=other
                    )
                    raise ValueError(refusals.refusal(dtype, [reason]))
        if is_turbo_cache_dtype(layer.kv_cache_dtype):
            cast(TurboImpl, layer.impl).runner.share_cache()


def _kind(impl: TurboImpl) -> tuple[object, ...]:
    """The key that layers of the same kind share."""
    runner = impl.runner
    sizes = impl.num_kv_heads, runner.layout, _num_slots(impl)
    scoring = runner.scoring
    features = scoring.sinks is not None, scoring.soft_cap
    return *sizes, scoring.sliding_window, *features


def _num_slots(impl: TurboImpl) -> int:
    """Slots of all KV heads that a layer stores for a token of a request."""
    return impl.runner.states_per_token * impl.num_kv_heads


def _numbers(impl: TurboImpl) -> int:
    """Coordinates of K and V of a token and KV head."""
    layout = impl.runner.layout
    return layout.head_size + layout.head_size_v


def _token_bytes(impl: TurboImpl) -> int:
    """Bytes that a layer stores for a token of a request."""
    return _num_slots(impl) * impl.runner.layout.slot_size


def _layers(impl: TurboImpl, count: int) -> str:
    """Words for layers of the same kind: their bytes, and the kernels that serve."""
    slot_bytes = _token_bytes(impl)
    scoring = impl.runner.scoring
    window = scoring.sliding_window
    layout = impl.runner.layout
    features = "" if layout.is_even else f" of K, {layout.head_size_v} of V"
    if window is not None:
        features += f", sliding window: {window}"
    if scoring.sinks is not None:
        features += ", attention sinks"
    if scoring.soft_cap is not None:
        features += f", soft cap: {scoring.soft_cap:g}"
    return (
        f"{slot_bytes} bytes a token and layer (layers: {count}, "
        f"KV heads: {impl.num_kv_heads}, head size: {impl.head_size}{features}; "
        f"{impl.runner.kernels_used})"
    )


def describe_cache(impls: list[TurboImpl], num_unpacked: int = 0) -> str:
    """One line on the bytes of a cache and the kernels that serve it.

    Args:
        impls: The layers on this rank that have a turbo dtype.
        num_unpacked: The number of layers that have another dtype.

    """
    num_layers = len(impls)
    impls = [impl for impl in impls if not impl.runner.shares_cache] or impls
    num_shared = num_layers - len(impls)
    kinds = {_kind(impl): impl for impl in impls}
    counts = Counter(_kind(impl) for impl in impls)
    layers = ", ".join(_layers(impl, counts[kind]) for kind, impl in kinds.items())
    packed = sum(map(_token_bytes, impls))
    unpacked = sum(_num_slots(impl) * _numbers(impl) * 2 for impl in impls)
    workspace = max(impl.runner.workspace_bytes for impl in kinds.values())
    shared = f"; {num_shared} more read caches of these" if num_shared else ""
    unpacked_layers = (
        f"; {num_unpacked} of {num_layers + num_unpacked} layers are not packed"
        if num_unpacked
        else ""
    )
    seen = "stored" if impls[0].runner.stored else "raw"
    tails = {0 if impl.tail is None else impl.tail.num_tokens for impl in impls}
    tail = ""
    if any(tails):
        tokens = " or ".join(map(str, sorted(tails)))
        tail = f"; recent window: {tokens} tokens in 8 bits"
    offsets = [impl.runner.scoring.key_offset for impl in impls]
    tables = [table for table in offsets if table is not None]
    offset = ""
    if tables:
        digest = key_offset.digest(offsets)
        offset = f"; K offset: {len(tables)} of {len(impls)} layers ({digest})"
    return (
        f"KV cache {impls[0].kv_cache_dtype}: {layers}, {unpacked / packed:.2f} times "
        f"fewer than in bf16; {workspace / 2**20:.1f} MiB of workspace; prefill "
        f"attends to {seen} K and V{tail}{offset}{shared}"
        f"{unpacked_layers}."
    )


def _latent_kind(impl: TurboLatentImpl) -> tuple[object, ...]:
    """The key that MLA layers of the same kind share."""
    return impl.runner.layout, impl.num_heads, impl.runner.is_sparse


def _latent_layers(impl: TurboLatentImpl, count: int) -> str:
    """Words for MLA layers of the same kind: their bytes and kernels."""
    layout = impl.runner.layout
    kind = "sparse MLA layers" if impl.runner.is_sparse else "MLA layers"
    return (
        f"{layout.slot_size} bytes a token and layer ({kind}: {count}, query "
        f"heads: {impl.num_heads}, latent: {layout.rank}, rotary: {layout.rope}; "
        f"{impl.runner.kernels_used})"
    )


def describe_latent_cache(impls: list[TurboLatentImpl]) -> str:
    """One line on the bytes of a cache of latents and the kernels that serve it.

    Args:
        impls: The MLA layers on this rank that have a turbo dtype.

    """
    kinds = {_latent_kind(impl): impl for impl in impls}
    counts = Counter(map(_latent_kind, impls))
    layers = ", ".join(
        _latent_layers(impl, counts[kind]) for kind, impl in kinds.items()
    )
    packed = sum(impl.runner.layout.slot_size for impl in impls)
    unpacked = sum(2 * impl.head_size for impl in impls)
    workspace = max(impl.runner.workspace_bytes for impl in impls)
    seen = "stored" if impls[0].runner.stored else "raw"
    means = [impl.runner.mean for impl in impls]
    latents = [None if mean is None else mean.latent for mean in means]
    mean = ""
    if any(x is not None for x in latents):
        count = sum(x is not None for x in latents)
        digest = key_offset.digest(latents)
        mean = f"; latents' mean: {count} of {len(impls)} layers ({digest})"
    return (
        f"KV cache {impls[0].kv_cache_dtype}: {layers}, {unpacked / packed:.2f} times "
        f"fewer than in bf16; {workspace / 2**20:.1f} MiB of workspace; prefill "
        f"attends to {seen} latents{mean}."
    )


def _is_first_of_its_layers() -> bool:
    """Whether this is the first of the ranks that share their layers and requests."""
    return not model_parallel_is_initialized() or get_tp_group().is_first_rank


def prefix_hit_advice(cache_config: CacheConfig) -> str | None:
    """Advice on a hybrid model's prefix hits, if they are of whole blocks.

    A block is as large as a layer's state. So the fewer bytes a token takes, the more
    tokens a block has.
    """
    if (
        not cache_config.enable_prefix_caching
        or cache_config.mamba_cache_mode != "align"
        or cache_config.prefix_match_unit is not None
        or cache_config.block_size <= TILE_TOKENS
    ):
        return None
    return (
        f"Prefix hits are of whole blocks of {cache_config.block_size} tokens, which "
        f"are as large as a state of this model. With --prefix-match-unit "
        f"{TILE_TOKENS} they end within blocks."
    )


def pooling_advice(vllm_config: VllmConfig) -> str | None:
    """Advice on a pooling model's outputs, if they depend on the cache.

    A request is only a prefill, which sees its own tokens as computed. It sees tokens
    of a prefix hit and of earlier chunks as they are stored.
    """
    is_pooling = vllm_config.model_config.runner_type == "pooling"
    if not is_pooling or vllm_config.attention_config.turbo_prefill == "stored":
        return None
    features = {
        "prefix caching": vllm_config.cache_config.enable_prefix_caching,
        "chunked prefill": vllm_config.scheduler_config.enable_chunked_prefill,
    }
    names = [name for name, is_on in features.items() if is_on]
    if not names:
        return None
    flags = " and ".join(f"--disable-{name.replace(' ', '-')}" for name in names)
    return (
        f"With {' and '.join(names)} an input may get slightly different scores or "
        "embeddings each time: tokens in a turbo KV cache are seen as they are stored, "
        f"others as computed. Where outputs are compared, pass {flags}, which gives "
        "those of the model's dtype, or --attention-config.turbo_prefill stored, which "
        "is less exact."
    )


def log_turbo_cache(vllm_config: VllmConfig) -> None:
    """Log ``describe_cache`` or ``describe_latent_cache``, once, and advice.

    Every pipeline stage logs it, because stages have different layers. So does every
    data parallel rank, because ranks may run different kernels. One more line has the
    kernels of all ranks. The advice is on prefix hits and on outputs of pooling models.
    """
    impls = turbo_impls(vllm_config)
    latent_impls = turbo_mla_impls(vllm_config)
    used = {impl.runner.kernels_used for impl in (*impls, *latent_impls)}
    if not used:
        return
    report_kernels("; ".join(sorted(used)))
    if _is_first_of_its_layers():
        if impls:
            num_unpacked = sum(
                not is_turbo_cache_dtype(layer.kv_cache_dtype)
                for layer in get_layers_from_vllm_config(
                    vllm_config, Attention
                ).values()
            )
            line = describe_cache(impls, num_unpacked)
            logger.info_once("%s", line, scope="process")
        if latent_impls:
            line = describe_latent_cache(latent_impls)
            logger.info_once("%s", line, scope="process")
        if advice := prefix_hit_advice(vllm_config.cache_config):
            logger.info_once("%s", advice, scope="process")
        if advice := pooling_advice(vllm_config):
            logger.warning_once("%s", advice, scope="process")
