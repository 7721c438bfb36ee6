# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The reasons for which the turbo cache dtypes refuse a model or a setting.

Each has the unsupported feature, the supported values, and the flag that helps.
``refusals.py`` finds the reasons that hold. The documentation has a row for each.
"""

from dataclasses import dataclass, replace

from vllm.v1.attention.ops.turbo.format import TILE_TOKENS
from vllm.v1.attention.ops.turbo.latent.format import LATENT_SIZES


@dataclass(frozen=True)
class Reason:
    """A reason to refuse something. <name> stands for a value.

    Attributes:
        met: The feature that is not supported, with its value.
        supported: The supported values of a feature with several; else empty.
        instead: The flags or settings that help; empty if only another dtype helps.
        is_partial: Whether these help only some users, so that the message also names
            other dtypes.

    """

    met: str
    supported: str = ""
    instead: str = ""
    is_partial: bool = False

    @property
    def needs_dtype(self) -> bool:
        """Whether the message names another cache dtype as a way out."""
        return self.is_partial or not self.instead

    def of(self, **values: object) -> "Reason":
        """The reason with values in place of their names."""
        texts = {"met": self.met, "supported": self.supported, "instead": self.instead}
        for name, value in values.items():
            for part, text in texts.items():
                texts[part] = text.replace(f"<{name}>", str(value))
        return replace(self, **texts)  # type: ignore[arg-type]

    def __str__(self) -> str:
        supported = f"supported: {self.supported}" if self.supported else ""
        notes = "; ".join(filter(None, (supported, self.instead)))
        return f"{self.met} ({notes})" if notes else self.met


# Words that several reasons share.
NO_DCP = "leave out --decode-context-parallel-size"
TEXT_ALONE = "--language-model-only serves text alone"
DRAFTER_DTYPE = 'of a drafter, set "kv_cache_dtype": "auto" in --speculative-config'
NO_ADAPTIVE_VERIFICATION = (
    "leave enable_adaptive_verification out of --speculative-config"
)
MM_PREFIX = "partial multimodal token full attention"
MAX_LARGE_HEAD = "head_size of up to 256"

# The sizes of MLA that are served: sums of latent and rotary key that vLLM's MLA has.
MLA_SIZES = tuple(LATENT_SIZES[head_size] for head_size in (576, 512, 320))
DCP_HEAD_SIZES = (64, 128, 256)

HEAD_SIZE = Reason("head_size <head_size>", "<head_sizes>")
MODEL_DTYPE = Reason("dtype <dtype>", "float16, bfloat16", "pass --dtype bfloat16")
BLOCK_SIZE = Reason(
    "block_size <block_size>",
    f"multiples of {TILE_TOKENS}",
    "leave out --block-size, or pass one of these",
)
SPARSE = Reason("sparse attention")
COMPUTE_CAPABILITY = Reason("compute capability <capability>", "8.0 and later")
ATTENTION_TYPE = Reason("<kind> attention", "decoder attention")
R_SWA = Reason("reference sliding windows (R-SWA)")
NON_CAUSAL = Reason(
    "non-causal attention", "causal attention", DRAFTER_DTYPE, is_partial=True
)
BATCH_INVARIANCE = Reason("batch invariance", instead="unset VLLM_BATCH_INVARIANT")
PCP = Reason(
    "prefill context parallelism", instead="leave out --prefill-context-parallel-size"
)
SLIDING_WINDOW_OF_LARGE_HEADS = Reason(
    "sliding window of <sliding_window> tokens of head_size <head_size>",
    MAX_LARGE_HEAD,
    "--kv-cache-dtype-skip-layers sliding_window keeps such layers in the model's "
    "dtype",
)
SOFT_CAP_OF_LARGE_HEADS = Reason(
    "logits soft cap of <logits_soft_cap> of head_size <head_size>", MAX_LARGE_HEAD
)
MM_PREFIX_OF_LARGE_HEADS = Reason(
    f"{MM_PREFIX} of head_size <head_size>",
    MAX_LARGE_HEAD,
    TEXT_ALONE,
    is_partial=True,
)
MM_PREFIX_BEYOND_WINDOW = Reason(
    f"{MM_PREFIX} of <num_tokens> tokens beyond a sliding window",
    "up to <sliding_window> tokens",
    TEXT_ALONE,
    is_partial=True,
)
MM_PREFIX_OF_ADAPTIVE_VERIFICATION = Reason(
    f"{MM_PREFIX} with adaptive verification",
    instead=f"{NO_ADAPTIVE_VERIFICATION}; or {TEXT_ALONE}",
)
ALIBI = Reason("ALiBi")
LAYER_ARGUMENT = Reason("layer argument <name>")
LAYER_KIND = Reason("layers of kind <kind>", "<kinds>")
LAYER = Reason(
    "layer <name> of <model> (<kind>, <backend>)", "vLLM's own attention layers"
)
SIZE_OF_V = Reason("head_size_v <head_size_v>", "<head_sizes>")
TOKENS_PER_STATE = Reason("tokens_per_state <tokens_per_state>", "1")

DCP_OF_STORED = Reason(
    "DCP with turbo_prefill stored",
    instead="leave out --attention-config.turbo_prefill",
)
DCP_OF_WINDOWS = Reason(
    "DCP of a sliding window, or of chunked local attention", instead=NO_DCP
)
DCP_OF_POOLED = Reason("DCP of pooled blocks", instead=NO_DCP)
DCP_OF_SHARED_CACHES = Reason("DCP of KV sharing between layers", instead=NO_DCP)
DCP_OF_KEY_OFFSETS = Reason("DCP with a bias of K", instead=NO_DCP)
DCP_OF_SPANS = Reason(f"DCP with {MM_PREFIX}", instead=f"{NO_DCP}; or {TEXT_ALONE}")
DCP_OF_ADAPTIVE_VERIFICATION = Reason(
    "DCP with adaptive verification",
    instead=f"{NO_DCP}; or {NO_ADAPTIVE_VERIFICATION}",
)
DCP_OF_HEAD_SIZE = Reason(
    "DCP of head_size <head_size>", ", ".join(map(str, DCP_HEAD_SIZES)), NO_DCP
)

PLATFORM = Reason("platform <name>", "CUDA")
KV_SHARING_FAST_PREFILL = Reason(
    "fast prefill", instead="leave out --kv-sharing-fast-prefill"
)
KV_SHARING_OF_OTHER_DTYPES = Reason(
    "KV sharing between layers of <dtype> and of <other>",
    "one dtype",
    "name all that share, or none, in --kv-cache-dtype-skip-layers, and no "
    "kv_cache_dtype in --speculative-config",
)
SKIPPED_POOLED_LAYER = Reason(
    "pooled blocks of a layer in the model's dtype",
    instead="name no layer of its number in --kv-cache-dtype-skip-layers, nor "
    "sliding_window",
)
SKIPPED_NO_LAYER = Reason(
    "--kv-cache-dtype-skip-layers <entries>: no layer has such a number",
    "<numbers>, sliding_window",
    "name layers by their numbers",
)
HIDDEN_STATES = Reason(
    "method extract_hidden_states of --speculative-config",
    instead="set another method, or leave it out",
    is_partial=True,
)
MICRO_BATCHES = Reason(
    "micro-batches", instead="leave out --enable-dbo and --ubatch-size"
)
NO_FLASH_ATTN = Reason(
    "a vLLM without FlashAttention for head_size <head_size> on this GPU",
    instead="install one that has it",
    is_partial=True,
)
CONNECTOR = Reason("KV connector <name>", instead="<instead>")
FUSED_OUTPUT = Reason(
    "fused output quantization",
    instead="leave out --compilation-config.pass_config.fuse_attn_quant",
)
UNREAD_BIAS = Reason(
    "a bias of K that was not read when weights were loaded, in layers <layers>",
    instead="pass --load-format auto",
)
FOREIGN_TOKENS = Reason(
    "a cache update beside the forward pass, with an offset of K",
    instead=DRAFTER_DTYPE,
    is_partial=True,
)

ONE_VECTOR = Reason(
    "<dtype> of MLA, where K and V are one vector",
    "<dtypes>",
    "pass one of these as --kv-cache-dtype",
)
LATENT_SIZE = Reason(
    "MLA with a latent of <rank> and <rope> rotary coordinates",
    ", ".join(f"{rank} and {rope}" for rank, rope in MLA_SIZES),
)
MLA_MM_PREFIX = Reason(f"{MM_PREFIX} of MLA", instead=TEXT_ALONE, is_partial=True)
MLA_SLIDING_WINDOW = Reason("sliding window of MLA")
MLA_SINKS = Reason("attention sinks of MLA")
MLA_POOLED_INDEXER = Reason("sparse MLA whose indexer pools tokens")
MLA_HISPARSE = Reason(
    "sparse MLA with HiSparse", instead="leave out --attention-config.hisparse_config"
)
MLA_SKIPPED_LAYERS = Reason(
    "MLA with --kv-cache-dtype-skip-layers <layers>", instead="leave out the flag"
)
MLA_QUANTIZED_QUERIES = Reason(
    "MLA with quantized queries of prefills",
    instead="leave out --attention-config.use_prefill_query_quantization",
)
MLA_FUSED_UPDATE = Reason(
    "MLA with a fused cache update",
    instead="leave out --compilation-config.pass_config.fuse_rope_kvcache_cat_mla",
)
MLA_DRAFTERS = Reason(
    "MLA with a drafter of method <method>",
    instead="set another method than dspark and dflash in --speculative-config",
)
MLA_ADAPTIVE_VERIFICATION = Reason(
    "MLA with adaptive verification", instead=NO_ADAPTIVE_VERIFICATION
)
MLA_DCP = Reason("MLA with decode context parallelism", instead=NO_DCP)
MLA_BESIDE_K_AND_V = Reason(
    "MLA beside layers with K and V", instead=DRAFTER_DTYPE, is_partial=True
)

# All reasons that a refusal may name.
REASONS = (
    HEAD_SIZE,
    MODEL_DTYPE,
    BLOCK_SIZE,
    MM_PREFIX_OF_LARGE_HEADS,
    MM_PREFIX_BEYOND_WINDOW,
    MM_PREFIX_OF_ADAPTIVE_VERIFICATION,
    SPARSE,
    COMPUTE_CAPABILITY,
    ATTENTION_TYPE,
    SLIDING_WINDOW_OF_LARGE_HEADS,
    R_SWA,
    NON_CAUSAL,
    BATCH_INVARIANCE,
    PCP,
    DCP_OF_STORED,
    DCP_OF_WINDOWS,
    DCP_OF_POOLED,
    DCP_OF_SHARED_CACHES,
    DCP_OF_KEY_OFFSETS,
    DCP_OF_SPANS,
    DCP_OF_ADAPTIVE_VERIFICATION,
    DCP_OF_HEAD_SIZE,
    PLATFORM,
    ALIBI,
    SOFT_CAP_OF_LARGE_HEADS,
    KV_SHARING_FAST_PREFILL,
    KV_SHARING_OF_OTHER_DTYPES,
    SKIPPED_POOLED_LAYER,
    SKIPPED_NO_LAYER,
    HIDDEN_STATES,
    MICRO_BATCHES,
    LAYER_ARGUMENT,
    LAYER_KIND,
    LAYER,
    SIZE_OF_V,
    TOKENS_PER_STATE,
    NO_FLASH_ATTN,
    CONNECTOR,
    FUSED_OUTPUT,
    UNREAD_BIAS,
    FOREIGN_TOKENS,
)

# The reasons that a refusal of MLA may also name.
MLA_REASONS = (
    ONE_VECTOR,
    LATENT_SIZE,
    MLA_MM_PREFIX,
    MLA_SLIDING_WINDOW,
    MLA_SINKS,
    MLA_POOLED_INDEXER,
    MLA_HISPARSE,
    MLA_SKIPPED_LAYERS,
    MLA_QUANTIZED_QUERIES,
    MLA_FUSED_UPDATE,
    MLA_DRAFTERS,
    MLA_ADAPTIVE_VERIFICATION,
    MLA_DCP,
    MLA_BESIDE_K_AND_V,
)
