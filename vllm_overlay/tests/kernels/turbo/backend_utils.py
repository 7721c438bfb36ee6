# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The backend as the model runner uses it: configurations, batches, and a stand-in for
FlashAttention where there is no GPU.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

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
from vllm.v1.attention.backend import AttentionImpl, CommonAttentionMetadata
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
    TurboMetadata,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import interface, reference
from vllm.v1.attention.ops.turbo.choose import (
    cuda_kernels,
    share_kernels,
    triton_kernels,
)
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.layer.flash import get_flash_attn
from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.planning import prefill as prefill_plan
from vllm.v1.attention.ops.turbo.planning import scratch
from vllm.v1.worker.workspace import lock_workspace

from .utils import (
    BF16,
    CAN_RUN_CUDA,
    DEVICE,
    ON_GPU,
    assert_by_2x_rule,
    attention_of_rounded,
    cache_spec,
    fill_cache,
    gaussian,
    load_context,
    make_block_table,
    new_cache,
    num_blocks_for,
    slots_of,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 64, 32
SCALE = HEAD_SIZE**-0.5
# Rows of padding after the batch's tokens.
PADDING = 3

# (query length, context length) of each request, decodes first.
BATCHES = {
    "decodes": [(1, 31), (1, 32), (1, 0), (1, 95)],
    "first chunks": [(33, 0), (2, 0)],
    "prefix hits": [(5, 64), (2, 33)],
    "mixed": [(1, 40), (1, 64), (20, 0), (3, 65), (4, 31)],
    # A first chunk as long as the longest sequence, beside requests with context.
    "long first chunk": [(1, 9), (66, 0), (2, 64), (3, 33)],
    "context of several pieces": [(1, 5), (2, 150), (10, 140)],
}
all_batches = pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
KERNELS = ["triton", "cuda"] if CAN_RUN_CUDA else ["triton"]
kernel_paths = pytest.mark.parametrize("path", KERNELS)
all_paths = pytest.mark.parametrize("path", ["torch", *KERNELS])
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
    """The configuration of a Llama with one layer and no recent window.

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
    """The configuration, changed so that requests bring drafts to verify."""
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
) -> None:
    """Bound the scratch, in tokens, of implementations and builders made later."""
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
    size = 1, NUM_HEADS, runner.layout.head_size
    x = torch.empty(size, dtype=torch.float16, device=DEVICE)
    impl.forward(None, x, x, x, None, None, x)
    lock_workspace()


def requests_of_a_step(
    generator: torch.Generator, longest: int
) -> Iterator[tuple[int, int]]:
    """Query and context lengths of up to 8 extends, with 2048 query tokens at most."""
    left = 2048
    for _ in range(8):
        most = (longest, 40)[int(torch.randint(2, (), generator=generator))]
        length = int(torch.randint(2, most + 1, (), generator=generator))
        left -= length
        if left < 0:
            return
        yield length, 40


def make_impl(
    config: VllmConfig,
    num_heads: int = NUM_HEADS,
    num_kv_heads: int = NUM_KV_HEADS,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    kv_sharing_target_layer_name: str | None = None,
    logits_soft_cap: float | None = None,
) -> TurboAttentionImpl:
    with set_current_vllm_config(config):
        return TurboAttentionImpl(
            num_heads,
            HEAD_SIZE,
            SCALE,
            num_kv_heads,
            sliding_window=sliding_window,
            kv_cache_dtype=config.cache_config.cache_dtype,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )


def register(
    config: VllmConfig, impl: AttentionImpl, name: str = "layers.0.attn"
) -> None:
    """Have the layer of this name run the implementation; add the layer if it lacks."""
    layers = config.compilation_config.static_forward_context
    if name not in layers:
        add_layer(config, name, impl.num_heads, head_size=impl.head_size)
    layers[name].impl = impl


def make_builder(config: VllmConfig, impl: TurboAttentionImpl) -> TurboMetadataBuilder:
    """A builder for a layer that runs the implementation."""
    register(config, impl)
    spec = cache_spec(impl.runner.layout, impl.num_kv_heads, BLOCK_SIZE)
    return TurboMetadataBuilder(spec, ["layers.0.attn"], config, DEVICE)


def add_layer(
    config: VllmConfig,
    name: str,
    num_heads: int = NUM_HEADS,
    is_draft: bool = False,
    head_size: int = HEAD_SIZE,
) -> None:
    """Register an attention layer, as models do."""
    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        layer = Attention(
            num_heads,
            head_size,
            head_size**-0.5,
            NUM_KV_HEADS,
            cache_config=config.cache_config,
            prefix=name,
        )
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
    """The layer's variant, without its recent window."""
    has_cap = runner.logits_soft_cap is not None
    return interface.Variant(runner.key_offset is not None, soft_cap=has_cap)


# By request: first and last positions of ranges whose tokens see each other.
Ranges: TypeAlias = dict[int, list[tuple[int, int]]]


@dataclass
class Batch:
    """A batch as the model runner hands it over, its context in the cache.

    Attributes:
        cache: (num_blocks, H, N, C) uint8.
        table: (R, max_blocks) int32, the blocks of all tokens.
        common: The runner's metadata of the batch.
        query: (T, Hq, D), with ``PADDING`` rows of padding at the end.
        key: (T, H, D), padded likewise.
        value: (T, H, D), padded likewise.
        requests: Query length and context length of each request.

    """

    cache: torch.Tensor
    table: torch.Tensor
    common: CommonAttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    requests: list[tuple[int, int]]

    @staticmethod
    def make(
        impl: TurboAttentionImpl,
        requests: list[tuple[int, int]],
        block_size: int = BLOCK_SIZE,
    ) -> "Batch":
        dtype = impl.runner.shape.dtype
        contexts = [context for _, context in requests]
        seq_lens = [query + context for query, context in requests]
        num_tokens = sum(query for query, _ in requests)
        num_blocks = num_blocks_for(seq_lens, block_size)
        cache = new_cache(impl.runner.layout, num_blocks, impl.num_kv_heads, block_size)
        table = make_block_table(seq_lens, block_size)
        fill_cache(cache, table, contexts, impl.runner.layout, dtype)
        slots = [
            slots_of(table[row], context, seq_lens[row], block_size)
            for row, context in enumerate(contexts)
        ]
        padding = torch.full((PADDING,), -1, device=DEVICE)
        starts = torch.tensor([0, *(query for query, _ in requests)])
        starts = starts.cumsum(0).int()
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(DEVICE),
            num_reqs=len(requests),
            num_actual_tokens=num_tokens,
            max_query_len=max(query for query, _ in requests),
            max_seq_len=max(seq_lens),
            block_table_tensor=table,
            slot_mapping=torch.cat([*slots, padding]),
            seq_lens_cpu_upper_bound=lens,
        )
        rows = num_tokens + PADDING
        return Batch(
            cache,
            table,
            common,
            gaussian(rows, impl.num_heads, HEAD_SIZE, dtype=dtype, seed=1),
            gaussian(rows, impl.num_kv_heads, HEAD_SIZE, dtype=dtype, seed=2),
            gaussian(rows, impl.num_kv_heads, HEAD_SIZE, dtype=dtype, seed=3),
            requests,
        )

    def free_hidden_blocks(self, sliding_window: int) -> None:
        """Replace blocks that no query token sees in the runner's table by another one.

        vLLM replaces them by block 0, which may hold any bytes; this block holds 0xFF.
        """
        block_size = self.cache.shape[2]
        (unused, *_) = set(range(len(self.cache))) - set(self.table.flatten().tolist())
        self.cache[unused] = 0xFF
        seen = self.table.clone()
        for row, (_, context) in enumerate(self.requests):
            first = max(context + 1 - sliding_window, 0)
            seen[row, : first // block_size] = unused
        self.common.block_table_tensor = seen

    def run(
        self, impl: TurboAttentionImpl, metadata: TurboMetadata, path: str
    ) -> torch.Tensor:
        """The output of a forward pass by one path, (T, Hq, D).

        Padded rows must stay as they were.
        """
        num_tokens = self.common.num_actual_tokens
        q, k, v = (x[:num_tokens] for x in (self.query, self.key, self.value))
        if impl.runner.shares_cache:
            k = v = None
        output = torch.full_like(self.query, 7)
        kernels = impl.runner.kernels
        if path == "torch":
            impl.runner.kernels = None
        impl.forward(None, q, k, v, self.cache, metadata, output)
        impl.runner.kernels = kernels
        assert (output[num_tokens:] == 7).all()
        return output[:num_tokens]

    def check(
        self,
        impl: TurboAttentionImpl,
        output: torch.Tensor,
        ranges: Ranges | None = None,
    ) -> None:
        """Compare each request to attention over the tokens that it should see, later
        tokens of the ranges included.

        Decode kernels rotate q in block fixed point, and CUDA's round it to int8 where
        ``rounds_queries`` says so. The target is attention from q rounded like this.
        The first segment's offset is taken off all keys, so that the reference has no
        large scores: a softmax does not depend on it. With sinks it does, and the
        offset stays.
        """
        offset = impl.runner.key_offset
        without = torch.zeros(1) if offset is None else offset[0]
        lens = [num_queries for num_queries, _ in self.requests]
        longer = (i for i, n in enumerate(lens) if n > impl.runner.max_query_len)
        num_decodes = next(longer, len(lens))
        is_rounded = rounds_queries(impl.runner, lens[:num_decodes])
        num_rotated = 0 if impl.runner.kernels is None else num_decodes
        begin = 0
        options: dict[str, Any] = {
            "sliding_window": impl.runner.sliding_window,
            "logits_soft_cap": impl.runner.logits_soft_cap,
        }
        if impl.runner.sinks is not None:
            options["sinks"] = impl.runner.sinks
            without = torch.zeros_like(without)
        for row, (num_queries, context) in enumerate(self.requests):
            part = slice(begin, begin + num_queries)
            begin = part.stop
            raw = not impl.runner.stored
            length = context if raw else context + num_queries
            table = self.table[row]
            key, value = load_context(self.cache, table, length, impl.runner.layout)
            part_of_key = None
            if offset is not None:
                segments = torch.arange(length) // interface.OFFSET_SEGMENT
                shift = (offset - without)[segments.clamp(max=len(offset) - 1)]
                part_of_key = nn.functional.pad(
                    shift, (0, 0, 0, 0, 0, context + num_queries - length)
                )
                key += shift
            if raw:
                own = self.key[part].float()
                key = torch.cat([key, own - without.to(own.device)])
                value = torch.cat([value, self.value[part].float()])
            query, target = self.query[part], None
            own_ranges = (ranges or {}).get(row, [])
            options["spans"] = [(first, last + 1) for first, last in own_ranges]
            # A range with one token of the step has no later token for a query.
            newest = context + num_queries - 1
            is_prefilled = any(
                min(last, newest) > max(first, context) for first, last in own_ranges
            )
            if row < num_rotated and not is_prefilled:
                rotated = reference.rotate(query)
                if is_rounded:
                    rotated = reference.round_query(rotated)
                rounded = reference.inverse_rotate(rotated)
                num_newest = num_queries if raw else 0
                target = attention_of_rounded(
                    rounded,
                    query,
                    key,
                    value,
                    num_newest,
                    SCALE,
                    part_of_key,
                    **options,
                )
            assert_by_2x_rule(
                output[part],
                query,
                key,
                value,
                SCALE,
                impl.runner.shape.dtype,
                True,
                target,
                **options,
            )


def set_path(impl: TurboAttentionImpl, path: str) -> None:
    """Have the path's kernels run; on a CPU a stand-in replaces FlashAttention."""
    runner = impl.runner
    if path == "torch":
        runner.kernels = None
    elif ON_GPU:
        try:
            runner.chosen_kernels = share_kernels(
                path,
                runner.layout,
                runner.context_shape.num_queries_per_kv,
                variant=variant_of(runner),
            )
        except ValueError as error:
            pytest.skip(str(error))
    else:
        is_cuda = path == "cuda"
        runner.kernels = cuda_kernels(runner.layout) if is_cuda else triton_kernels()
    if not ON_GPU:
        runner.flash_attn = partial(flash_attn_stand_in)


def flash_attn_of_gpu(head_size: int) -> Callable[..., Any] | None:
    """The result of ``get_flash_attn`` on a GPU; None without one. The test is skipped
    if vLLM picks a version that needs a package that is not installed.
    """
    found = get_flash_attn(head_size) if ON_GPU else None
    version = getattr(found, "keywords", {}).get("fa_version")
    if version == 4 and find_spec("cutlass") is None:
        pytest.skip("FlashAttention 4 needs the package nvidia-cutlass-dsl")
    return found


# Rows of K and V that FlashAttention loads at a time.
FLASH_ATTN_TILE = 128


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    hidden: torch.Tensor,
    logits_soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.attention``, with any mask ``hidden``, (Q, T) bool."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,thd->hqt", query, key) * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    scores = scores.masked_fill(hidden.to(scores.device), -math.inf)
    output = torch.einsum("hqt,thd->qhd", torch.softmax(scores, -1), value)
    return output, torch.logsumexp(scores, -1).T


def flash_attn_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    lse_of_none: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention's varlen function in PyTorch, with the arguments that turbo gives.

    Args:
        lse_of_none: LSE of a sequence without keys. Its output is zero.

    Returns:
        ``out`` and the LSE, (Hq, T) fp32.

    """
    sliding_window, left = None, -1
    if window_size is not None:
        left, right = window_size
        assert left >= 0 and right == (0 if causal else -1)
        if causal:
            sliding_window = left + 1
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
    lse = torch.full((q.shape[1], q.shape[0]), lse_of_none, device=q.device)
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row in range(len(bounds_q) - 1):
        queries = slice(bounds_q[row], bounds_q[row + 1])
        keys = slice(bounds_k[row], bounds_k[row + 1])
        if keys.start == keys.stop:
            out[queries] = 0
            continue
        operands = [x.float() for x in (q[queries], k[keys], v[keys])]
        if causal or left < 0:
            result, row_lse = reference.attention(
                *operands,
                softmax_scale,
                causal,
                sliding_window,
                logits_soft_cap=softcap or None,
            )
        else:
            num_queries, num_keys = (len(x) for x in operands[:2])
            first = torch.arange(num_queries) + num_keys - num_queries - left
            hidden = torch.arange(num_keys) < first[:, None]
            result, row_lse = masked_attention(
                *operands, softmax_scale, hidden, softcap or None
            )
        out[queries] = result.to(out.dtype)
        lse[:, queries] = row_lse.T
        # The tile's other rows are another sequence's. Their weight is 0, so that a NaN
        # or Inf in them reaches the output, as on a GPU.
        others = v[keys.stop : keys.stop + FLASH_ATTN_TILE].float()
        nothing = (0.0 * others).sum(0).repeat_interleave(q.shape[1] // v.shape[1], 0)
        out[queries] += nothing.to(out.dtype)
    return out, lse
