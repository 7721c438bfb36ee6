# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the turbo cache dtypes do not serve, and what a user is told."""

from collections.abc import Callable, Iterable

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

# Reasons by what is not served, in the words of
# ``AttentionBackend.validate_configuration`` where it has them, with the flag that
# helps in brackets.
SLIDING_WINDOW_OF_LARGE_HEADS = (
    "sliding window of heads of more than 256 (--kv-cache-dtype-skip-layers "
    "sliding_window keeps such layers in the model's dtype)"
)
SOFT_CAP_OF_LARGE_HEADS = "logits soft cap of heads of more than 256"
MM_PREFIX_OF_LARGE_HEADS = (
    "partial multimodal token full attention of heads of more than 256 "
    "(--language-model-only serves text)"
)
MM_PREFIX_BEYOND_WINDOW = (
    "partial multimodal token full attention beyond a sliding window "
    "(--language-model-only serves text)"
)
MM_PREFIX_OF_ADAPTIVE_VERIFICATION = (
    "partial multimodal token full attention with adaptive verification "
    "(--language-model-only serves text)"
)
NON_CAUSAL = "non-causal attention not supported"

# Of an attention layer's arguments, by reason. Any other is refused by its name.
LAYER_ARGUMENTS = {
    "ALiBi": "alibi_slopes",
}

# What kinds of cache specs are served.
SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
# Of a layer's cache spec, by reason.
SPEC_FEATURES: dict[str, Callable[[AttentionSpec], bool]] = {
    NON_CAUSAL: lambda spec: getattr(spec, "non_causal", False),
    "head_size_v other than head_size": (
        lambda spec: spec.head_size_v != spec.head_size
    ),
    "tokens_per_state other than 1": lambda spec: spec.tokens_per_state != 1,
}

# What an engine has that leaves no place for a recent window, by the reason that a user
# is told: a part of a sentence.
WINDOW_FEATURES: dict[str, Callable[[VllmConfig], bool]] = {
    "turbo_prefill is stored, so that all tokens are seen as they are stored": (
        lambda config: config.attention_config.turbo_prefill == "stored"
    ),
    "vLLM's first model runner has no blocks that stay with a request": (
        lambda config: not config.use_v2_model_runner
    ),
    "the hybrid KV cache manager is disabled, by its flag or for a KV connector": (
        lambda config: bool(config.scheduler_config.disable_hybrid_kv_cache_manager)
    ),
    "context parallelism gives a rank every other token": (
        lambda config: config.parallel_config.decode_context_parallel_size > 1
    ),
    "a block of a hybrid model is as long as its state: too much for a request": (
        lambda config: (
            config.model_config is not None and config.model_config.is_hybrid
        )
    ),
}

KV_SHARING_FAST_PREFILL = "fast prefill (leave out --kv-sharing-fast-prefill)"
KV_SHARING_OF_OTHER_DTYPES = (
    "KV sharing between layers of different dtypes (name all that share, or none, in "
    "--kv-cache-dtype-skip-layers, and no kv_cache_dtype in --speculative-config)"
)
SKIPPED_POOLED_LAYER = (
    "pooled blocks of a layer in the model's dtype (name no layer of its number in "
    "--kv-cache-dtype-skip-layers, nor sliding_window)"
)
HIDDEN_STATES = "extract_hidden_states"
MICRO_BATCHES = "micro-batches (leave out --enable-dbo and --ubatch-size)"
NO_FLASH_ATTN = "a vLLM without FlashAttention for this GPU"
ROCM = "ROCm"
XPU = "XPU"
FUSED_OUTPUT = "fused output quantization"
FOREIGN_TOKENS = "a cache update beside the forward pass, with an offset of K"

# All that a refusal may name; <...> stands for what varies. The documentation says what
# to do about each.
REASONS = (
    "head_size not supported",
    "dtype not supported",
    "block_size not supported",
    MM_PREFIX_OF_LARGE_HEADS,
    MM_PREFIX_BEYOND_WINDOW,
    MM_PREFIX_OF_ADAPTIVE_VERIFICATION,
    "MLA not supported",
    "sparse not supported",
    "compute capability not supported",
    "attention type <type> not supported",
    SLIDING_WINDOW_OF_LARGE_HEADS,
    "R-SWA not supported",
    NON_CAUSAL,
    "non-causal MLA attention with DCP not supported",
    "batch invariance not supported",
    "PCP not supported",
    "DCP not supported",
    ROCM,
    XPU,
    "attention backend <name> (<dtype>'s pages are read by TURBO alone: drop "
    "--attention-backend, or pass TURBO if the model chose another)",
    "kv_cache_dtype not supported (<dtype>'s pages are read by TURBO alone: drop "
    "--attention-backend if given, or use --kv-cache-dtype fp8 or auto instead of "
    "<dtype>)",
    "kv_cache_dtype not supported (MLA: use --kv-cache-dtype fp8 or auto instead of "
    "<dtype>)",
    "ALiBi",
    SOFT_CAP_OF_LARGE_HEADS,
    KV_SHARING_FAST_PREFILL,
    KV_SHARING_OF_OTHER_DTYPES,
    SKIPPED_POOLED_LAYER,
    HIDDEN_STATES,
    MICRO_BATCHES,
    "layer argument <name>",
    "layers of kind <kind>",
    "layer <name> of <model> (<kind>, <backend>)",
    "head_size_v other than head_size",
    "tokens_per_state other than 1",
    NO_FLASH_ATTN,
    "KV connector <name> (<instead>)",
    FUSED_OUTPUT,
    FOREIGN_TOKENS,
)


def window_refusal(num_tokens: int, reason: str) -> str:
    """The message for a recent window that was asked for and cannot be had."""
    return (
        f"attention_config.turbo_window={num_tokens} cannot be had, because {reason}. "
        "Use auto or 0 instead."
    )


def window_room(num_tokens: int, block_size: int, query_len: int) -> str:
    """The reason not to have a window that a block has no room for."""
    return (
        f"a block of {block_size} tokens has room for {num_tokens} recent ones, beside "
        f"{query_len} of a step (a larger --block-size has room for more)"
    )


def window_sight(sliding_window: int, query_len: int) -> str:
    """The reason not to have a window of tokens that some query tokens do not see."""
    return (
        f"query tokens see {sliding_window} tokens, of which a step may have "
        f"{query_len}"
    )


def way_out(cache_dtype: str | None) -> str:
    """What follows the reasons for which a backend was not selected."""
    return f"use --kv-cache-dtype fp8 or auto instead of {cache_dtype}"


def refusal(cache_dtype: str | None, reasons: Iterable[str]) -> str:
    """The message for what a turbo cache dtype cannot serve."""
    return (
        f"--kv-cache-dtype {cache_dtype} does not support this: {'; '.join(reasons)}. "
        "Use --kv-cache-dtype fp8 or auto instead."
    )


def backend_reason(cache_dtype: str | None, name: str) -> str:
    """The reason to refuse a backend that a user or the model's configuration chose."""
    return (
        f"attention backend {name} ({cache_dtype}'s pages are read by TURBO alone: "
        "drop --attention-backend, or pass TURBO if the model chose another)"
    )


def other_backend_reason(cache_dtype: str | None, use_mla: bool) -> str:
    """The reason of any other backend not to be selected."""
    if use_mla:
        return f"kv_cache_dtype not supported (MLA: {way_out(cache_dtype)})"
    return (
        f"kv_cache_dtype not supported ({cache_dtype}'s pages are read by TURBO alone: "
        f"drop --attention-backend if given, or {way_out(cache_dtype)})"
    )


def layer_reason(name: str, model: str, kind: str, backend: str) -> str:
    """The reason to refuse a layer that TURBO does not serve."""
    return f"layer {name} of {model} ({kind}, {backend})"


def longest_sequence(vllm_config: VllmConfig) -> int:
    """Tokens of the longest sequence that a layer of the model or its drafter sees."""
    configs = [vllm_config.model_config]
    if vllm_config.speculative_config is not None:
        configs.append(vllm_config.speculative_config.target_model_config)
    return max(config.max_model_len for config in configs if config is not None)


def unsupported_layer_arguments(
    attn_type: str, arguments: dict[str, object]
) -> list[str]:
    """What of an attention layer's optional arguments is not implemented.

    Models pass defaults explicitly: None, False and a factor of zero mean nothing.
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
    if type(spec) not in SPECS:
        kind = type(spec).__name__.removesuffix("Spec")
        return [f"layers of kind {kind}"]
    return [reason for reason, found in SPEC_FEATURES.items() if found(spec)]
