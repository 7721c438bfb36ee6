# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Finds features that the turbo cache dtypes do not serve, and has users' messages."""

from collections.abc import Callable, Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.ops.turbo import reasons
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES
from vllm.v1.attention.ops.turbo.latent.format import LATENT_PRESETS
from vllm.v1.attention.ops.turbo.reasons import Reason
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

# The last sentence of a message, if only another dtype helps.
WAY_OUT = "Use --kv-cache-dtype fp8 or auto instead"
# Reasons by the words of ``AttentionBackend.validate_configuration``.
BORROWED = {
    "head_size not supported": reasons.HEAD_SIZE,
    "dtype not supported": reasons.MODEL_DTYPE,
    "block_size not supported": reasons.BLOCK_SIZE,
    "partial multimodal token full attention not supported": reasons.MLA_MM_PREFIX,
    "attention sinks not supported": reasons.MLA_SINKS,
    "sparse not supported": reasons.SPARSE,
    "compute capability not supported": reasons.COMPUTE_CAPABILITY,
    "sliding window not supported": reasons.MLA_SLIDING_WINDOW,
    "R-SWA not supported": reasons.R_SWA,
    "non-causal attention not supported": reasons.NON_CAUSAL,
    "non-causal MLA attention with DCP not supported": reasons.NON_CAUSAL,
    "batch invariance not supported": reasons.BATCH_INVARIANCE,
    "PCP not supported": reasons.PCP,
    "DCP not supported": reasons.MLA_DCP,
    "device-cpu query lens mismatch not supported, this is needed for adaptive "
    "verification": reasons.MLA_ADAPTIVE_VERIFICATION,
}
ATTENTION_KINDS = {
    AttentionType.DECODER: "decoder",
    AttentionType.ENCODER: "encoder",
    AttentionType.ENCODER_ONLY: "encoder-only",
    AttentionType.ENCODER_DECODER: "encoder-decoder (cross)",
}

# Refused arguments of an attention layer, by reason. Others are refused by name.
LAYER_ARGUMENTS = {reasons.ALIBI: "alibi_slopes"}

# The kinds of cache specs that are served.
SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
# Refused features of a layer's cache spec, by reason.
SPEC_FEATURES: dict[Reason, Callable[[AttentionSpec], bool]] = {
    reasons.NON_CAUSAL: lambda spec: getattr(spec, "non_causal", False),
    reasons.SIZE_OF_V: lambda spec: spec.head_size_v not in HEAD_SIZES,
    reasons.TOKENS_PER_STATE: lambda spec: spec.tokens_per_state != 1,
}

# The arguments that every MLA layer has.
MLA_ARGUMENTS = frozenset(
    ("q_lora_rank", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj")
)
# The arguments that every sparse MLA layer has.
SPARSE_MLA_ARGUMENTS = MLA_ARGUMENTS | {
    "indexer",
    "topk_indices_buffer",
    "index_group_builder",
}
MLA_TAIL = "MLA reads the newest tokens as they are stored"

# Refused settings of an engine with MLA, by reason.
MLA_SETTINGS: dict[Reason, Callable[[VllmConfig], bool]] = {
    reasons.MLA_SKIPPED_LAYERS: (
        lambda config: bool(config.cache_config.kv_cache_dtype_skip_layers)
    ),
    reasons.MLA_QUANTIZED_QUERIES: (
        lambda config: config.attention_config.use_prefill_query_quantization
    ),
    reasons.MLA_FUSED_UPDATE: (
        lambda config: bool(
            config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla
        )
    ),
    reasons.MLA_DRAFTERS: (
        lambda config: (
            config.speculative_config is not None
            and config.speculative_config.method in ("dspark", "dflash")
        )
    ),
    # A model that finds no backend with sinks leaves them out, with a warning.
    reasons.MLA_SINKS: (
        lambda config: bool(
            getattr(config.model_config.hf_text_config, "learnable_sink", False)
        )
    ),
    # The sizes of latents of layers that have a sliding window.
    reasons.MLA_SLIDING_WINDOW: (
        lambda config: hasattr(config.model_config.hf_text_config, "swa_kv_lora_rank")
    ),
    reasons.MLA_POOLED_INDEXER: (
        lambda config: (
            (getattr(config.model_config.hf_text_config, "index_kpool", None) or 1) > 1
        )
    ),
    reasons.MLA_HISPARSE: (
        lambda config: config.attention_config.hisparse_config is not None
    ),
    reasons.MLA_ADAPTIVE_VERIFICATION: (
        lambda config: (
            config.speculative_config is not None
            and config.speculative_config.enable_adaptive_verification
        )
    ),
    reasons.PCP: (
        lambda config: config.parallel_config.prefill_context_parallel_size > 1
    ),
    reasons.MLA_DCP: (
        lambda config: config.parallel_config.decode_context_parallel_size > 1
    ),
}
# Refused features of an MLA layer's cache spec, by reason.
MLA_SPEC_FEATURES: dict[Reason, Callable[[MLAAttentionSpec], bool]] = {
    reasons.NON_CAUSAL: lambda spec: spec.non_causal_multi_token_decode,
    reasons.SPARSE: (
        lambda spec: spec.topk_buffer_width is not None or spec.is_index_group_leader
    ),
    reasons.TOKENS_PER_STATE: lambda spec: spec.tokens_per_state != 1,
}

# Features of an engine that rule out a tail, by the reason for users: a part
# of a sentence.
TAIL_FEATURES: dict[str, Callable[[VllmConfig], bool]] = {
    "turbo_prefill is stored, so that all tokens are seen as they are stored (leave it "
    "out, or raw)": (lambda config: config.attention_config.turbo_prefill == "stored"),
    "model runner V1 has no blocks that stay with a request "
    "(VLLM_USE_V2_MODEL_RUNNER=1 asks for V2)": (
        lambda config: not config.use_v2_model_runner
    ),
    "the hybrid KV cache manager is disabled, for a KV connector or by its flag (leave "
    "out --disable-hybrid-kv-cache-manager)": (
        lambda config: bool(config.scheduler_config.disable_hybrid_kv_cache_manager)
    ),
    "context parallelism gives a rank every other token (leave out "
    "--decode-context-parallel-size)": (
        lambda config: config.parallel_config.decode_context_parallel_size > 1
    ),
    "a block of a hybrid model is as large as its state, which is too much for a "
    "request": (
        lambda config: (
            config.model_config is not None and config.model_config.is_hybrid
        )
    ),
}


# Features of an engine that rule out means of K, likewise.
MEANS_FEATURES: dict[str, Callable[[VllmConfig], bool]] = {
    "the weights are dummies (--load-format dummy)": (
        lambda config: config.load_config.load_format == "dummy"
    ),
    "no text has tokens (leave out --skip-tokenizer-init)": (
        lambda config: config.model_config.skip_tokenizer_init
    ),
    "ranks share the context (leave out --decode-context-parallel-size)": (
        lambda config: config.parallel_config.decode_context_parallel_size > 1
    ),
    "the model has an encoder": lambda config: config.model_config.is_encoder_decoder,
    "the model is a drafter": lambda config: config.model_config.runner_type == "draft",
}
MEANS_OFF = "--attention-config.turbo_means is off"
# Reasons why a layer has no means of K, though others may.
SOFT_CAP = "a soft cap"
STATES = "several stored tokens for each token of a request"


def tail_refusal(num_tokens: int, reason: str) -> str:
    """The message for a tail that a user asks for and cannot have."""
    return (
        f"attention_config.turbo_window={num_tokens} cannot be had, because {reason}. "
        "Use auto or 0 instead."
    )


def tail_room(num_tokens: int, block_size: int, query_len: int) -> str:
    """The reason against a tail that a block has no room for."""
    return (
        f"a block of {block_size} tokens has room for {num_tokens} recent tokens "
        f"beside {query_len} of a step (a larger --block-size has room for more)"
    )


def tail_sight(sliding_window: int, query_len: int) -> str:
    """The reason against a tail of tokens that some query tokens do not see."""
    return (
        f"query tokens see {sliding_window} tokens, of which a step may have "
        f"{query_len}"
    )


def refusal(cache_dtype: str | None, found: Iterable[Reason]) -> str:
    """The message for features that a turbo cache dtype cannot serve."""
    found = list(found)
    message = (
        f"--kv-cache-dtype {cache_dtype} does not support this: "
        f"{'; '.join(map(str, found))}."
    )
    if any(reason.needs_dtype for reason in found):
        message += f" {WAY_OUT}."
    return message


def means_problem(
    vllm_config: VllmConfig, soft_cap: float | None = None, states_per_token: int = 1
) -> str | None:
    """The reason why a layer has no means of K; None for none.

    Args:
        vllm_config: The engine's configuration.
        soft_cap: The layer's soft cap; None for none, or for any layer.
        states_per_token: Tokens that the layer stores for each token of a request.

    """
    if vllm_config.attention_config.turbo_means == "off":
        return MEANS_OFF
    for reason, is_found in MEANS_FEATURES.items():
        if is_found(vllm_config):
            return reason
    if soft_cap is not None:
        return SOFT_CAP
    return STATES if states_per_token > 1 else None


def borrowed_reasons(
    words: Iterable[str], head_sizes: Iterable[int], configuration: dict[str, Any]
) -> list[Reason]:
    """The reasons for vLLM's words, with the values of a configuration.

    Args:
        words: The words of ``AttentionBackend.validate_configuration``.
        head_sizes: The backend's head sizes.
        configuration: The validated configuration.

    """
    attn_type = configuration["attn_type"]
    capability: DeviceCapability | None = configuration["device_capability"]
    values = {
        "head_size": configuration["head_size"],
        "head_sizes": ", ".join(map(str, head_sizes)),
        "dtype": str(configuration["dtype"]).removeprefix("torch."),
        "block_size": configuration["block_size"],
        "kind": ATTENTION_KINDS[AttentionType(attn_type)],
        "capability": capability and capability.as_version_str(),
    }
    known = BORROWED | {
        f"attention type {attn_type} not supported": reasons.ATTENTION_TYPE,
        "kv_cache_dtype not supported": one_vector_reason(
            configuration["kv_cache_dtype"]
        ),
    }
    found = [known.get(each, Reason(each)).of(**values) for each in words]
    # Each reason once, because vLLM has two words for some.
    return list(dict.fromkeys(found))


def one_vector_reason(cache_dtype: str | None) -> Reason:
    """The reason to refuse a dtype that stores K and V differently, with MLA."""
    return reasons.ONE_VECTOR.of(dtype=cache_dtype, dtypes=", ".join(LATENT_PRESETS))


def longest_sequence(vllm_config: VllmConfig) -> int:
    """Tokens of the longest sequence that a layer of the model or its drafter sees."""
    configs = [vllm_config.model_config]
    if vllm_config.speculative_config is not None:
        configs.append(vllm_config.speculative_config.target_model_config)
    return max(config.max_model_len for config in configs if config is not None)


def unsupported_layer_arguments(
    attn_type: str, arguments: dict[str, object]
) -> list[Reason]:
    """Reasons against an attention layer's optional arguments.

    Models pass defaults explicitly: None, False and a factor of zero have no effect.
    """
    given = {
        name
        for name, value in arguments.items()
        if value is not None and not (isinstance(value, (bool, float)) and not value)
    }
    found = [reason for reason, name in LAYER_ARGUMENTS.items() if name in given]
    others = sorted(given - set(LAYER_ARGUMENTS.values()))
    found += [reasons.LAYER_ARGUMENT.of(name=name) for name in others]
    if attn_type != AttentionType.DECODER:
        kind = ATTENTION_KINDS[AttentionType(attn_type)]
        found.append(reasons.ATTENTION_TYPE.of(kind=kind))
    return found


def unsupported_settings(vllm_config: VllmConfig) -> list[Reason]:
    """Reasons against an engine's configuration, with any attention."""
    found = []
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.uses_extract_hidden_states():
        found.append(reasons.HIDDEN_STATES)
    if vllm_config.parallel_config.use_ubatching:
        found.append(reasons.MICRO_BATCHES)
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        found.append(reasons.KV_SHARING_FAST_PREFILL)
    return found


def unsupported_with_dcp(
    vllm_config: VllmConfig,
    head_sizes: tuple[int, int],
    has_sliding_window: bool,
    is_pooled: bool,
    shares_cache: bool,
) -> list[Reason]:
    """Reasons against a layer whose context ranks share."""
    speculative = vllm_config.speculative_config
    model_config = vllm_config.model_config
    features = {
        # A query token is in the cache of one rank only.
        reasons.DCP_OF_STORED: vllm_config.attention_config.turbo_prefill == "stored",
        # The number of a rank's tokens that a query token sees depends on that token.
        reasons.DCP_OF_WINDOWS: has_sliding_window,
        reasons.DCP_OF_POOLED: is_pooled,
        reasons.DCP_OF_SHARED_CACHES: shares_cache,
        reasons.DCP_OF_SPANS: model_config is not None and model_config.is_mm_prefix_lm,
        reasons.DCP_OF_ADAPTIVE_VERIFICATION: (
            speculative is not None and speculative.enable_adaptive_verification
        ),
        # vLLM's kernels join vectors whose size is a power of two.
        reasons.DCP_OF_HEAD_SIZE: not {*head_sizes} <= {*reasons.DCP_HEAD_SIZES},
    }
    words = " and ".join(map(str, sorted({*head_sizes})))
    return [reason.of(head_size=words) for reason, x in features.items() if x]


def _unsupported_spec(
    spec: AttentionSpec,
    kinds: tuple[type, ...],
    features: dict[Reason, Callable[[Any], bool]],
) -> list[Reason]:
    """Reasons against a cache spec of another kind, or with refused features."""
    if type(spec) not in kinds:
        names = [each.__name__.removesuffix("Spec") for each in (type(spec), *kinds)]
        return [reasons.LAYER_KIND.of(kind=names[0], kinds=", ".join(names[1:]))]
    names = ("head_size_v", "tokens_per_state")
    values = {name: getattr(spec, name, None) for name in names}
    values["head_sizes"] = ", ".join(map(str, HEAD_SIZES))
    return [reason.of(**values) for reason, found in features.items() if found(spec)]


def unsupported_value_size(head_size_v: int) -> list[Reason]:
    """Reasons against the head size of V: it has no rotation."""
    if head_size_v in HEAD_SIZES:
        return []
    sizes = ", ".join(map(str, HEAD_SIZES))
    return [reasons.SIZE_OF_V.of(head_size_v=head_size_v, head_sizes=sizes)]


def unsupported_spec_features(spec: AttentionSpec) -> list[Reason]:
    """Reasons against a layer's cache spec."""
    return _unsupported_spec(spec, SPECS, SPEC_FEATURES)


def unsupported_mla_sizes(rank: int, rope: int) -> list[Reason]:
    """Reasons against the sizes of an MLA layer's latent and rotary key."""
    if (rank, rope) in reasons.MLA_SIZES:
        return []
    return [reasons.LATENT_SIZE.of(rank=rank, rope=rope)]


def unsupported_mla_settings(vllm_config: VllmConfig) -> list[Reason]:
    """Reasons against an engine's configuration, with MLA."""
    layers = " ".join(vllm_config.cache_config.kv_cache_dtype_skip_layers)
    method = getattr(vllm_config.speculative_config, "method", None)
    return [
        reason.of(layers=layers, method=method)
        for reason, found in MLA_SETTINGS.items()
        if found(vllm_config)
    ]


def unsupported_mla_spec(
    spec: AttentionSpec, serves_sparse: bool = False
) -> list[Reason]:
    """Reasons against an MLA layer's cache spec."""
    found = _unsupported_spec(spec, (MLAAttentionSpec,), MLA_SPEC_FEATURES)
    return [x for x in found if not (serves_sparse and x == reasons.SPARSE)]
