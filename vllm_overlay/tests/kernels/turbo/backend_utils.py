# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The backend as the model runner uses it: configurations, layers and batches."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

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
from vllm.v1.attention.backend import AttentionImpl, CommonAttentionMetadata
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
    TurboMetadata,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.choose import (
    cuda_kernels,
    share_kernels,
    triton_kernels,
)
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.planning import prefill as prefill_plan
from vllm.v1.attention.ops.turbo.planning import scratch
from vllm.v1.worker.workspace import lock_workspace

from .flash_utils import flash_attn_stand_in
from .utils import (
    BF16,
    CAN_RUN_CUDA,
    DEVICE,
    ON_GPU,
    cache_spec,
    check_request,
    fill_cache,
    gaussian,
    load_context,
    make_block_table,
    new_cache,
    num_blocks_for,
    requires_triton,
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
# Decodes, and prefills after several pieces of context, after few tokens, and alone.
VARIED = [(1, 0), (1, 40), (1, 130), (20, 150), (5, 14), (33, 0)]
# Requests with up to two drafts.
RAGGED_DRAFTS = [(3, 31), (1, 130), (2, 15), (3, 0), (7, 64)]
all_batches = pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
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
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    *,
    path: str | None = None,
    key_offset: torch.Tensor | None = None,
    **arguments: Any,
) -> TurboAttentionImpl:
    """The implementation of a layer.

    Args:
        config: The engine's configuration.
        num_heads: Query heads; None: ``NUM_HEADS``.
        num_kv_heads: KV heads; None: ``NUM_KV_HEADS``.
        path: The path that it takes: see ``set_path``; None: the device's.
        key_offset: (G, H, D) fp32, the offset of K by segment.
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
    impl.runner.key_offset = key_offset
    if path is not None:
        set_path(impl, path)
    return impl


def register(
    config: VllmConfig, impl: AttentionImpl, name: str = "layers.0.attn"
) -> None:
    """Have the layer of this name run the implementation; add the layer if it lacks."""
    layers = config.compilation_config.static_forward_context
    if name not in layers:
        sizes = dict(num_heads=impl.num_heads, head_size=impl.head_size)
        make_layer(config, prefix=name, **sizes).is_draft_layer = False
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
    """The layer's variant, without its recent window."""
    has_cap = runner.logits_soft_cap is not None
    return interface.Variant(runner.key_offset is not None, soft_cap=has_cap)


def make_common(
    query_lens: list[int],
    seq_lens: list[int],
    block_table: torch.Tensor,
    slots: torch.Tensor,
) -> CommonAttentionMetadata:
    """The model runner's metadata of a batch.

    Args:
        query_lens: Query length of each request, R of them.
        seq_lens: Length of each sequence, query included; the host's bounds are exact.
        block_table: (R, max_blocks) int32.
        slots: (T,) int64, of all query tokens and of padding.

    """
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(DEVICE, copy=True),
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=block_table,
        slot_mapping=slots,
        seq_lens_cpu_upper_bound=lens,
    )


def pad_to_graph(
    common: CommonAttentionMetadata, num_reqs: int, num_tokens: int, query_len: int = 0
) -> CommonAttentionMetadata:
    """Pad a batch as for a CUDA graph of more requests and tokens.

    Padded requests have ``query_len`` query tokens, no sequence, and zeros as blocks.
    Slots stay as they are.
    """
    count = num_reqs - common.num_reqs
    starts = common.query_start_loc_cpu
    padding = starts[-1] + query_len * torch.arange(1, count + 1)
    starts = torch.cat([starts, padding]).int()
    lens = nn.functional.pad(common.seq_lens_cpu_upper_bound, (0, count))
    return common.replace(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=nn.functional.pad(common.seq_lens, (0, count)),
        seq_lens_cpu_upper_bound=lens,
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        block_table_tensor=nn.functional.pad(
            common.block_table_tensor, (0, 0, 0, count)
        ),
    )


def run_profile(impl: AttentionImpl) -> torch.Tensor:
    """Run a layer's profile run; return its output, which is zero."""
    shape = (1, impl.num_heads, impl.head_size)
    x = torch.full(shape, 7, dtype=impl.runner.shape.dtype, device=DEVICE)
    return impl.forward(None, x, x, x, None, None, x)


def reserve(*impls: AttentionImpl) -> None:
    """Run the profile run of layers; then the workspace must not grow."""
    for impl in impls:
        run_profile(impl)
    lock_workspace()


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
        num_blocks = num_blocks_for(seq_lens, block_size)
        cache = new_cache(impl.runner.layout, num_blocks, impl.num_kv_heads, block_size)
        table = make_block_table(seq_lens, block_size)
        fill_cache(cache, table, contexts, impl.runner.layout, dtype)
        slots = [
            slots_of(table[row], context, seq_lens[row], block_size)
            for row, context in enumerate(contexts)
        ]
        slots.append(torch.full((PADDING,), -1, device=DEVICE))
        query_lens = [query for query, _ in requests]
        common = make_common(query_lens, seq_lens, table, torch.cat(slots))
        heads = (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)
        vectors = [
            gaussian(len(common.slot_mapping), h, impl.head_size, dtype=dtype, seed=i)
            for i, h in enumerate(heads, 1)
        ]
        return Batch(cache, table, common, *vectors, requests)

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

    def build(self, config: VllmConfig, impl: TurboAttentionImpl) -> TurboMetadata:
        """The metadata that a new builder of the layer makes of the batch."""
        return make_builder(config, impl).build(0, self.common)

    def run(
        self,
        impl: TurboAttentionImpl,
        metadata: TurboMetadata,
        path: str | None = None,
    ) -> torch.Tensor:
        """The output of a forward pass, (T, Hq, D); path "torch" takes no kernels.

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

    def serve(self, impl: TurboAttentionImpl, metadata: TurboMetadata) -> torch.Tensor:
        """Run a forward pass and check its output, which is returned."""
        output = self.run(impl, metadata)
        self.check(impl, output, self.common.mm_req_doc_ranges)
        return output

    def check_padded(self, impl: TurboAttentionImpl, metadata: TurboMetadata) -> None:
        """Run a forward pass of all rows; the rows of padding must be zero."""
        output = torch.full_like(self.query, 7)
        impl.forward(
            None, self.query, self.key, self.value, self.cache, metadata, output
        )
        num_tokens = self.common.num_actual_tokens
        assert (output[num_tokens:] == 0).all()
        self.check(impl, output[:num_tokens])

    def hide_drafts(self, num_decodes: int) -> CommonAttentionMetadata:
        """The metadata of a host that knows only upper bounds of decodes' lengths."""
        upper_bound = self.common.seq_lens_cpu_upper_bound.clone()
        upper_bound[:num_decodes] += 7
        return self.common.replace(seq_lens_cpu_upper_bound=upper_bound)

    def check_fails_without(
        self, impl: TurboAttentionImpl, output: torch.Tensor, rule: str
    ) -> None:
        """Check that the check tells a rule for scores, an attribute of the runner, or
        the ranges.
        """
        with pytest.MonkeyPatch.context() as patch:
            ranges = self.common.mm_req_doc_ranges
            if rule == "ranges":
                ranges = None
            else:
                patch.setattr(impl.runner, rule, None)
            with pytest.raises(AssertionError, match="allowed"):
                self.check(impl, output, ranges)

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
            own_ranges = (ranges or {}).get(row, [])
            options["spans"] = [(first, last + 1) for first, last in own_ranges]
            # A range with one token of the step has no later token for a query.
            newest = context + num_queries - 1
            is_prefilled = row >= num_rotated or any(
                min(last, newest) > max(first, context) for first, last in own_ranges
            )
            num_newest = num_queries if raw else 0
            check_request(
                output[part],
                self.query[part],
                key,
                value,
                impl.scale,
                impl.runner.shape.dtype,
                None if is_prefilled else num_newest,
                is_rounded,
                part_of_key,
                **options,
            )


def check_requests(
    config: VllmConfig,
    impl: TurboAttentionImpl,
    requests: list[tuple[int, int]],
    ranges: Ranges | None = None,
    rule: str | None = None,
) -> TurboMetadata:
    """Serve requests in a new cache and check each one's output.

    Args:
        config: The engine's configuration.
        impl: The layer's implementation.
        requests: Query length and context length of each request.
        ranges: Ranges of tokens that see each other.
        rule: A rule without which the check must fail.

    Returns:
        The metadata that the builder made.

    """
    batch = Batch.make(impl, requests)
    batch.common.mm_req_doc_ranges = ranges
    if impl.runner.sliding_window is not None:
        batch.free_hidden_blocks(impl.runner.sliding_window)
    metadata = batch.build(config, impl)
    output = batch.serve(impl, metadata)
    if rule is not None:
        batch.check_fails_without(impl, output, rule)
    return metadata


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
