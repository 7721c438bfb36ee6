# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The backend as the model runner uses it: configurations, layers and builders."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm import EngineArgs
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.choose import (
    TurboSource,
    cuda_kernels,
    share_kernels,
    triton_kernels,
)
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.planning import prefill as prefill_plan
from vllm.v1.attention.ops.turbo.planning import scratch
from vllm.v1.worker.workspace import lock_workspace

from .flash_utils import FLASH_ATTN
from .utils import (
    BF16,
    CAN_RUN_CUDA,
    DEVICE,
    ON_GPU,
    cache_spec,
    requires_triton,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 64, 32
SCALE = HEAD_SIZE**-0.5
KERNELS = ["triton", "cuda"] if CAN_RUN_CUDA else ["triton"]
kernel_paths = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=requires_triton) for path in KERNELS]
)
all_paths = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=requires_triton) for path in ("torch", *KERNELS)]
)
prefill_modes = pytest.mark.parametrize("mode", ["raw", "stored"])


def make_vllm_config(
    folder: Path,
    cache_dtype: str = "turbo4",
    dtype: torch.dtype = BF16,
    turbo_prefill: str = "raw",
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 128,
    **changes: object,
) -> VllmConfig:
    """The configuration of a Llama with one layer and no tail.

    Its config.json is written to ``folder``; ``changes`` are further entries of it.
    """
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 2048,
    } | changes
    (folder / "config.json").write_text(json.dumps(description))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=2048
        ),
        cache_config=CacheConfig(cache_dtype=cache_dtype, block_size=32),
        attention_config=AttentionConfig(turbo_prefill=turbo_prefill, turbo_window=0),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=2048,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
    )


def make_engine_config(
    folder: Path, cache_dtype: str = "turbo4", **arguments: Any
) -> VllmConfig:
    """The configuration of an engine as a user makes it, for the folder's model."""
    return EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=cache_dtype,
        **arguments,
    ).create_engine_config()


@contextmanager
def one_rank(folder: Path, config: VllmConfig | None = None) -> Iterator[VllmConfig]:
    """Yield the configuration of an engine with one rank, which can make layers with
    weights. Without ``config`` it is that of ``make_vllm_config``, in the folder.
    """
    config = config or make_vllm_config(folder)
    with set_current_vllm_config(config):
        init_distributed_environment(
            1, 0, f"file://{folder / 'ranks'}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)
        yield config
    cleanup_dist_env_and_memory()


def with_drafts(config: VllmConfig, num_drafts: int = 2) -> VllmConfig:
    """The configuration, changed so that requests bring drafts to verify, if any."""
    if num_drafts == 0:
        return config
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    return config


def set_scratch(
    monkeypatch: pytest.MonkeyPatch,
    partials: int | None = None,
    slice_tokens: int | None = None,
    piece_tokens: int | None = None,
    least_tokens: int | None = None,
) -> None:
    """Bound the scratch, in tokens, of implementations and builders made later.

    Args:
        monkeypatch: It takes the bounds back.
        partials: Tokens of partial results of a call.
        slice_tokens: Query tokens of a slice of a prefill.
        piece_tokens: Tokens of a piece of context.
        least_tokens: Tokens that a piece has room for beyond a sliding window.

    """
    if least_tokens is not None:
        monkeypatch.setattr(prefill_plan, "LEAST_TOKENS", least_tokens)
    row = 2 * NUM_HEADS * HEAD_SIZE
    for module, name, count, size in (
        (scratch, "PARTIAL_BYTES", partials, 2 * row),
        (prefill_plan, "ROW_BYTES", slice_tokens, row),
        (prefill_plan, "PIECE_BYTES", piece_tokens, 4 * NUM_KV_HEADS * HEAD_SIZE),
    ):
        if count is not None:
            monkeypatch.setattr(module, name, count * size)


def reserve_scratch(impl: AttentionImpl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserve all scratch that its steps may need, as the profile run does, and lock
    the workspace. No kernel runs.
    """
    runner = impl.runner
    monkeypatch.setattr(type(runner.kernels), "make_matrices", lambda *_: None)
    monkeypatch.setattr(
        "vllm.v1.attention.backends.turbo_attn.warm_up", lambda *_: None
    )
    reserve(impl)


def make_impl(
    config: VllmConfig,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    *,
    path: str | None = None,
    key_offset: torch.Tensor | None = None,
    query_direction: torch.Tensor | None = None,
    **arguments: Any,
) -> TurboAttentionImpl:
    """The implementation of a layer.

    Args:
        config: The engine's configuration.
        num_heads: Query heads; None: ``NUM_HEADS``.
        num_kv_heads: KV heads; None: ``NUM_KV_HEADS``.
        path: The path that it takes: see ``set_path``; None: the device's.
        key_offset: (G, H, D) fp32, the offset of K by segment.
        query_direction: (G, H, D) fp16, the direction of queries, likewise.
        arguments: Further arguments of the implementation.

    """
    defaults = dict(
        num_heads=num_heads or NUM_HEADS,
        num_kv_heads=num_kv_heads or NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        scale=SCALE,
        kv_cache_dtype=config.cache_config.cache_dtype,
    )
    with set_current_vllm_config(config):
        impl = TurboAttentionImpl(**(defaults | arguments))
    impl.runner.set_key_offset(key_offset)
    impl.runner.query_direction = query_direction
    if path is not None:
        set_path(impl, path)
    return impl


def register(
    config: VllmConfig, impl: AttentionImpl, name: str = "layers.0.attn"
) -> None:
    """Have the layer of this name run the implementation; add the layer if it lacks."""
    layers = config.compilation_config.static_forward_context
    if name not in layers:
        sizes = ("num_heads", "num_kv_heads", "head_size", "scale")
        arguments = {size: getattr(impl, size) for size in sizes}
        make_layer(config, prefix=name, **arguments).is_draft_layer = False
    layers[name].impl = impl


def make_builder(
    config: VllmConfig,
    impl: TurboAttentionImpl,
    layers: Sequence[str] = ("layers.0.attn",),
) -> TurboMetadataBuilder:
    """A builder for layers, of which the first runs the implementation."""
    register(config, impl, layers[0])
    spec = cache_spec(impl.runner.layout, impl.num_kv_heads, BLOCK_SIZE)
    return TurboMetadataBuilder(spec, list(layers), config, DEVICE)


def make_layer(config: VllmConfig, **changes: Any) -> Attention:
    """A layer as models make it, in the next place unless ``prefix`` names another."""
    count = len(config.compilation_config.static_forward_context)
    arguments = dict(
        num_heads=NUM_HEADS,
        head_size=HEAD_SIZE,
        scale=SCALE,
        num_kv_heads=NUM_KV_HEADS,
        cache_config=config.cache_config,
        prefix=f"layers.{count}.attn",
    )
    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        return Attention(**(arguments | changes))


def add_layer(
    config: VllmConfig, name: str, num_heads: int = NUM_HEADS, is_draft: bool = False
) -> None:
    """Register an attention layer of the target model or of a drafter."""
    layer = make_layer(config, prefix=name, num_heads=num_heads)
    layer.is_draft_layer = is_draft


def rounds_queries(runner: TurboRunner, query_lens: list[int]) -> bool:
    """Whether decodes of these query lengths, in one batch, attend from q in int8."""
    if runner.kernels is None or runner.kernels.name != "CUDA":
        return False
    return cuda_decode.rounds_queries(
        runner.layout,
        runner.context_shape.num_queries_per_kv * max(query_lens, default=0),
        DEVICE,
        variant_of(runner),
    )


def variant_of(runner: TurboRunner) -> interface.Variant:
    """The layer's variant, without its tail."""
    return runner.scoring.variant()


def run_profile(impl: AttentionImpl) -> torch.Tensor:
    """Run a layer's profile run; return its output, which is zero."""
    shape = impl.runner.shape
    query, own = (
        torch.full((1, impl.num_heads, size), 7, dtype=shape.dtype, device=DEVICE)
        for size in (shape.head_size, shape.head_size_v)
    )
    output = impl.forward(None, query, query, own, None, None, own)
    assert output is own
    return output


def reserve(*impls: AttentionImpl) -> None:
    """Run the profile run of layers; then the workspace must not grow."""
    for impl in impls:
        run_profile(impl)
    lock_workspace()


def set_path(impl: TurboAttentionImpl, path: str) -> None:
    """Have the path's kernels run; on a CPU a stand-in replaces FlashAttention."""
    runner = impl.runner
    if path == "torch":
        runner.kernels = None
    elif ON_GPU:
        try:
            group = runner.context_shape.num_queries_per_kv
            source = TurboSource(runner.layout, group, variant=variant_of(runner))
            runner.chosen_kernels = share_kernels(path, source)
        except ValueError as error:
            pytest.skip(str(error))
    else:
        is_cuda = path == "cuda"
        runner.kernels = cuda_kernels(runner.layout) if is_cuda else triton_kernels()
    if not ON_GPU:
        runner.flash_attn = FLASH_ATTN
