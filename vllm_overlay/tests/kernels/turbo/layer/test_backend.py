# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The backend: metadata of mixed batches, both forward paths, workspace."""

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

from ..backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_KV_HEADS,
    all_paths,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    reserve,
    run_profile,
    set_scratch,
    with_drafts,
)
from ..batch_utils import (
    BATCHES,
    PADDING,
    Batch,
    all_batches,
    check_requests,
    make_common,
    pad_to_graph,
)
from ..utils import (
    DEVICE,
    FP16,
    ON_GPU,
    model_dtypes,
    new_cache,
    packings,
    requires_triton,
    slots_of,
)


@all_batches
@prefill_modes
@all_paths
def test_batches(folder, requests, mode, path, monkeypatch):
    """Mixed batches, whose context is cut into pieces of 128 tokens."""
    set_scratch(monkeypatch, piece_tokens=128)
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    impl = make_impl(config, path=path)
    assert impl.runner.prefill_limits.piece_tokens == 128
    batch = Batch.make(impl, requests)
    metadata = batch.build(config, impl)
    num_decodes = sum(num_queries == 1 for num_queries, _ in requests)
    assert metadata.num_decodes == num_decodes
    num_extends = sum(each.num_requests for each in metadata.extends)
    assert (metadata.prefill is None) == (num_decodes + num_extends == len(requests))
    batch.serve(impl, metadata)


@packings
@model_dtypes
@all_paths
def test_presets(folder, name, dtype, path):
    config = make_vllm_config(folder, name, dtype)
    impl = make_impl(config, path=path)
    check_requests(config, impl, BATCHES["mixed"])


@kernel_paths
def test_paths_store_the_same_bytes(folder, path):
    config = make_vllm_config(folder)
    impl = make_impl(config, path=path)
    caches = []
    for each in ("torch", path):
        batch = Batch.make(impl, BATCHES["mixed"])
        batch.run(impl, batch.build(config, impl), each)
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
    metadata = batch.build(config, impl)
    output = torch.full_like(batch.query, 7)
    result = impl.forward(
        None, batch.query, batch.key, batch.value, batch.cache, metadata, output
    )
    assert result is output
    num_tokens = batch.common.num_actual_tokens
    batch.check(impl, output[:num_tokens])
    expected = batch.run(impl, metadata, "auto" if ON_GPU else "torch")
    assert torch.equal(output[:num_tokens], expected)


@kernel_paths
def test_padded_decodes(folder, path):
    """A CUDA graph of a larger batch pads with requests of length 0 and slot -1."""
    config = make_vllm_config(folder)
    impl = make_impl(config, path=path)
    batch = Batch.make(impl, [(1, 31), (1, 64)])
    num_padded = 2 + PADDING
    padded = pad_to_graph(batch.common, num_padded, num_padded, query_len=1)
    metadata = make_builder(config, impl).build(0, padded)
    assert metadata.num_decodes == num_padded and metadata.prefill is None
    batch.check_padded(impl, metadata)


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
    with_drafts(config, num_drafts)
    impl = make_impl(config, path=path)
    impl.runner.num_sms = 4  # for several splits a sequence, on a CPU too
    builder = make_builder(config, impl)
    assert (run_profile(impl) == 0).all()
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
        batch.serve(impl, builder.build(0, batch.common))


@requires_triton
@pytest.mark.usefixtures("workspace")
def test_profile_run_asks_the_chosen_kernels(folder, monkeypatch):
    """The chosen kernels say how many splits there are, and make their matrices."""
    set_scratch(monkeypatch, piece_tokens=8)
    config = make_vllm_config(
        folder, dtype=FP16, max_num_seqs=4, max_num_batched_tokens=8
    )
    impl = make_impl(config, path="triton")
    made = []
    monkeypatch.setattr(
        TritonKernels, "make_matrices", lambda self, *args: made.append(args)
    )
    impl.runner.kernels = TritonKernels(num_decode_splits=lambda *args: 64)
    builder = make_builder(config, impl)
    reserve(impl)
    ((size, device),) = made
    assert size == HEAD_SIZE and device.type == DEVICE.type
    batch = Batch.make(impl, [(1, 40)] * 4)
    batch.serve(impl, builder.build(0, batch.common))


@kernel_paths
def test_batch_of_one_step_after_another(folder, path):
    """A sequence prefilled in two chunks and then decoded sees all its tokens."""
    config = make_vllm_config(folder, dtype=FP16, turbo_prefill="stored")
    impl = make_impl(config, path=path)
    builder = make_builder(config, impl)
    whole = Batch.make(impl, [(40, 0)])
    table = whole.common.block_table_tensor
    outputs = []
    for begin, end in ((0, 17), (17, 39), (39, 40)):
        slots = slots_of(table[0], begin, end, BLOCK_SIZE)
        common = make_common([end - begin], [end], table, slots)
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


@prefill_modes
@kernel_paths
def test_forward_plans_nothing(folder, mode, path, monkeypatch):
    """The builder plans for each shape of layer; ``forward`` only allots scratch."""
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    impl = make_impl(config, path=path)
    batch = Batch.make(impl, BATCHES["mixed"])
    metadata = batch.build(config, impl)
    assert list(metadata.decode_plans) == [impl.runner.shape]
    assert metadata.decode_scratch == {}
    for name in ("plan", "_call", "_cuts"):
        monkeypatch.delattr(DecodePlanner, name)
    monkeypatch.delattr(PrefillPlanner, "plan")
    batch.serve(impl, metadata)
    assert list(metadata.decode_scratch) == [impl.runner.shape]
