# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ways of running vLLM that have to give the same answers."""

from dataclasses import dataclass, field
from typing import Any

# Tokens of a chunk, where prompts are prefilled in chunks.
CHUNK = 128
NUM_DRAFTS = 3
# Requests that find room for their prompts when blocks are scarce.
SCARCE_REQUESTS = 4
# The least share of the requests that could run at once and did.
LEAST_FILLED = 0.5
# Tokens of a block, unless a mode names them. A CPU's own attention takes no fewer.
BLOCK = {"cpu": 32, "gpu": 16}
# Models by name: arguments of turbo_seeded/model.py; None: the trained model. Seeded
# models have small heads, because rounding errors grow with logits and equality.TIE
# does not. They have learnt nothing, so few of their tokens win by much. So they run
# in float16, whose rounding errors are an eighth of bfloat16's.
MODELS: dict[str, tuple[str, ...] | None] = {
    "trained": None,
    # The trained model, with bf16 layers among its packed ones (SKIPPED).
    "skipped": None,
    "dense": ("--head-range", "0.15"),
    # Every expert takes every token, so that no rounding error decides the choice.
    "experts": (
        *("--head-range", "0.15"),
        *("--experts", "4", "--experts-per-token", "4"),
    ),
}
EXPERTS_ARGS = {"moe_backend": "triton"}
# FlashAttention plans the bf16 layers' work ahead, by a cache dtype that they lack. A
# packed page of 128 tokens is as large as a bf16 page of 16, so vLLM keeps the size.
SKIPPED = {"kv_cache_dtype_skip_layers": ["0", "7"], "block_size": 128}


@dataclass(frozen=True)
class Mode:
    """One way to run the same prompts.

    Attributes:
        args: Arguments of `LLM`, beyond those of the quiet run.
        model: A key of MODELS.
        graphs: Whether CUDA graphs are replayed, and the model is compiled.
        batch: Prompts per `generate`; 0: all.
        repeat: Whether all prompts run twice, and the second run counts.
        from_cpu: Whether the GPU's prefix cache is emptied before the second run, so
            that all prefix hits come from the CPU's memory.
        fill: Whether prompts are repeated to fill `max_num_seqs`.
        sleep: The level at which the engine sleeps between two halves of the prompts.
        defect: The part that is broken on purpose, so that the answers must differ.
        scarce: Whether blocks are so few that requests are preempted.
        capacity: The tokens that a rank's memory holds, as a multiple of the quiet
            run's; 0: not checked.
        fresh_kernels: Whether nothing has built the CUDA kernels before.
        drafts: vLLM's method of making drafts, which are then verified. With
            "draft_model" the model drafts for itself.
        gpus: The GPUs that it takes; 0: a CPU is enough.

    """

    args: dict[str, Any] = field(default_factory=dict)
    model: str = "trained"
    graphs: bool = False
    batch: int = 0
    repeat: bool = False
    from_cpu: bool = False
    fill: bool = False
    sleep: int = 0
    defect: str | None = None
    scarce: bool = False
    capacity: float = 0.0
    fresh_kernels: bool = False
    drafts: str | None = None
    gpus: int = 0

    @property
    def dtype(self) -> str:
        """The model's dtype on a GPU."""
        return "bfloat16" if MODELS[self.model] is None else "float16"

    @property
    def speculative_config(self) -> dict[str, Any]:
        """Value of `speculative_config`, without the drafter's folder."""
        config = {"method": self.drafts, "num_speculative_tokens": NUM_DRAFTS}
        if self.drafts == "ngram":
            config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        return config | self.args.get("speculative_config", {})


ASYNC = {"async_scheduling": True}
ADAPTIVE = {"speculative_config": {"enable_adaptive_verification": True}}


def drafting(method: str, args: dict[str, Any] | None = None) -> Mode:
    """A mode with drafts, in graphs."""
    return Mode(args or {}, graphs=True, drafts=method, gpus=1)


DRAFTING = {
    "ngram": Mode(drafts="ngram", gpus=1),
    "ngram_graphs": drafting("ngram", ASYNC),
    "draft_model": Mode(drafts="draft_model"),
    "draft_model_graphs": drafting("draft_model", ASYNC),
    "eagle": Mode(drafts="eagle"),
    "eagle_graphs": drafting("eagle"),
    "eagle_async": drafting("eagle", ASYNC),
    "eagle_adaptive": drafting("eagle", ADAPTIVE),
    "eagle3_graphs": drafting("eagle3", ASYNC),
    "mtp": Mode(drafts="mtp"),
    "mtp_graphs": drafting("mtp", ASYNC),
}

TENSOR_PARALLEL = {"tensor_parallel_size": 2}
# Two ranks with the trained model's one KV head, each with every other token.
CONTEXT_PARALLEL = TENSOR_PARALLEL | {"decode_context_parallel_size": 2}
STRIPES = CONTEXT_PARALLEL | {"cp_kv_cache_interleave_size": 16}


def context_parallel(args: dict[str, Any], **options: Any) -> Mode:
    """A mode whose ranks share sequences, which is for turbo_prefill "raw"."""
    return Mode(args, gpus=2, **options)


CONTEXT_PARALLEL_MODES = {
    "dcp": context_parallel(CONTEXT_PARALLEL, capacity=2),
    "dcp_graphs": context_parallel(STRIPES | ASYNC, graphs=True, capacity=2),
    "dcp_triton": context_parallel(
        STRIPES | {"attention_config": {"turbo_kernel": "triton"}}, capacity=2
    ),
    "dcp_all_to_all_graphs": context_parallel(
        STRIPES | {"dcp_comm_backend": "a2a"}, graphs=True, capacity=2
    ),
    "dcp_chunked": context_parallel(
        CONTEXT_PARALLEL
        | {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK},
        capacity=2,
    ),
    "dcp_prefix": context_parallel(
        CONTEXT_PARALLEL | {"enable_prefix_caching": True}, repeat=True, capacity=2
    ),
    "dcp_ngram_graphs": context_parallel(
        CONTEXT_PARALLEL | ASYNC, graphs=True, drafts="ngram"
    ),
    "dcp_mtp_graphs": context_parallel(STRIPES, graphs=True, drafts="mtp"),
}
EXPERT_PARALLEL = {**EXPERTS_ARGS, "enable_expert_parallel": True}
SLEEP = {"enable_sleep_mode": True}

MODES = {
    "quiet": Mode(batch=1),
    "quiet_dense": Mode(model="dense", batch=1),
    "quiet_experts": Mode(EXPERTS_ARGS, model="experts", batch=1, gpus=1),
    "quiet_skipped": Mode(SKIPPED, model="skipped", batch=1, gpus=1),
    "batched": Mode(capacity=1),
    "one_sequence": Mode({"max_num_seqs": 1}, capacity=1),
    # So many tokens a step that the last prompt begins before the first answer ends.
    "many_sequences": Mode(
        {
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 1 << 18,
            "kv_cache_memory_bytes": 16 << 30,
            "compilation_config": {"max_cudagraph_capture_size": 1024},
        },
        graphs=True,
        fill=True,
        gpus=1,
    ),
    # The other modes have this size on a CPU.
    "block_32": Mode({"block_size": 32}, capacity=1, gpus=1),
    "block_64": Mode({"block_size": 64}, capacity=1),
    "block_128": Mode({"block_size": 128}, capacity=1),
    "graphs": Mode(graphs=True, gpus=1),
    "async": Mode(ASYNC, graphs=True, gpus=1),
    "triton": Mode({"attention_config": {"turbo_kernel": "triton"}}, gpus=1),
    "sleep": Mode(SLEEP, graphs=True, sleep=1, capacity=1, gpus=1),
    "sleep_reload": Mode(SLEEP, graphs=True, sleep=2, capacity=1, gpus=1),
    "offload": Mode(
        {"enable_prefix_caching": True, "kv_offloading_size": 4},
        repeat=True,
        from_cpu=True,
        capacity=1,
        gpus=1,
    ),
    "skipped": Mode(SKIPPED, model="skipped", capacity=1, gpus=1),
    "skipped_graphs": Mode(SKIPPED, model="skipped", graphs=True, capacity=1, gpus=1),
    # One KV head, which both ranks hold.
    "tensor_parallel": Mode(TENSOR_PARALLEL, capacity=1, gpus=2),
    # Two KV heads, one a rank.
    "tensor_parallel_heads": Mode(
        TENSOR_PARALLEL, model="dense", capacity=2, fresh_kernels=True, gpus=2
    ),
    "pipeline_parallel": Mode({"pipeline_parallel_size": 2}, capacity=2, gpus=2),
    "experts": Mode(EXPERTS_ARGS, model="experts", capacity=1, gpus=1),
    "expert_parallel": Mode(
        TENSOR_PARALLEL | EXPERT_PARALLEL, model="experts", capacity=2, gpus=2
    ),
    "data_parallel": Mode(
        {"data_parallel_size": 2} | EXPERT_PARALLEL, model="experts", gpus=2
    ),
    "prefix": Mode({"enable_prefix_caching": True}, repeat=True),
    "chunked": Mode({"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK}),
    "preempted": Mode(scarce=True),
    # Each of two requests reads a page of the other's.
    "swapped": Mode(batch=2, defect="swapped"),
    "zeroed": Mode(defect="zeroed"),
    **DRAFTING,
    **CONTEXT_PARALLEL_MODES,
}
