# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the profile run reserves, where the scratch of prefills hides nothing, and
batches that several layers with different numbers of query heads share.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import kernel_choice as kernels
from vllm.v1.attention.ops.turbo import metadata, prefill
from vllm.v1.attention.ops.turbo.interface import MAX_KV_SPLITS, count_sequences
from vllm.v1.attention.ops.turbo.triton import prefill as triton_prefill
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    init_workspace_manager,
    lock_workspace,
    reset_workspace_manager,
)

from . import backend_utils
from .backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    Batch,
    add_layer,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    set_path,
    set_scratch,
    with_drafts,
)
from .utils import DEVICE, FP16, ON_GPU, cache_spec, requires_triton

pytestmark = requires_triton

# Query heads of two layers of one cache group.
FEW, MANY = NUM_KV_HEADS, 8 * NUM_KV_HEADS
LAYERS = {"few": FEW, "many": MANY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not ON_GPU:
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    init_workspace_manager(DEVICE)
    yield
    reset_workspace_manager()


def profile(*impls: TurboAttentionImpl) -> None:
    """The profile run of some layers, after which no workspace may grow."""
    for impl in impls:
        shape = (1, impl.num_heads, HEAD_SIZE)
        tokens = torch.zeros(shape, dtype=impl.dtype, device=DEVICE)
        impl.forward(None, tokens, tokens, tokens, None, None, tokens)
    lock_workspace()


def no_kernel(*args, **arguments) -> None:
    """In place of kernels, where only what they are given counts."""


def no_flash_attn(q, **arguments):
    return arguments["out"], torch.zeros(q.shape[1], q.shape[0], device=q.device)


def check_scratch(
    rotated_query: torch.Tensor,
    query_scale: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: object,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
    newest: object,
    query_len: int,
    query_start_loc: torch.Tensor | None,
) -> None:
    """In place of decode and extend attention: all have the heads of the layer, and
    there is room for a result of each query.
    """
    num_tokens, num_heads, _ = output.shape
    assert rotated_query.shape == output.shape
    assert query_scale.shape == (num_tokens, num_heads)
    assert partial.shape[1:] == output.shape[1:]
    assert partial_lse.shape == partial.shape[:2]
    num_seqs = count_sequences(num_tokens, query_len, query_start_loc)
    assert partial.shape[0] >= num_seqs * query_len > 0


def most_splits(*args: int) -> int:
    return MAX_KV_SPLITS


def without_kernels(
    impl: TurboAttentionImpl,
    path: str,
    with_extends: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> TurboAttentionImpl:
    """Have a layer divide its work as the path's kernels ask for, or as finely as any
    may ("most"), and launch none.
    """
    for name in ("gather_context", "rotate_rows", "isolate_broken_values"):
        monkeypatch.setattr(triton_prefill, name, no_kernel)
    monkeypatch.setattr(prefill, "merge_attn_states", no_kernel)
    monkeypatch.setattr(backend_utils, "fill_cache", no_kernel)
    if path == "most":
        chosen = kernels.triton_kernels()._replace(num_kv_splits=most_splits)
    else:
        chosen = getattr(kernels, f"{path}_kernels")()
    impl.kernels = chosen._replace(
        store=no_kernel,
        decode_attention=check_scratch,
        extend_attention=check_scratch if with_extends else None,
        num_extend_splits=chosen.num_extend_splits or chosen.num_kv_splits,
        make_matrices=no_kernel,
    )
    impl.num_sms = 4
    return impl


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("with_extends", [False, True])
@pytest.mark.parametrize("path", ["triton", "cuda", "most"])
def test_every_batch_of_decodes_and_extends(
    folder, path, with_extends, num_drafts, workspace, monkeypatch
):
    """They take no more than the profile run has reserved, prefills aside."""
    max_num_seqs, longest = 12, kernels.MAX_EXTEND_LEN
    config = make_vllm_config(folder, "turbo4", FP16, "raw", max_num_seqs, 1024)
    if num_drafts:
        with_drafts(config, num_drafts)
    impl = without_kernels(make_impl(config), path, with_extends, monkeypatch)
    impl.flash_attn = None
    profile(impl)
    builder = make_builder(config, impl)
    of_decodes = num_drafts + 1
    lengths = [*range(1, of_decodes + 1), of_decodes + 1, 16, longest]
    for num_seqs in range(1, max_num_seqs + 1):
        batches = [[(length, 40)] * num_seqs for length in lengths]
        batches.append([(of_decodes, 40)] * (num_seqs - 1) + [(longest, 40)])
        for requests in batches:
            if not with_extends and requests[-1][0] > of_decodes:
                continue
            batch = Batch.make(impl, requests)
            built = builder.build(0, batch.common)
            assert built.prefill is None
            batch.run(impl, built, "kernels")


def make_shared_builder(config: VllmConfig) -> TurboMetadataBuilder:
    """One for layers of both kinds, as vLLM has for a cache group."""
    for name, num_heads in LAYERS.items():
        add_layer(config, name, num_heads)
    spec = cache_spec(make_impl(config).layout, NUM_KV_HEADS, BLOCK_SIZE)
    return TurboMetadataBuilder(spec, list(LAYERS), config, DEVICE)


@prefill_modes
@pytest.mark.parametrize("order", [(FEW, MANY), (MANY, FEW)], ids=["few", "many"])
def test_scratch_of_unlike_layers(folder, order, mode, workspace, monkeypatch):
    """Batches of all kinds, planned once, fit the scratch of each layer."""
    set_scratch(monkeypatch, partials=8, slice_tokens=32, piece_tokens=32)
    config = make_vllm_config(folder, "turbo4", FP16, mode, 4, 64)
    impls = [
        without_kernels(make_impl(config, num_heads), "cuda", True, monkeypatch)
        for num_heads in order
    ]
    for impl in impls:
        impl.flash_attn = no_flash_attn
    builder = make_shared_builder(config)
    builder.max_extend_len = 4
    profile(*impls)
    for requests in (
        [(1, 40)],
        [(1, 40), (1, 9), (4, 40), (3, 33)],
        [(64, 0)],
        [(1, 40), (4, 40), (59, 33)],
        [(1, 40), (20, 33), (20, 0), (23, 70)],
    ):
        batches = [Batch.make(impl, requests) for impl in impls]
        built = builder.build(0, batches[0].common)
        for impl, batch in zip(impls, batches):
            batch.run(impl, built, "kernels")


@kernel_paths
def test_unlike_layers_share_a_batch(folder, path, workspace):
    """The second takes more scratch than the first, in a workspace that is large
    enough for both: were it to take the first's, its splits would overlap.
    """
    config = make_vllm_config(folder, "turbo4", FP16)
    impls = [make_impl(config, num_heads) for num_heads in (FEW, MANY)]
    for impl in impls:
        set_path(impl, path)
    current_workspace_manager().get_simultaneous(((2**20,), torch.uint8))
    builder = make_shared_builder(config)
    batches = [Batch.make(impl, [(1, 150)]) for impl in impls]
    built = builder.build(0, batches[0].common)
    for impl, batch in zip(impls, batches):
        batch.check(impl, batch.run(impl, built, path))


def test_longest_extend_of_unlike_layers(folder, monkeypatch):
    """It is one that the kernels of all layers take."""
    chosen = kernels.triton_kernels()._replace(extend_attention=check_scratch)
    shared = kernels.ChosenKernels(chosen)
    monkeypatch.setattr(metadata, "share_kernels", lambda *args: shared)
    config = make_vllm_config(folder)
    common = Batch.make(make_impl(config), [(24, 40), (25, 40)]).common
    with monkeypatch.context() as patch:
        for name, num_heads in LAYERS.items():
            add_layer(config, name, num_heads)
        spec = cache_spec(make_impl(config).layout, NUM_KV_HEADS, BLOCK_SIZE)
        patch.setattr(current_platform, "is_cpu", lambda: False)
        builder = TurboMetadataBuilder(spec, list(LAYERS), config, DEVICE)
    built = builder.build(0, common)
    assert kernels.max_extend_len(MANY // NUM_KV_HEADS) == 24
    assert [each.num_tokens for each in built.extends] == [24]
    assert built.prefill is not None


@kernel_paths
def test_stored_tokens_fit_a_piece(folder, path, monkeypatch):
    """A slice's own tokens are dequantised at once. With as many KV heads as query
    heads, fewer of them fit than without.
    """
    set_scratch(monkeypatch, slice_tokens=32, piece_tokens=32)
    config = make_vllm_config(folder, "turbo4", FP16, "stored")
    impl = make_impl(config, NUM_HEADS, NUM_HEADS)
    set_path(impl, path)
    batch = Batch.make(impl, [(20, 9)])
    built = make_builder(config, impl).build(0, batch.common)
    assert built.prefill is not None
    batch.check(impl, batch.run(impl, built, path))
