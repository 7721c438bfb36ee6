# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the turbo cache dtypes do not serve, and what a user is told."""

from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec


def refusal(cache_dtype: str | None, reason: str) -> str:
    """The message for what a turbo cache dtype cannot serve."""
    return (
        f"--kv-cache-dtype {cache_dtype} does not support this: {reason}. "
        "Use --kv-cache-dtype fp8 or auto instead."
    )


def unsupported_spec_features(spec: AttentionSpec) -> list[str]:
    """What of a layer's cache spec the backend does not implement."""
    if type(spec) is not FullAttentionSpec:
        kind = type(spec).__name__.removesuffix("Spec")
        return [f"layers of kind {kind}"]
    features = {
        # Full attention stands for these without the hybrid cache manager.
        "sliding window": spec.sliding_window is not None,
        "chunked local attention": spec.attention_chunk_size is not None,
        "non-causal attention": spec.non_causal,
        "head_size_v other than head_size": spec.head_size_v != spec.head_size,
        "tokens_per_state other than 1": spec.tokens_per_state != 1,
    }
    return [feature for feature, found in features.items() if found]
