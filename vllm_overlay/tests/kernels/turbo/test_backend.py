# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The backend: metadata of mixed batches, both forward paths, workspace."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.config import SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionBackend,
    TurboAttentionImpl,
    TurboMetadata,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import (
    cuda_decode,
    cuda_merge,
    cuda_store,
    kernels,
    prefill,
    reference,
)
from vllm.v1.worker.workspace import (
    init_workspace_manager,
    lock_workspace,
    reset_workspace_manager,
)

from .utils import (
    BF16,
    CACHE_LAYOUTS,
    DEVICE,
    FP16,
    ON_GPU,
    all_presets,
    assert_by_2x_rule,
    cache_spec,
    fill_cache,
    flash_attn_stand_in,
    gaussian,
    load_context,
    make_block_table,
    make_vllm_config,
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
    # As long as the longest sequence: not all requests are without context.
    "long first chunk": [(1, 9), (66, 0), (2, 64), (3, 33)],
    "context of several pieces": [(1, 5), (2, 150), (10, 140)],
}
all_batches = pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
KERNELS = ["triton", "cuda"] if ON_GPU and current_platform.is_cuda() else ["triton"]
kernel_paths = pytest.mark.parametrize("path", KERNELS)
all_paths = pytest.mark.parametrize("path", ["torch", *KERNELS])
prefill_modes = pytest.mark.parametrize("mode", ["raw", "stored"])


# The same where requests bring up to two drafts.
SPECULATIVE_BATCHES = {
    "uniform": [(3, 31), (3, 0), (3, 62)],
    "one token each": [(1, 31), (1, 64)],
    "ragged": [(3, 31), (1, 64), (2, 0), (3, 14)],
    "mixed": [(1, 40), (3, 30), (20, 0), (5, 65)],
    "prefills alone": [(4, 64), (5, 0)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def make_impl(config: VllmConfig) -> TurboAttentionImpl:
    with set_current_vllm_config(config):
        return TurboAttentionImpl(
            NUM_HEADS,
            HEAD_SIZE,
            SCALE,
            NUM_KV_HEADS,
            kv_cache_dtype=config.cache_config.cache_dtype,
        )


def make_builder(config: VllmConfig, impl: TurboAttentionImpl) -> TurboMetadataBuilder:
    spec = cache_spec(impl.layout, NUM_KV_HEADS, BLOCK_SIZE)
    return TurboMetadataBuilder(spec, ["layers.0.attn"], config, DEVICE)


@dataclass
class Batch:
    """A batch as the model runner hands it over, its context in the cache."""

    cache: torch.Tensor
    common: CommonAttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    requests: list[tuple[int, int]]

    @staticmethod
    def make(impl: TurboAttentionImpl, requests: list[tuple[int, int]]) -> "Batch":
        dtype = impl.dtype
        contexts = [context for _, context in requests]
        seq_lens = [query + context for query, context in requests]
        num_tokens = sum(query for query, _ in requests)
        num_blocks = num_blocks_for(seq_lens, BLOCK_SIZE)
        cache = new_cache(impl.layout, num_blocks, NUM_KV_HEADS, BLOCK_SIZE)
        table = make_block_table(seq_lens, BLOCK_SIZE)
        fill_cache(cache, table, contexts, impl.layout, dtype)
        slots = [
            slots_of(table[row], context, seq_lens[row], BLOCK_SIZE)
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
            common,
            gaussian(rows, NUM_HEADS, HEAD_SIZE, dtype=dtype, seed=1),
            gaussian(rows, NUM_KV_HEADS, HEAD_SIZE, dtype=dtype, seed=2),
            gaussian(rows, NUM_KV_HEADS, HEAD_SIZE, dtype=dtype, seed=3),
            requests,
        )

    def run(
        self, impl: TurboAttentionImpl, metadata: TurboMetadata, path: str
    ) -> torch.Tensor:
        """Forward by one path; padded rows of the output stay as they are."""
        num_tokens = self.common.num_actual_tokens
        q, k, v = (x[:num_tokens] for x in (self.query, self.key, self.value))
        output = torch.full_like(self.query, 7)
        forward = impl._forward_torch if path == "torch" else impl._forward_kernels
        forward(q, k, v, self.cache, metadata, output)
        assert (output[num_tokens:] == 7).all()
        return output[:num_tokens]

    def check(self, impl: TurboAttentionImpl, output: torch.Tensor) -> None:
        """Compare each request to attention over what it is to see."""
        begin = 0
        for row, (num_queries, context) in enumerate(self.requests):
            part = slice(begin, begin + num_queries)
            begin = part.stop
            raw = not impl.stored
            length = context if raw else context + num_queries
            table = self.common.block_table_tensor[row]
            key, value = load_context(self.cache, table, length, impl.layout)
            if raw:
                key = torch.cat([key, self.key[part].float()])
                value = torch.cat([value, self.value[part].float()])
            assert_by_2x_rule(
                output[part], self.query[part], key, value, SCALE, impl.dtype, True
            )


def set_path(impl: TurboAttentionImpl, path: str) -> None:
    """Have the path's kernels run, and FlashAttention unless they are to be alone."""
    if path != "torch":
        impl.kernel_choice = path.removesuffix(" alone")
        vars(impl).pop("kernels", None)
        try:
            impl.process_weights_after_loading(impl.dtype)
        except ValueError as error:
            pytest.skip(str(error))
    if path.endswith(" alone"):
        impl.flash_attn = None
    elif not ON_GPU:
        impl.flash_attn = partial(flash_attn_stand_in)


@requires_triton
@all_batches
@prefill_modes
@pytest.mark.parametrize("path", ["torch", *KERNELS, *(f"{k} alone" for k in KERNELS)])
def test_batches(folder, requests, mode, path, monkeypatch):
    """Context is cut into pieces of the least size, 128 tokens."""
    monkeypatch.setattr(prefill, "PIECE_BYTES", 1)
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    impl = make_impl(config)
    assert impl.tokens_per_piece == 128
    set_path(impl, path)
    batch = Batch.make(impl, requests)
    metadata = make_builder(config, impl).build(0, batch.common)
    num_decodes = sum(num_queries == 1 for num_queries, _ in requests)
    assert metadata.num_decodes == num_decodes
    assert (metadata.prefill is None) == (num_decodes == len(requests))
    batch.check(impl, batch.run(impl, metadata, path))


@requires_triton
@all_presets
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@all_paths
def test_presets(folder, name, dtype, path):
    config = make_vllm_config(folder, name, dtype)
    impl = make_impl(config)
    set_path(impl, path)
    batch = Batch.make(impl, BATCHES["mixed"])
    metadata = make_builder(config, impl).build(0, batch.common)
    batch.check(impl, batch.run(impl, metadata, path))


@requires_triton
@kernel_paths
def test_paths_store_the_same_bytes(folder, path):
    config = make_vllm_config(folder)
    impl = make_impl(config)
    set_path(impl, path)
    caches = []
    for each in ("torch", path):
        batch = Batch.make(impl, BATCHES["mixed"])
        metadata = make_builder(config, impl).build(0, batch.common)
        batch.run(impl, metadata, each)
        caches.append(batch.cache)
    assert torch.equal(caches[0], caches[1])
    num_tokens = batch.common.num_actual_tokens
    updated = Batch.make(impl, BATCHES["mixed"])
    # As ``forward`` does, this takes the path of the tensors' device.
    impl.do_kv_cache_update(
        None,
        updated.key,
        updated.value,
        updated.cache,
        updated.common.slot_mapping[:num_tokens],
    )
    assert torch.equal(updated.cache, caches[0])


def test_forward_takes_the_path_of_the_device(folder):
    config = make_vllm_config(folder)
    impl = make_impl(config)
    batch = Batch.make(impl, BATCHES["mixed"])
    metadata = make_builder(config, impl).build(0, batch.common)
    output = torch.full_like(batch.query, 7)
    result = impl.forward(
        None, batch.query, batch.key, batch.value, batch.cache, metadata, output
    )
    assert result is output
    num_tokens = batch.common.num_actual_tokens
    batch.check(impl, output[:num_tokens])
    expected = batch.run(impl, metadata, "auto" if ON_GPU else "torch")
    assert torch.equal(output[:num_tokens], expected)


def with_drafts(config: VllmConfig, num_drafts: int = 2) -> VllmConfig:
    """The configuration, with requests that bring some drafts to verify."""
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    return config


@requires_triton
@pytest.mark.parametrize("name", SPECULATIVE_BATCHES)
@prefill_modes
@all_paths
def test_batches_with_drafts(folder, name, mode, path):
    """Drafts are decoded, as lengths on the host are not exact for them."""
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16, mode))
    impl = make_impl(config)
    set_path(impl, path)
    requests = SPECULATIVE_BATCHES[name]
    batch = Batch.make(impl, requests)
    query_lens = [query_len for query_len, _ in requests if query_len <= 3]
    num_decodes = len(query_lens)
    upper_bound = batch.common.seq_lens_cpu_upper_bound.clone()
    upper_bound[:num_decodes] += 7
    common = batch.common.replace(seq_lens_cpu_upper_bound=upper_bound)
    metadata = make_builder(config, impl).build(0, common)
    assert metadata.num_decodes == num_decodes
    assert metadata.num_decode_tokens == sum(query_lens)
    assert (metadata.prefill is None) == (num_decodes == len(requests))
    assert (metadata.decode_start_loc is None) == (len(set(query_lens)) <= 1)
    batch.check(impl, batch.run(impl, metadata, path))


@requires_triton
@prefill_modes
@kernel_paths
def test_padded_drafts(folder, mode, path):
    """As a CUDA graph of a larger batch has them: the requests of padding begin where
    the tokens end, and yet their tokens are counted.
    """
    config = with_drafts(make_vllm_config(folder, turbo_prefill=mode), PADDING - 1)
    impl = make_impl(config)
    set_path(impl, path)
    batch = Batch.make(impl, [(PADDING, 31), (PADDING, 64)])
    common = batch.common
    starts = torch.tensor([0, PADDING, 2 * PADDING, 2 * PADDING], dtype=torch.int32)
    table = torch.zeros(3, common.block_table_tensor.shape[1]).int()
    table[:2] = common.block_table_tensor
    lens = torch.tensor([31 + PADDING, 64 + PADDING, 0], dtype=torch.int32)
    padded = common.replace(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(DEVICE),
        seq_lens_cpu_upper_bound=lens,
        num_reqs=3,
        num_actual_tokens=3 * PADDING,
        block_table_tensor=table.to(DEVICE),
    )
    metadata = make_builder(config, impl).build(0, padded)
    assert metadata.num_decodes == 3 and metadata.num_decode_tokens == 3 * PADDING
    assert metadata.decode_query_len == PADDING and metadata.decode_start_loc is None
    output = torch.full_like(batch.query, 7)
    impl._forward_kernels(
        batch.query, batch.key, batch.value, batch.cache, metadata, output
    )
    num_tokens = 2 * PADDING
    assert (output[num_tokens:] == 0).all()
    batch.check(impl, output[:num_tokens])


@requires_triton
@kernel_paths
def test_padded_decodes(folder, path):
    """As a CUDA graph of a larger batch has them: length 0, slot -1."""
    config = make_vllm_config(folder)
    impl = make_impl(config)
    set_path(impl, path)
    batch = Batch.make(impl, [(1, 31), (1, 64)])
    common, num_padded = batch.common, 2 + PADDING
    starts = torch.arange(num_padded + 1, dtype=torch.int32)
    table = torch.zeros(num_padded, common.block_table_tensor.shape[1]).int()
    table[:2] = common.block_table_tensor
    lens = torch.tensor([32, 65] + [0] * PADDING, dtype=torch.int32)
    padded = common.replace(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(DEVICE),
        seq_lens_cpu_upper_bound=lens,
        num_reqs=num_padded,
        num_actual_tokens=num_padded,
        block_table_tensor=table.to(DEVICE),
    )
    builder = make_builder(config, impl)
    metadata = builder.build(0, padded)
    assert metadata.num_decodes == num_padded and metadata.prefill is None
    output = torch.full_like(batch.query, 7)
    impl._forward_kernels(
        batch.query, batch.key, batch.value, batch.cache, metadata, output
    )
    assert (output[2:] == 0).all()
    batch.check(impl, output[:2])


def test_builder_interface(folder):
    config = make_vllm_config(folder)
    impl = make_impl(config)
    builder = make_builder(config, impl)
    support = builder.get_cudagraph_support(config, builder.kv_cache_spec)
    assert support == AttentionCGSupport.UNIFORM_BATCH
    assert builder.reorder_batch_threshold == 1
    with_drafts(config)
    builder = make_builder(config, impl)
    assert builder.reorder_batch_threshold == 3
    assert make_impl(config).max_decode_query_len == 3
    assert builder.tokens_per_piece == impl.tokens_per_piece
    assert TurboAttentionBackend.get_builder_cls() is TurboMetadataBuilder
    assert TurboAttentionBackend.get_impl_cls() is TurboAttentionImpl


@requires_triton
@prefill_modes
@pytest.mark.parametrize("num_drafts", [0, 2])
@kernel_paths
def test_profile_run_reserves_every_batch(folder, mode, num_drafts, path, monkeypatch):
    """The workspace may not grow after the memory is profiled."""
    monkeypatch.setattr(prefill, "PIECE_BYTES", 1)
    config = make_vllm_config(
        folder,
        dtype=FP16,
        turbo_prefill=mode,
        max_num_seqs=4,
        max_num_batched_tokens=48,
    )
    if num_drafts:
        with_drafts(config, num_drafts)
    impl = make_impl(config)
    impl.num_sms = 4  # for several splits a sequence, on a CPU too
    set_path(impl, path)
    builder = make_builder(config, impl)
    if not ON_GPU:
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    init_workspace_manager(DEVICE)
    try:
        output = torch.full((48, NUM_HEADS, HEAD_SIZE), 7.0, device=DEVICE)
        assert impl.forward(None, output, output, output, None, None, output) is output
        assert (output == 0).all()
        lock_workspace()
        for requests in (
            [(1, 40)],
            [(1, 40)] * 4,
            [(48, 0)],
            [(48, 100)],
            [(1, 40), (1, 40), (23, 50), (23, 50)],
            *([[(3, 40)] * 4, [(1, 9), (3, 40), (2, 9)]] if num_drafts else []),
        ):
            batch = Batch.make(impl, requests)
            metadata = builder.build(0, batch.common)
            batch.check(impl, batch.run(impl, metadata, path))
    finally:
        reset_workspace_manager()


@requires_triton
def test_profile_run_asks_the_chosen_kernels(folder, monkeypatch):
    """They say how many partial results there are, and what is made for good."""
    monkeypatch.setattr(prefill, "PIECE_BYTES", 1)
    config = make_vllm_config(
        folder, dtype=FP16, max_num_seqs=4, max_num_batched_tokens=8
    )
    impl = make_impl(config)
    made = []
    impl.kernels = kernels.triton_kernels()._replace(
        num_kv_splits=lambda *args: 64, make_matrices=lambda *args: made.append(args)
    )
    builder = make_builder(config, impl)
    if not ON_GPU:
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    init_workspace_manager(DEVICE)
    try:
        output = torch.empty(4, NUM_HEADS, HEAD_SIZE, device=DEVICE)
        impl.forward(None, output, output, output, None, None, output)
        assert made == [(HEAD_SIZE, output.device)]
        lock_workspace()
        batch = Batch.make(impl, [(1, 40)] * 4)
        metadata = builder.build(0, batch.common)
        batch.check(impl, batch.run(impl, metadata, "triton"))
    finally:
        reset_workspace_manager()


@requires_triton
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS, ids=lambda x: x.name)
@prefill_modes
def test_cuda_kernels_take_what_the_backend_hands_over(
    folder, mode, dtype, cache_layout, monkeypatch
):
    """Their entry points check shapes, types, strides and alignment, of views of a
    fused projection's output too. What is launched does nothing here.
    """
    launches = []
    library = SimpleNamespace(turbo_store=lambda *args: launches.append("store") or 0)
    module = SimpleNamespace(
        decode=lambda *args: launches.append("decode"),
        merge=lambda *args: launches.append("merge"),
    )
    monkeypatch.setattr(cuda_store, "load_library", lambda *args: library)
    for each in (cuda_decode, cuda_merge):
        monkeypatch.setattr(each, "load", lambda *args: module)
    monkeypatch.setattr(cuda_merge, "num_compute_units", lambda *args: 4)
    monkeypatch.setattr(
        cuda_store, "current_stream", lambda: SimpleNamespace(cuda_stream=0)
    )
    config = make_vllm_config(folder, "turbo4", dtype, mode)
    impl = make_impl(config)
    impl.kernels = kernels.cuda_kernels()
    impl.num_sms = 4
    impl.flash_attn = None
    batch = Batch.make(impl, [(1, 40), (1, 0), (3, 0)])
    metadata = make_builder(config, impl).build(0, batch.common)
    cache = new_cache(
        impl.layout, batch.cache.shape[0], NUM_KV_HEADS, BLOCK_SIZE, cache_layout
    )
    heads = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    qkv = gaussian(batch.query.shape[0], sum(heads) * HEAD_SIZE, dtype=dtype)
    query, key, value = (
        x.view(-1, count, HEAD_SIZE)
        for x, count in zip(qkv.split([h * HEAD_SIZE for h in heads], -1), heads)
    )
    num_tokens = batch.common.num_actual_tokens
    tokens = [x[:num_tokens] for x in (query, key, value)]
    assert not any(x.is_contiguous() for x in tokens)
    impl._forward_kernels(*tokens, cache, metadata, torch.empty_like(batch.query))
    assert launches == ["store", "decode", "merge"]


@requires_triton
@kernel_paths
def test_batch_of_one_step_after_another(folder, path):
    """A sequence prefilled in two chunks, then decoded, sees all its tokens."""
    config = make_vllm_config(folder, dtype=FP16, turbo_prefill="stored")
    impl = make_impl(config)
    set_path(impl, path)
    builder = make_builder(config, impl)
    whole = Batch.make(impl, [(40, 0)])
    table = whole.common.block_table_tensor
    outputs = []
    for begin, end in ((0, 17), (17, 39), (39, 40)):
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        lens = torch.tensor([end], dtype=torch.int32)
        common = whole.common.replace(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(DEVICE),
            seq_lens_cpu_upper_bound=lens,
            num_actual_tokens=end - begin,
            max_query_len=end - begin,
            max_seq_len=end,
            slot_mapping=slots_of(table[0], begin, end, BLOCK_SIZE),
        )
        q, k, v = (x[begin:end] for x in (whole.query, whole.key, whole.value))
        output = torch.full_like(q, 7)
        metadata = builder.build(0, common)
        impl._forward_kernels(q, k, v, whole.cache, metadata, output)
        outputs.append(output)
    whole.check(impl, torch.cat(outputs))
    expected = new_cache(impl.layout, whole.cache.shape[0], NUM_KV_HEADS, BLOCK_SIZE)
    slots = whole.common.slot_mapping[:40]
    reference.store(expected, slots, whole.key, whole.value, impl.layout)
    assert torch.equal(whole.cache, expected)
