# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first run of a layer's kernels, in the profile run."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from vllm.v1.attention.ops.turbo.choose import triton_kernels
from vllm.v1.attention.ops.turbo.layer import launching
from vllm.v1.attention.ops.turbo.layer import warm_up as module
from vllm.v1.attention.ops.turbo.layer.flash import FlashAttn
from vllm.v1.attention.ops.turbo.layer.warm_up import small_step
from vllm.v1.attention.ops.turbo.triton import store as triton_store

from ..backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    run_profile,
    with_drafts,
)
from ..batch_utils import Batch
from ..triton_variants import RecordedVariants, compiled_variants
from ..utils import DEVICE, FP16, ON_GPU, requires_triton


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, workspace: None) -> None:
    """The workspace as in the profile run, and nothing is warm."""
    monkeypatch.setattr(launching, "_warm", set())


def profile(impl, monkeypatch: pytest.MonkeyPatch) -> list:
    """Run the profile run of a layer; return the batches that it ran."""
    batches = []
    forward = module.forward

    def record(runner, query, key, value, cache, step, output, tail=None):
        batches.append(step)
        forward(runner, query, key, value, cache, step, output, tail)
        assert (output == 0).all()  # because values are zero

    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", record)
        run_profile(impl)
    return batches


@kernel_paths
@pytest.mark.parametrize("window", [None, 128])
def test_images(folder, profiled, path, window, monkeypatch):
    """Tokens of images have a FlashAttention kernel of their own, which is warm."""
    config = make_vllm_config(folder, "turbo4", FP16)
    impl = make_impl(config, sliding_window=window, path=path)
    impl.runner.has_spans = True
    sizes = []
    flash_attn = impl.runner.flash_attn

    def record(*args, window_size=None, **kwargs):
        sizes.append(window_size)
        options = {} if window_size is None else {"window_size": window_size}
        return flash_attn.function(*args, **kwargs, **options)

    impl.runner.flash_attn = FlashAttn(record)
    batches = profile(impl, monkeypatch)
    assert sizes.count([0, -1]) == len(batches) > 0


@kernel_paths
def test_shared_caches(folder, profiled, path, monkeypatch):
    """A layer that shares a cache warms up without K and V; its target with them."""
    config = make_vllm_config(folder, "turbo4", FP16)
    for target in (None, "layers.0.attn"):
        impl = make_impl(config, path=path, kv_sharing_target_layer_name=target)
        keys = []
        forward = module.forward

        def record(runner, query, key, *args, forward=forward, keys=keys):
            keys.append(key)
            forward(runner, query, key, *args)

        with monkeypatch.context() as patch:
            patch.setattr(module, "forward", record)
            batches = profile(impl, monkeypatch)
        assert len(keys) == len(batches) > 0
        assert {key is None for key in keys} == {impl.runner.shares_cache}


@prefill_modes
@kernel_paths
def test_layers_alike_run_once(folder, profiled, mode, path, monkeypatch):
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16, mode), 2)
    layers = [make_impl(config, path=path) for _ in range(2)]
    first, second = (profile(impl, monkeypatch) for impl in layers)
    runner = layers[0].runner
    merged_lens, output_lens = [], []
    if runner.kernels.extend_attention is not None:
        merged_lens = [1, runner.max_extend_len]
    if runner.extends_to_outputs:
        group = NUM_HEADS // NUM_KV_HEADS
        sizes = runner.layout, group, runner.max_extend_len
        output_lens = runner.kernels.output_lens(*sizes)
    num_extends = len(merged_lens) + len(output_lens)
    num_prefills = 3  # of lengths that a step of 128 tokens has room for
    lens = [1] * num_prefills + [3, 3] + [1] * num_extends
    assert [batch.decode_query_len for batch in first] == lens and second == []
    assert [batch.decode_start_loc is None for batch in first] == [
        *[True] * num_prefills,
        *(True, False),
        *[True] * num_extends,
    ]
    for batch in first:
        assert batch.num_decodes == 1 and len(batch.prefill.slices[0].cached) == 2
    extends = [each.query_len for batch in first for each in batch.extends]
    assert extends == merged_lens + output_lens
    other = make_impl(make_vllm_config(folder, "turbo3", FP16, mode), path=path)
    assert len(profile(other, monkeypatch)) == num_prefills + len(merged_lens)


@requires_triton
@prefill_modes
@pytest.mark.parametrize("max_num_tokens", [512, 8192])
def test_a_prefill_fills_the_gpu(folder, mode, max_num_tokens, monkeypatch):
    """A prefill that fills the GPU: FlashAttention launches another kernel for it."""
    monkeypatch.setattr(module, "_FLASH_ATTN_QUERIES", 192)
    config = make_vllm_config(
        folder, "turbo4", FP16, mode, max_num_batched_tokens=max_num_tokens
    )
    runner = make_impl(config).runner
    runner.kernels = triton_kernels()
    runner.num_sms = 132
    step = module.steps(runner, BLOCK_SIZE, DEVICE)[-1]
    most = max(part.queries.max_len for part in step.prefill.slices if part.cached)
    wanted = 132 * 192 // NUM_HEADS
    # A decode and two prefills of two tokens are beside it.
    assert step.num_actual_tokens == min(wanted + 5, max_num_tokens)
    assert most == min(wanted, max_num_tokens - 5, runner.prefill_limits.slice_tokens)


@requires_triton
@prefill_modes
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_batch_is_as_the_builder_makes_it(folder, mode, num_drafts):
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    config = with_drafts(config, num_drafts)
    impl = make_impl(config)
    impl.runner.kernels = triton_kernels()
    query_len = 1 + num_drafts
    # The prefills are longer than a decode, or they would be decodes.
    requests = [(query_len, 16), *((2 + num_drafts, length) for length in (32, 16, 0))]
    builder = make_builder(config, impl)
    limits = builder.prefill_planner.limits._replace(piece_tokens=16)
    builder.prefill_planner = builder.prefill_planner._replace(limits=limits)
    wanted = builder.build(0, Batch.make(impl, requests).common)
    found = small_step(impl.runner, BLOCK_SIZE, DEVICE, query_len)
    for name in ("num_decodes", "num_decode_tokens", "decode_query_len", "extends"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("slot_mapping", "seq_lens", "block_table"):
        tensors = getattr(found, name), getattr(wanted, name)
        assert tensors[0].dtype == tensors[1].dtype, name
        assert tensors[0].ndim == tensors[1].ndim, name
    pages = found.slot_mapping // BLOCK_SIZE
    assert found.slot_mapping.unique().numel() == found.num_actual_tokens
    assert torch.isin(pages, found.block_table).all()
    assert found.prefill is not None and wanted.prefill is not None
    kinds = [
        [(part.raw is None, len(part.cached)) for part in prefill.slices]
        for prefill in (found.prefill, wanted.prefill)
    ]
    assert kinds[0] == kinds[1]


# (query length, context length) of requests. With two drafts at most, the first four
# batches have decodes only.
VARIED = {
    "decodes": [(1, 31), (1, 0), (1, 95)],
    "drafts": [(3, 40), (3, 64)],
    "fewer drafts": [(2, 40), (2, 64)],
    "ragged drafts": [(3, 31), (1, 0), (2, 95)],
    "prefix hits": [(5, 64), (9, 33), (4, 31)],
    "chunks": [(1, 9), (40, 64), (33, 0), (20, 0)],
    "a chunk": [(64, 64)],
}


@kernel_paths
@pytest.mark.parametrize("with_means", [False, True])
@pytest.mark.parametrize(
    "cache_dtype, block_size, mode",
    [("turbo3", 48, "raw"), ("turbo4", 64, "raw"), ("turbo4", 48, "stored")],
)
def test_serving_compiles_nothing(
    folder, profiled, path, cache_dtype, block_size, mode, with_means, monkeypatch
):
    """Serving compiles no variant, for any lengths, widths of the block table and block
    sizes. The profile run may know another block size.
    """
    # So many tokens that not all are slices from a batch's beginning.
    monkeypatch.setattr(triton_store, "SMALL_BATCH", 64)
    variants = compiled_variants if ON_GPU else RecordedVariants(monkeypatch)
    config = make_vllm_config(folder, cache_dtype, FP16, mode)
    if block_size == 64:
        # A block has whole steps of the decode kernel; the other block size cuts them.
        config.cache_config.block_size = 128
    offset = direction = None
    if with_means:
        offset = torch.ones(3, NUM_KV_HEADS, HEAD_SIZE, device=DEVICE)
        direction = offset.half()
    impl = make_impl(
        with_drafts(config, 2), path=path, key_offset=offset, query_direction=direction
    )
    run_profile(impl)
    warm = variants()
    assert warm
    builder = make_builder(config, impl)
    for requests in VARIED.values():
        batch = Batch.make(impl, requests, block_size)
        table = batch.common.block_table_tensor
        wide = torch.zeros(len(requests), 67, dtype=torch.int32, device=DEVICE)
        wide[:, : table.shape[1]] = table
        common = batch.common.replace(block_table_tensor=wide)
        batch.run(impl, builder.build(0, common))
    assert variants() - warm == set()


def launched_flash_attention(run: Callable[[], None]) -> set[str]:
    """Names of FlashAttention's kernels that a function runs on the GPU."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profiler:
        run()
        torch.accelerator.synchronize()
    return {event.name for event in profiler.events() if "flash" in event.name.lower()}


# Batches that FlashAttention 3 splits and does not split, with few queries and many.
LONG = {
    "prefix hits": [(20, 1500), (100, 1500)],
    "a short suffix": [(70, 1900)],
    "few cached tokens": [(20, 40), (100, 40), (400, 300)],
    "prompts": [(700, 0), (30, 0)],
    "a prompt": [(1000, 0)],
    "a chunk": [(1000, 1000)],
}


@pytest.mark.skipif(not ON_GPU, reason="only GPUs run FlashAttention")
@prefill_modes
@pytest.mark.parametrize("num_heads", [4, 32])
def test_serving_loads_no_flash_attention(folder, profiled, mode, num_heads):
    """Serving loads no kernel: the driver would take memory that was not profiled."""
    config = make_vllm_config(folder, "turbo4", FP16, mode, max_num_batched_tokens=8192)
    impl = make_impl(config, num_heads)
    warm = launched_flash_attention(partial(run_profile, impl))
    assert warm
    builder = make_builder(config, impl)
    for name, requests in LONG.items():
        batch = Batch.make(impl, requests)
        metadata = builder.build(0, batch.common)
        serve = partial(batch.run, impl, metadata, "CUDA")
        assert launched_flash_attention(serve) <= warm, name
