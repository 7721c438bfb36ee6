# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the turbo cache dtypes do not serve, and what a user is told."""

from collections.abc import Callable, Iterable

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.ops.turbo.latent_format import LATENT_PRESETS, LATENT_SIZES
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
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
ADAPTIVE_VERIFICATION = (
    "device-cpu query lens mismatch not supported, this is needed for adaptive "
    "verification"
)

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

# Sizes of MLA that are served: of both together those that vLLM's MLA has.
MLA_SIZES = tuple(LATENT_SIZES[head_size] for head_size in (576, 512, 320))
# Of an MLA layer's arguments, those of any layer.
MLA_ARGUMENTS = frozenset(
    ("q_lora_rank", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj")
)
MLA_SLIDING_WINDOW = "sliding window of MLA"
MLA_SKIPPED_LAYERS = "MLA with --kv-cache-dtype-skip-layers (leave it out)"
MLA_QUANTIZED_QUERIES = (
    "MLA with quantized queries of prefills (leave out "
    "--attention-config.use_prefill_query_quantization)"
)
MLA_FUSED_UPDATE = (
    "MLA with a fused cache update (leave out fuse_rope_kvcache_cat_mla of pass_config)"
)
MLA_SINKS = "attention sinks of MLA"
MLA_DRAFTERS = "MLA with a DSpark or DFlash drafter"
MLA_BESIDE_K_AND_V = (
    "MLA beside layers with K and V (if those are a drafter's, set another "
    "kv_cache_dtype in --speculative-config)"
)
MLA_WINDOW = "of MLA the newest tokens are read as they are stored"

# What an engine has that is not served with MLA.
MLA_SETTINGS: dict[str, Callable[[VllmConfig], bool]] = {
    MLA_SKIPPED_LAYERS: (
        lambda config: bool(config.cache_config.kv_cache_dtype_skip_layers)
    ),
    MLA_QUANTIZED_QUERIES: (
        lambda config: config.attention_config.use_prefill_query_quantization
    ),
    MLA_FUSED_UPDATE: (
        lambda config: bool(
            config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla
        )
    ),
    MLA_DRAFTERS: (
        lambda config: (
            config.speculative_config is not None
            and config.speculative_config.method in ("dspark", "dflash")
        )
    ),
    # Whoever finds no backend with sinks leaves them out, with a warning.
    MLA_SINKS: (
        lambda config: bool(
            getattr(config.model_config.hf_text_config, "learnable_sink", False)
        )
    ),
    ADAPTIVE_VERIFICATION: (
        lambda config: (
            config.speculative_config is not None
            and config.speculative_config.enable_adaptive_verification
        )
    ),
    "PCP not supported": (
        lambda config: config.parallel_config.prefill_context_parallel_size > 1
    ),
    "DCP not supported": (
        lambda config: config.parallel_config.decode_context_parallel_size > 1
    ),
}
# Of an MLA layer's cache spec, by reason.
MLA_SPEC_FEATURES: dict[str, Callable[[MLAAttentionSpec], bool]] = {
    NON_CAUSAL: lambda spec: spec.non_causal_multi_token_decode,
    "sparse not supported": (
        lambda spec: spec.topk_buffer_width is not None or spec.is_index_group_leader
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
DCP_OF_STORED = "DCP with turbo_prefill stored (leave it at raw)"
DCP_OF_WINDOWS = "DCP of a sliding window, or of chunked local attention"
DCP_OF_POOLED = "DCP of pooled blocks"
DCP_OF_SHARED_CACHES = "DCP of KV sharing between layers"
DCP_OF_KEY_OFFSETS = "DCP with a bias of K"
DCP_OF_SPANS = (
    "DCP with partial multimodal token full attention (--language-model-only serves "
    "text)"
)
DCP_OF_ADAPTIVE_VERIFICATION = "DCP with adaptive verification"
DCP_OF_HEAD_SIZE = "DCP of heads of neither 64, 128 nor 256"
DCP_HEAD_SIZES = (64, 128, 256)
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
    DCP_OF_STORED,
    DCP_OF_WINDOWS,
    DCP_OF_POOLED,
    DCP_OF_SHARED_CACHES,
    DCP_OF_KEY_OFFSETS,
    DCP_OF_SPANS,
    DCP_OF_ADAPTIVE_VERIFICATION,
    DCP_OF_HEAD_SIZE,
    ROCM,
    XPU,
    "attention backend <name> (<dtype>'s pages are read by <own> alone: drop "
    "--attention-backend, or pass <own> if the model chose another)",
    "kv_cache_dtype not supported (<dtype>'s pages are read by TURBO alone: drop "
    "--attention-backend if given, or use --kv-cache-dtype fp8 or auto instead of "
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

# The same, of what MLA alone is refused for.
MLA_REASONS = (
    "non-MLA not supported",
    "kv_cache_dtype not supported (<dtype>'s MLA pages are read by TURBO_MLA alone: "
    "drop --attention-backend if given, or use --kv-cache-dtype fp8 or auto instead of "
    "<dtype>)",
    "<dtype> of MLA, where K and V are one vector (use turbo4 or turbo3)",
    "MLA with a latent of <rank> and <rope> rotary coordinates",
    MLA_SLIDING_WINDOW,
    MLA_SINKS,
    MLA_SKIPPED_LAYERS,
    MLA_QUANTIZED_QUERIES,
    MLA_FUSED_UPDATE,
    MLA_DRAFTERS,
    ADAPTIVE_VERIFICATION,
    "DCP not supported",
    MLA_BESIDE_K_AND_V,
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


def backend_reason(cache_dtype: str | None, name: str, own: str) -> str:
    """The reason to refuse a backend that a user or the model's configuration chose.

    Args:
        cache_dtype: A turbo one.
        name: What was chosen.
        own: The backend that reads the dtype's pages.

    """
    return (
        f"attention backend {name} ({cache_dtype}'s pages are read by {own} alone: "
        f"drop --attention-backend, or pass {own} if the model chose another)"
    )


def other_backend_reason(cache_dtype: str | None, use_mla: bool) -> str:
    """The reason of any other backend not to be selected."""
    if use_mla and cache_dtype not in LATENT_PRESETS:
        return one_vector_reason(cache_dtype)
    pages, name = ("MLA pages", "TURBO_MLA") if use_mla else ("pages", "TURBO")
    return (
        f"kv_cache_dtype not supported ({cache_dtype}'s {pages} are read by {name} "
        f"alone: drop --attention-backend if given, or {way_out(cache_dtype)})"
    )


def one_vector_reason(cache_dtype: str | None) -> str:
    """The reason to refuse a dtype that stores K and V in ways of their own."""
    dtypes = " or ".join(LATENT_PRESETS)
    return f"{cache_dtype} of MLA, where K and V are one vector (use {dtypes})"


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


def unsupported_settings(vllm_config: VllmConfig) -> list[str]:
    """What of an engine's configuration is not served with any attention."""
    reasons = []
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.uses_extract_hidden_states():
        reasons.append(HIDDEN_STATES)
    if vllm_config.parallel_config.use_ubatching:
        reasons.append(MICRO_BATCHES)
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        reasons.append(KV_SHARING_FAST_PREFILL)
    return reasons


def unsupported_with_dcp(
    vllm_config: VllmConfig,
    head_size: int,
    has_sliding_window: bool,
    is_pooled: bool,
    shares_cache: bool,
) -> list[str]:
    """What of a layer is not served where ranks share the context."""
    speculative = vllm_config.speculative_config
    model_config = vllm_config.model_config
    found = {
        # Query tokens are in the cache of one rank each.
        DCP_OF_STORED: vllm_config.attention_config.turbo_prefill == "stored",
        # What a token sees of a rank's tokens depends on the token.
        DCP_OF_WINDOWS: has_sliding_window,
        DCP_OF_POOLED: is_pooled,
        DCP_OF_SHARED_CACHES: shares_cache,
        DCP_OF_SPANS: model_config is not None and model_config.is_mm_prefix_lm,
        DCP_OF_ADAPTIVE_VERIFICATION: (
            speculative is not None and speculative.enable_adaptive_verification
        ),
        # vLLM's kernels join vectors of as many coordinates as a power of two.
        DCP_OF_HEAD_SIZE: head_size not in DCP_HEAD_SIZES,
    }
    return [reason for reason, is_found in found.items() if is_found]


def unsupported_spec_features(spec: AttentionSpec) -> list[str]:
    """What of a layer's cache spec is not implemented."""
    if type(spec) not in SPECS:
        kind = type(spec).__name__.removesuffix("Spec")
        return [f"layers of kind {kind}"]
    return [reason for reason, found in SPEC_FEATURES.items() if found(spec)]


def unsupported_mla_sizes(rank: int, rope: int) -> list[str]:
    """Why an MLA layer's latent and rotary key are not stored, if they are not."""
    if (rank, rope) in MLA_SIZES:
        return []
    return [f"MLA with a latent of {rank} and {rope} rotary coordinates"]


def unsupported_mla_settings(vllm_config: VllmConfig) -> list[str]:
    """What of an engine's configuration is not served with MLA."""
    return [reason for reason, found in MLA_SETTINGS.items() if found(vllm_config)]


def unsupported_mla_spec(spec: AttentionSpec) -> list[str]:
    """What of an MLA layer's cache spec is not implemented."""
    if type(spec) is not MLAAttentionSpec:
        kind = type(spec).__name__.removesuffix("Spec")
        return [f"layers of kind {kind}"]
    return [reason for reason, found in MLA_SPEC_FEATURES.items() if found(spec)]
