# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes the page that lists every refusal: messages from the code, cases from here.

A new reason needs a case in ``CASES``. This command then writes the page anew:

    python tests/kernels/turbo/serving/refused_page.py
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.reasons import MLA_REASONS, REASONS, Reason
from vllm.v1.attention.ops.turbo.serving import means, means_tables
from vllm.v1.attention.ops.turbo.serving.connectors import CONNECTORS, MLA_CONNECTORS

PAGE = Path(__file__).parents[4] / "docs/features/quantization/turbo_refused.md"

# The case that each reason refuses.
CASES: dict[Reason, str] = {
    reasons.HEAD_SIZE: "a head size that is not in [this table](turbo.md#bytes)",
    reasons.MODEL_DTYPE: "a model in fp32 on a GPU",
    reasons.BLOCK_SIZE: "`--block-size` that is no multiple of 16",
    reasons.MM_PREFIX_OF_LARGE_HEADS: (
        "image tokens that see each other in layers with heads of 512. Gemma 4's do so "
        "only in layers with a sliding window, and are served"
    ),
    reasons.MM_PREFIX_BEYOND_WINDOW: (
        "an image with more tokens than a layer's sliding window, where nothing clamps "
        "the image. vLLM leaves out images that exceed the model's own window"
    ),
    reasons.MM_PREFIX_OF_ADAPTIVE_VERIFICATION: (
        "image tokens that see each other, beside a drafter with adaptive verification"
    ),
    reasons.SPARSE: "sparse attention of layers with K and V",
    reasons.COMPUTE_CAPABILITY: "NVIDIA GPUs before Ampere",
    reasons.ATTENTION_TYPE: "encoders and cross attention",
    reasons.SLIDING_WINDOW_OF_LARGE_HEADS: (
        "layers with a sliding window and heads of 512. The flag helps where the model "
        "has other layers"
    ),
    reasons.R_SWA: "reference sliding windows, which keep the prompt in sight",
    reasons.NON_CAUSAL: (
        "layers whose tokens see later tokens, as in prefix LMs and DFlash's drafters"
    ),
    reasons.BATCH_INVARIANCE: "`VLLM_BATCH_INVARIANT`",
    reasons.PCP: "prefill context parallelism",
    reasons.DCP_OF_STORED: (
        "decode context parallelism (DCP) where query tokens are read from the cache: "
        "each is in the cache of one rank"
    ),
    reasons.DCP_OF_WINDOWS: "DCP of layers with sliding windows or chunked attention",
    reasons.DCP_OF_POOLED: (
        "DCP of layers that store several tokens for each token of the request"
    ),
    reasons.DCP_OF_SHARED_CACHES: "DCP of layers that read another layer's cache",
    reasons.DCP_OF_KEY_OFFSETS: (
        "DCP of layers that add a bias to K, which is taken off by segments of a "
        "sequence"
    ),
    reasons.DCP_OF_SPANS: "DCP with image tokens that see each other",
    reasons.DCP_OF_ADAPTIVE_VERIFICATION: (
        "DCP beside a drafter with adaptive verification"
    ),
    reasons.DCP_OF_HEAD_SIZE: "DCP of other head sizes",
    reasons.PLATFORM: "AMD and Intel GPUs, and other accelerators",
    reasons.ALIBI: "ALiBi",
    reasons.SOFT_CAP_OF_LARGE_HEADS: "capped attention logits with heads of 512",
    reasons.KV_SHARING_FAST_PREFILL: (
        "prefill of a prompt's last token alone, in layers that read another layer's "
        "cache"
    ),
    reasons.KV_SHARING_OF_OTHER_DTYPES: (
        "a layer in the model's dtype that reads a packed layer's cache, or the "
        "reverse. A drafter's layers count, under numbers of their own in the flag"
    ),
    reasons.SKIPPED_POOLED_LAYER: (
        "a layer of Voxtral Realtime's encoder that the flag leaves out. Its backend "
        "follows the dtype of the other layers, so leave out no layer of its number, "
        "even in the decoder"
    ),
    reasons.SKIPPED_NO_LAYER: (
        "an entry that leaves out no layer: a number that the model does not have, or "
        "a word other than `sliding_window`"
    ),
    reasons.HIDDEN_STATES: (
        "`--speculative-config` that writes hidden states into the cache"
    ),
    reasons.MICRO_BATCHES: "dual batch overlap and other micro-batches",
    reasons.LAYER_ARGUMENT: (
        "an argument of a model's attention that no other row is about"
    ),
    reasons.LAYER_KIND: "layers with a cache of another kind",
    reasons.LAYER: (
        "attention layers of a model's own class, such as MiniMax-M3's and Inkling's"
    ),
    reasons.SIZE_OF_V: "sizes of V that have no rotation, beside K of another size",
    reasons.TOKENS_PER_STATE: "layers that pool tokens",
    reasons.NO_FLASH_ATTN: "builds of vLLM without FlashAttention, which prefills",
    reasons.CONNECTOR: (
        "a connector that does not move whole blocks, also within MultiConnector: see "
        "[KV connectors](#kv-connectors)"
    ),
    reasons.FUSED_OUTPUT: (
        "a caller of the layer that asks for quantised outputs, as no pass of vLLM does"
    ),
    reasons.UNREAD_BIAS: (
        "a loader that does not process weights as vLLM does, such as that of "
        "`--load-format tensorizer`, for a model with a bias of K and without K's means"
    ),
    reasons.FOREIGN_TOKENS: (
        "a caller that stores tokens other than the step's in a model with a bias of "
        "K, such as a drafter that stores its context"
    ),
    reasons.ONE_VECTOR: "`k4v3`, which gives K and V different widths",
    reasons.LATENT_SIZE: "latents of other sizes",
    reasons.MLA_MM_PREFIX: "image tokens that see each other, in layers with latents",
    reasons.MLA_SLIDING_WINDOW: (
        "layers with latents and a sliding window, such as dots3-note's"
    ),
    reasons.MLA_SINKS: (
        "Hy4's sinks. vLLM ignores sinks where no backend supports them"
    ),
    reasons.MLA_POOLED_INDEXER: (
        "GLM-5.3-Flash, whose indexer lists pools of tokens and the rest of a pool"
    ),
    reasons.MLA_HISPARSE: "latents in the host's memory, which HiSparse copies",
    reasons.MLA_SKIPPED_LAYERS: (
        "layers with latents in the model's dtype, beside packed ones"
    ),
    reasons.MLA_QUANTIZED_QUERIES: (
        "prefills in FP8, which read an FP8 cache as it is"
    ),
    reasons.MLA_FUSED_UPDATE: (
        "a pass that stores with an operator of its own. It is off without the flag"
    ),
    reasons.MLA_DRAFTERS: (
        "DSpark and DFlash, which store latents with kernels of their own, or see "
        "later tokens"
    ),
    reasons.MLA_ADAPTIVE_VERIFICATION: "drafts with adaptive verification",
    reasons.MLA_DCP: "decode context parallelism",
    reasons.MLA_BESIDE_K_AND_V: (
        "packed latents and packed K and V in one cache, as with an EAGLE 3 drafter"
    ),
}

# The way out of each lack of CUDA kernels.
TRITON_SERVES = "none: Triton's kernels serve it"
WAYS_OUT = {
    "the CUDA kernels need an NVIDIA GPU of compute capability 8.0 or later": (
        "none; nothing is lost on other GPUs"
    ),
    "head size <head_size> has no CUDA decode kernel": TRITON_SERVES,
    "head size <head_size> of K and <head_size_v> of V has no CUDA decode kernel": (
        TRITON_SERVES
    ),
    "the CUDA kernels of MLA need an NVIDIA GPU": "none",
    "GPUs before compute capability 8.0 have no CUDA kernels of MLA": TRITON_SERVES,
    "the CPU platform runs PyTorch's operators": "leave `turbo_kernel` at `auto`",
    "FlashInfer cannot be imported (<error>)": "install `flashinfer-python`",
    "there is no <nvcc>": "install the CUDA toolkit, or set `CUDA_HOME` to it",
    "there is no ninja on PATH": "install `ninja`",
    "FlashInfer's cache cannot be written (<error>)": (
        "set `FLASHINFER_WORKSPACE_BASE` to a folder that can be written"
    ),
    "FlashInfer's JIT is disabled": "unset `FLASHINFER_DISABLE_JIT`",
    "<kernel>.cu was not compiled or linked": (
        "use a toolkit that knows the GPU; the compiler's words follow"
    ),
    "the built library cannot be loaded (<error>)": (
        "remove the folder that the message names"
    ),
    "the driver refused to launch a CUDA kernel (<error>)": TRITON_SERVES,
    "rank <rank> runs <name> kernels, because <reason>": (
        "that of the other rank's reason; ranks with the same layers run the same "
        "kernels"
    ),
}

TEXT = """\
# What a Turbo KV Cache Refuses

<!-- `python tests/kernels/turbo/serving/refused_page.py` writes this page. -->

The engine does not start with a [turbo KV cache](turbo.md) that it cannot serve. The
error says `--kv-cache-dtype turbo4 does not support this:` with one or more of the
messages below. A message says in brackets the values that are supported and the flag
that helps. Where it names no flag, use `--kv-cache-dtype fp8` or `auto`. `<...>` stands
for a value.

The dtype selects its backend. Another one, of `--attention-backend` or of the model's
configuration, is refused with `attention backend <name> (supported: TURBO; drop
--attention-backend, or pass TURBO if the model chose another)`.

## Refused

{refused}

## Refused with MLA

These hold for multi-head latent attention, beside those above.

{refused_with_mla}

Attention layers of a model's own class are refused as
`layer <name> of <model> (<kind>, <backend>)`. Kimi-Linear and Kimi K3 are examples:
their `MultiHeadLatentAttention` stores latents with a kernel of its own.

## No recent window

A number of tokens in `--attention-config.turbo_window` is refused where there can be no
[recent window](turbo.md#the-recent-window). With `auto` the engine starts without a
window, and the log says why. The reasons:

{windows}

## No mean of K

These models and settings leave [the mean of K](turbo.md#the-mean-of-k), or with MLA the
mean of latents, in what is stored. The engine starts, and the log says why. After an
error that is a warning. Drafters have none, also beside a model that has:

{means}

Single layers go without because of one of these:

{layers_without_means}

## No CUDA kernels

The line at the start, or a warning, has one of these behind `Triton kernels, because`.
Triton's kernels serve the same cache, and take two to three times as long to decode.
With `--attention-config.turbo_kernel cuda` the engine does not start instead.

{kernels}

## KV connectors

With sparse MLA only OffloadingConnector is served, also within MultiConnector. "By its
source" means that the connector's code was read and nothing was run. The engine
warns when it starts with a connector that is neither in this table nor vLLM's.

{connectors}
"""


def table(*head: str, rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def refusal_table(listed: Iterable[Reason]) -> str:
    rows = ((f"`{each}`", CASES[each]) for each in listed)
    return table("message", "refused case", rows=rows)


def window_reasons() -> Iterator[str]:
    """Every reason for which a recent window is refused."""
    yield from refusals.TAIL_FEATURES
    names = ("<block_size>", "<query_len>")
    yield refusals.tail_room("<num_tokens>", *names)  # type: ignore[arg-type]
    yield refusals.MLA_TAIL


def means_reasons() -> Iterator[str]:
    """Every reason for which an engine has no means of K."""
    yield from refusals.MEANS_FEATURES
    yield from (means.NO_LAYER, means.SHORT_TEXT, means.OTHER_TOKENS)
    yield f"{means.ALL_LAYERS} <a reason of the list below>"
    yield f"{means.NO_TOKENIZER}: <error>"
    yield f"{means.PASS_FAILS}: <error>"


def render() -> str:
    """The text of the page."""
    connectors = (
        (f"`{name}`", state.value, "yes" if name in MLA_CONNECTORS else "refused", why)
        for name, (state, why) in CONNECTORS.items()
    )
    kernels = ((f"`{message}`", way) for message, way in WAYS_OUT.items())
    return TEXT.format(
        refused=refusal_table(REASONS),
        refused_with_mla=refusal_table(MLA_REASONS),
        windows="\n".join(f"* `{reason}`" for reason in window_reasons()),
        means="\n".join(f"* `{reason}`" for reason in means_reasons()),
        layers_without_means="\n".join(
            f"* {each}" for each in means_tables.LAYER_REASONS
        ),
        kernels=table("message", "way out", rows=kernels),
        connectors=table("connector", "state", "with MLA", "remarks", rows=connectors),
    )


if __name__ == "__main__":
    PAGE.write_text(render())
