# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the turbo cache dtypes do not serve, and what a user is told."""

from collections.abc import Callable, Iterable

from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

# Reasons by what is not served, in the words of
# ``AttentionBackend.validate_configuration`` where it has them.
SLIDING_WINDOW = "sliding window not supported"
NON_CAUSAL = "non-causal attention not supported"

# Of an attention layer's arguments, by reason. Any other is refused by its name.
LAYER_ARGUMENTS = {
    "ALiBi": "alibi_slopes",
    SLIDING_WINDOW: "sliding_window",
    "logits soft cap": "logits_soft_cap",
    "KV sharing between layers": "kv_sharing_target_layer_name",
}

# Of a layer's cache spec, by reason. Full attention stands for a sliding window and for
# chunks without the hybrid cache manager.
SPEC_FEATURES: dict[str, Callable[[FullAttentionSpec], bool]] = {
    SLIDING_WINDOW: lambda spec: spec.sliding_window is not None,
    "chunked local attention": lambda spec: spec.attention_chunk_size is not None,
    NON_CAUSAL: lambda spec: spec.non_causal,
    "head_size_v other than head_size": (
        lambda spec: spec.head_size_v != spec.head_size
    ),
    "tokens_per_state other than 1": lambda spec: spec.tokens_per_state != 1,
}

HIDDEN_STATES = "extract_hidden_states"
PERMUTED_TRANSFER = "enable_permute_local_kv"
XPU = "XPU"
FUSED_OUTPUT = "fused output quantization"

# All that a refusal may name; <...> stands for what varies. The documentation says what
# to do about each.
REASONS = (
    "head_size not supported",
    "dtype not supported",
    "block_size not supported",
    "partial multimodal token full attention not supported",
    "MLA not supported",
    "attention sinks not supported",
    "sparse not supported",
    "per-head quant scales not supported",
    "compute capability not supported",
    "attention type <type> not supported",
    SLIDING_WINDOW,
    "R-SWA not supported",
    NON_CAUSAL,
    "non-causal MLA attention with DCP not supported",
    "batch invariance not supported",
    "PCP not supported",
    "DCP not supported",
    XPU,
    "attention backend <name> (<dtype>'s pages are read by TURBO alone: drop "
    "--attention-backend)",
    "ALiBi",
    "logits soft cap",
    "KV sharing between layers",
    HIDDEN_STATES,
    "layer argument <name>",
    "layers of kind <kind>",
    "chunked local attention",
    "head_size_v other than head_size",
    "tokens_per_state other than 1",
    PERMUTED_TRANSFER,
    FUSED_OUTPUT,
)


def refusal(cache_dtype: str | None, reasons: Iterable[str]) -> str:
    """The message for what a turbo cache dtype cannot serve."""
    return (
        f"--kv-cache-dtype {cache_dtype} does not support this: {'; '.join(reasons)}. "
        "Use --kv-cache-dtype fp8 or auto instead."
    )


def backend_reason(cache_dtype: str | None, name: str) -> str:
    """The reason to refuse a backend that a user asked for."""
    return (
        f"attention backend {name} ({cache_dtype}'s pages are read by TURBO alone: "
        "drop --attention-backend)"
    )


def unsupported_layer_arguments(
    attn_type: str, arguments: dict[str, object]
) -> list[str]:
    """What of an attention layer's optional arguments is not implemented.

    Models pass defaults explicitly: None, False and a soft cap of zero mean nothing.
    """
    given = {
        name
        for name, value in arguments.items()
        if value is not None and not (isinstance(value, (bool, float)) and not value)
    }
    reasons = [reason for reason, name in LAYER_ARGUMENTS.items() if name in given]
    others = sorted(given - set(LAYER_ARGUMENTS.values()))
    reasons += [f"layer argument {name}" for name in others]
    if attn_type != AttentionType.DECODER:
        reasons.append(f"attention type {attn_type} not supported")
    return reasons


def unsupported_spec_features(spec: AttentionSpec) -> list[str]:
    """What of a layer's cache spec is not implemented."""
    if type(spec) is not FullAttentionSpec:
        kind = type(spec).__name__.removesuffix("Spec")
        return [f"layers of kind {kind}"]
    return [reason for reason, found in SPEC_FEATURES.items() if found(spec)]
