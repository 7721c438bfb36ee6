# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The backend: metadata of mixed batches, both forward paths, workspace."""

from pathlib import Path

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionBackend,
    TurboAttentionImpl,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.planning.decode import DecodePlanner
from vllm.v1.attention.ops.turbo.planning.prefill import PrefillPlanner
from vllm.v1.attention.ops.turbo.triton.kernels import TritonKernels
from vllm.v1.worker.workspace import current_workspace_manager, lock_workspace

from .backend_utils import (
    BATCHES,
    BLOCK_SIZE,
    HEAD_SIZE,
    KERNELS,
    NUM_HEADS,
    NUM_KV_HEADS,
    PADDING,
    Batch,
    all_batches,
    all_paths,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    set_path,
    set_scratch,
    with_drafts,
)
from .utils import (
    BF16,
    DEVICE,
    FP16,
    ON_GPU,
    new_cache,
    packings,
    requires_triton,
    slots_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@requires_triton
@all_batches
@prefill_modes
@pytest.mark.parametrize("path", ["torch", *KERNELS])
def test_batches(folder, requests, mode, path, monkeypatch):
    """Mixed batches, whose context is cut into pieces of 128 tokens."""
    set_scratch(monkeypatch, piece_tokens=128)
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    impl = make_impl(config)
    assert impl.runner.prefill_limits.piece_tokens == 128
    set_path(impl, path)
    batch = Batch.make(impl, requests)
    metadata = make_builder(config, impl).build(0, batch.common)
    num_decodes = sum(num_queries == 1 for num_queries, _ in requests)
    assert metadata.num_decodes == num_decodes
    num_extends = sum(each.num_requests for each in metadata.extends)
    assert (metadata.prefill is None) == (num_decodes + num_extends == len(requests))
    batch.check(impl, batch.run(impl, metadata, path))


@requires_triton
@packings
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
    # Like ``forward``, this takes the path that the tensors' device has.
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


@requires_triton
@kernel_paths
def test_padded_decodes(folder, path):
    """A CUDA graph of a larger batch pads with requests of length 0 and slot -1."""
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
    impl.forward(
        None, batch.query, batch.key, batch.value, batch.cache, metadata, output
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
    assert make_impl(config).runner.max_query_len == 3
    assert (
        builder.prefill_planner.limits.piece_tokens
        == impl.runner.prefill_limits.piece_tokens
    )
    assert TurboAttentionBackend.get_builder_cls() is TurboMetadataBuilder
    assert TurboAttentionBackend.get_impl_cls() is TurboAttentionImpl


@requires_triton
@prefill_modes
@pytest.mark.parametrize("num_drafts", [0, 2] if ON_GPU else [2])
@kernel_paths
@pytest.mark.usefixtures("workspace")
def test_profile_run_reserves_every_batch(folder, mode, num_drafts, path, monkeypatch):
    """The workspace must not grow after the profile run has measured memory."""
    set_scratch(monkeypatch, piece_tokens=48)
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
    impl.runner.num_sms = 4  # for several splits a sequence, on a CPU too
    set_path(impl, path)
    builder = make_builder(config, impl)
    output = torch.full((48, NUM_HEADS, HEAD_SIZE), 7.0, device=DEVICE)
    assert impl.forward(None, output, output, output, None, None, output) is output
    assert (output == 0).all()
    (reserved,) = current_workspace_manager()._current_workspaces
    assert reserved is not None
    # The workspace rounds each of its few parts up to a multiple of 256 bytes.
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert 0 <= reserved.numel() - impl.runner.workspace_bytes < 4 * 256
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


@requires_triton
@pytest.mark.usefixtures("workspace")
def test_profile_run_asks_the_chosen_kernels(folder, monkeypatch):
    """The chosen kernels say how many splits there are, and make their matrices."""
    set_scratch(monkeypatch, piece_tokens=8)
    config = make_vllm_config(
        folder, dtype=FP16, max_num_seqs=4, max_num_batched_tokens=8
    )
    impl = make_impl(config)
    made = []
    monkeypatch.setattr(
        TritonKernels, "make_matrices", lambda self, *args: made.append(args)
    )
    set_path(impl, "triton")
    impl.runner.kernels = TritonKernels(num_decode_splits=lambda *args: 64)
    builder = make_builder(config, impl)
    output = torch.empty(4, NUM_HEADS, HEAD_SIZE, device=DEVICE)
    impl.forward(None, output, output, output, None, None, output)
    assert made == [(HEAD_SIZE, output.device)]
    lock_workspace()
    batch = Batch.make(impl, [(1, 40)] * 4)
    metadata = builder.build(0, batch.common)
    batch.check(impl, batch.run(impl, metadata, "triton"))


@requires_triton
@kernel_paths
def test_batch_of_one_step_after_another(folder, path):
    """A sequence prefilled in two chunks and then decoded sees all its tokens."""
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
        impl.forward(None, q, k, v, whole.cache, metadata, output)
        outputs.append(output)
    whole.check(impl, torch.cat(outputs))
    expected = new_cache(
        impl.runner.layout, whole.cache.shape[0], NUM_KV_HEADS, BLOCK_SIZE
    )
    slots = whole.common.slot_mapping[:40]
    reference.store(
        StoreCall(expected, slots, whole.key, whole.value, impl.runner.layout)
    )
    assert torch.equal(whole.cache, expected)


@requires_triton
@prefill_modes
@kernel_paths
def test_forward_plans_nothing(folder, mode, path, monkeypatch):
    """The builder plans for each shape of layer; ``forward`` only allots scratch."""
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    impl = make_impl(config)
    set_path(impl, path)
    batch = Batch.make(impl, BATCHES["mixed"])
    metadata = make_builder(config, impl).build(0, batch.common)
    assert list(metadata.decode_plans) == [impl.runner.shape]
    assert metadata.decode_scratch == {}
    for name in ("plan", "_call", "_cuts"):
        monkeypatch.delattr(DecodePlanner, name)
    monkeypatch.delattr(PrefillPlanner, "plan")
    batch.check(impl, batch.run(impl, metadata, path))
    assert list(metadata.decode_scratch) == [impl.runner.shape]
