# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Verdicts on models: served, refused with a message, or a defect of ours."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from turbo_recipes.shapes import Shape
from vllm.config import VllmConfig
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
)

CACHE_DTYPE = "turbo4"
# Dtypes that may be served instead, from small to large.
OTHERS = ("fp8", "auto")
# Flags that a message may name, and their arguments of ``EngineArgs``.
FLAGS: dict[str, dict[str, Any]] = {
    "--kv-cache-dtype-skip-layers sliding_window": {
        "kv_cache_dtype_skip_layers": ["sliding_window"]
    },
    "--language-model-only": {"language_model_only": True},
}
# Forms of the messages of vLLM and its models; the group is the reason.
MESSAGES = (
    r"--kv-cache-dtype \S+ does not support this: (.*?)\."
    r"(?: Use --kv-cache-dtype .*)?",
    r"[\w.]+: (attention backend \S+ does not support --kv-cache-dtype \S+)\. .*",
)


@dataclass
class Build:
    """The parts of an engine that could be made for a model.

    Attributes:
        stage: The part that was made last.
        error: The error that ended it, if any.
        config: The engine's configuration.
        model: The model without weights.
        specs: The cache specification of each layer, by the layer's name.
        groups: The groups of layers that share blocks.

    """

    stage: str = "configuration"
    error: Exception | None = None
    config: VllmConfig | None = None
    model: nn.Module | None = None
    specs: dict[str, KVCacheSpec] = field(default_factory=dict)
    groups: list[KVCacheGroupSpec] = field(default_factory=list)


def find_reason(message: str) -> str | None:
    """Returns the reason in a refusal's message; None if the dtype is not refused."""
    for pattern in MESSAGES:
        if found := re.fullmatch(pattern, message, re.DOTALL):
            return found[1]
    # Models that read their caches by themselves name the dtypes that they read.
    if re.search(rf"{CACHE_DTYPE}|KV cache", message):
        return message.partition(". ")[0]
    return None


def is_packed(spec: AttentionSpec) -> bool:
    """Whether a layer's cache has TURBO's bytes, or TURBO_MLA's."""
    if not spec.kv_quant_mode.is_turbo:
        return False
    layout: TurboFormat | LatentFormat
    if isinstance(spec, MLAAttentionSpec):
        layout = LatentFormat.from_cache_dtype(CACHE_DTYPE, spec.head_size)
    else:
        sizes = spec.head_size, getattr(spec, "head_size_v", None)
        layout = TurboFormat.from_cache_dtype(CACHE_DTYPE, *sizes)
    return spec.state_content_bytes == layout.slot_size


def is_indexer(spec: KVCacheSpec) -> bool:
    """Tells whether a cache holds an indexer's keys, as sparse MLA has them."""
    return getattr(spec, "cache_role", None) == SparseCacheRole.INDEXER


def find_foreign_layer(
    specs: dict[str, KVCacheSpec], skips_windows: bool
) -> str | None:
    """Returns the first layer whose cache is not TURBO's, nor a state, nor skipped.

    The keys of indexers are none of TURBO's.
    """
    for name, spec in specs.items():
        if isinstance(spec, MambaSpec) or is_indexer(spec):
            continue
        is_packed_layer = isinstance(spec, AttentionSpec) and is_packed(spec)
        kind = type(spec).__name__
        if not is_packed_layer and not (skips_windows and kind == "SlidingWindowSpec"):
            return f"{name} ({kind})"
    return None


def describe_layers(built: Build) -> dict[str, Any]:
    """Returns the packed layers by shape: number of layers, KV heads, head size.

    A layer's recent window does not count as a layer. The head size of MLA is the
    latent's and the rotary key's, together.
    """
    packed = [
        spec
        for spec in built.specs.values()
        if isinstance(spec, AttentionSpec)
        and not isinstance(spec, CircularBufferSpec)
        and is_packed(spec)
    ]
    shapes = Counter((spec.num_kv_heads, spec.head_size) for spec in packed)
    state = any(isinstance(spec, MambaSpec) for spec in built.specs.values())
    assert built.config is not None
    is_mla = any(isinstance(spec, MLAAttentionSpec) for spec in packed)
    return {
        "kind": "hybrid" if state else "full",
        **({"mla": True} if is_mla else {}),
        **({"sparse": True} if any(map(is_indexer, built.specs.values())) else {}),
        "layers": [[count, *shape] for shape, count in shapes.items()],
        "block_size": built.config.cache_config.block_size,
    }


def judge(built: Build, skips_windows: bool = False) -> dict[str, Any]:
    """Returns the verdict on a model that was built with the cache dtype."""
    error = built.error
    if error is None:
        foreign = find_foreign_layer(built.specs, skips_windows)
        if foreign is not None or not built.specs:
            return {"outcome": "defect", "message": f"accepted, with {foreign}"}
        return {"outcome": "served"} | describe_layers(built)
    if isinstance(error, ModuleNotFoundError):
        return {"outcome": "unknown", "message": f"needs {error.name}"}
    message = str(error)
    expected = isinstance(error, (ValueError, NotImplementedError))
    reason = find_reason(message) if expected else None
    if reason is None:
        kind = type(error).__name__
        return {"outcome": "defect", "message": f"{built.stage}: {kind}: {message}"}
    return {"outcome": "refused", "stage": built.stage, "reason": reason}


def examine(
    shape: Shape, build: Callable[..., Build], ways_out: bool
) -> dict[str, Any]:
    """Returns the verdict on a shape.

    Args:
        shape: The model's shape.
        build: `build.build`, an argument because it imports all of vLLM.
        ways_out: Whether to try, for a refused model, the flags that the message names
            and the dtypes to use instead.

    """
    verdict = judge(build(shape, CACHE_DTYPE))
    if verdict["outcome"] != "refused" or not ways_out:
        return verdict
    flags = [flag for flag in FLAGS if flag in verdict["reason"]]
    if flags:
        own = {name: value for flag in flags for name, value in FLAGS[flag].items()}
        built = build(shape, CACHE_DTYPE, **own)
        then = judge(built, "kv_cache_dtype_skip_layers" in own)
        verdict["flags"] = {"flags": flags} | then
    dtypes = (name for name in OTHERS if build(shape, name).error is None)
    # Some models cannot be built here at all, without a package or a tokenizer.
    verdict["instead"] = next(dtypes, None)
    return verdict
