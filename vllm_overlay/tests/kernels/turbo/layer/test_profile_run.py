# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The scratch that the profile run reserves, apart from that of prefills, and batches
shared by layers with different numbers of query heads.
"""

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    AttentionCall,
    Partials,
    RotatedQuery,
)
from vllm.v1.attention.ops.turbo.layer import forward as layer_forward
from vllm.v1.attention.ops.turbo.layer import prefill_sources
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner
from vllm.v1.attention.ops.turbo.planning.extend_limits import (
    MAX_EXTEND_LEN,
    max_extend_len,
)
from vllm.v1.attention.ops.turbo.planning.scratch import PrefillScratch
from vllm.v1.attention.ops.turbo.triton import isolate
from vllm.v1.attention.ops.turbo.triton import prefill as triton_prefill
from vllm.v1.attention.ops.turbo.triton.kernels import TritonKernels
from vllm.v1.worker.workspace import current_workspace_manager

from .. import batch_utils
from ..backend_utils import (
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    register,
    reserve,
    set_scratch,
    with_drafts,
)
from ..batch_utils import Batch, check_requests
from ..flash_utils import NO_FLASH_ATTN, no_kernel
from ..utils import FP16, requires_triton

pytestmark = requires_triton

# Query heads of two layers of one cache group.
FEW, MANY = NUM_KV_HEADS, 8 * NUM_KV_HEADS


def check_scratch(query: RotatedQuery, call: AttentionCall, partials: Partials) -> None:
    """A stand-in for decode and extend attention: check that tensors have the layer's
    heads, and partial results have room for each query.
    """
    batch, output = call.batch, call.output
    num_tokens, num_heads, _ = output.shape
    assert query.vectors.shape == output.shape
    assert query.scale.shape == (num_tokens, num_heads)
    assert partials.output.shape[1:] == output.shape[1:]
    assert partials.lse.shape == partials.output.shape[:2]
    batch.check(num_tokens)
    assert partials.lse.shape[0] >= batch.num_query_slots > 0


def most_splits(*args: int) -> int:
    return MAX_KV_SPLITS


def without_kernels(
    impl: TurboAttentionImpl,
    path: str,
    with_extends: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> TurboAttentionImpl:
    """Have a layer divide its work as the path's kernels want, and launch none.

    With path "most" it divides work into as many splits as possible.
    """
    for name in ("gather_context", "rotate_rows"):
        monkeypatch.setattr(triton_prefill, name, no_kernel)
    monkeypatch.setattr(isolate, "isolate_broken_values", no_kernel)
    monkeypatch.setattr(prefill_sources, "merge_attn_states", no_kernel)
    monkeypatch.setattr(batch_utils, "fill_cache", no_kernel)
    if path == "cuda":
        chosen = kernels.cuda_kernels(impl.runner.layout)
    else:
        chosen = kernels.triton_kernels()
    if path == "most":
        chosen = chosen._replace(num_decode_splits=most_splits)
    impl.runner.kernels = chosen._replace(
        store=no_kernel,
        decode_attention=check_scratch,
        extend_attention=check_scratch if with_extends else None,
        num_extend_splits=most_splits if path == "most" else chosen.num_extend_splits,
    )
    monkeypatch.setattr(type(chosen), "make_matrices", no_kernel)
    impl.runner.num_sms = 4
    return impl


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("with_extends", [False, True])
@pytest.mark.parametrize("path", ["triton", "cuda", "most"])
def test_every_batch_of_decodes_and_extends(
    folder, path, with_extends, num_drafts, workspace, monkeypatch
):
    """Decodes and extends fit the reserved scratch, even without prefills' scratch."""
    max_num_seqs, longest = 12, MAX_EXTEND_LEN
    config = make_vllm_config(folder, "turbo4", FP16, "raw", max_num_seqs, 1024)
    with_drafts(config, num_drafts)
    impl = without_kernels(make_impl(config), path, with_extends, monkeypatch)
    impl.runner.flash_attn = NO_FLASH_ATTN
    monkeypatch.setattr(layer_forward, "prefill_attention", no_kernel)
    monkeypatch.setattr(PrefillScratch, "specs", staticmethod(lambda *args: []))
    reserve(impl)
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
            batch.run(impl, built)


@pytest.mark.parametrize("num_seqs", [16, 24, 128])
def test_the_most_extends(folder, num_seqs, workspace, monkeypatch):
    """A step with the most extends fits the reserved scratch.

    The extends have 128 tokens each, and calls have the most partial results.
    """
    num_tokens = num_seqs * 128
    set_scratch(monkeypatch, partials=1024)
    config = make_vllm_config(folder, "turbo4", FP16, "stored", num_seqs, num_tokens)
    impl = without_kernels(make_impl(config), "most", True, monkeypatch)
    impl.runner.flash_attn = NO_FLASH_ATTN
    monkeypatch.setattr(layer_forward, "prefill_attention", no_kernel)
    monkeypatch.setattr(layer_runner, "max_extend_len", lambda *_: 128)
    monkeypatch.setattr(PrefillScratch, "specs", staticmethod(lambda *args: []))
    reserve(impl)
    batch = Batch.make(impl, [(128, 8)] * num_seqs)
    built = batch.build(config, impl)
    assert built.prefill is None and built.num_packed_tokens == num_tokens
    batch.run(impl, built)
    (plan,) = built.decode_plans.values()
    assert len(plan.calls) == num_seqs // 2 and plan.num_partials == 1024
    for call in plan.calls:
        first, tokens = call.first_request, call.tokens
        assert (tokens.start, tokens.stop) == (128 * first, 128 * first + 256)
        assert call.batch.query_start_loc.tolist() == [0, 128, 256]
        assert torch.equal(call.batch.block_table[:2], batch.table[first : first + 2])


def make_shared_builder(
    config: VllmConfig, impls: list[TurboAttentionImpl]
) -> TurboMetadataBuilder:
    """A builder for several layers, as vLLM makes for a cache group."""
    names = [f"layers.{index}.attn" for index in range(len(impls))]
    for name, impl in zip(names, impls):
        register(config, impl, name)
    return make_builder(config, impls[0], names)


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
        impl.runner.flash_attn = NO_FLASH_ATTN
    monkeypatch.setattr(layer_runner, "max_extend_len", lambda *_: 4)
    builder = make_shared_builder(config, impls)
    reserve(*impls)
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
            batch.run(impl, built)


@kernel_paths
def test_unlike_layers_share_a_batch(folder, path, workspace):
    """Each of two unlike layers takes scratch of its own size for a shared batch.

    The workspace has room for both. If the second took the first one's sizes, its
    splits would overlap.
    """
    config = make_vllm_config(folder, "turbo4", FP16)
    impls = [make_impl(config, num_heads, path=path) for num_heads in (FEW, MANY)]
    current_workspace_manager().get_simultaneous(((2**20,), torch.uint8))
    builder = make_shared_builder(config, impls)
    batches = [Batch.make(impl, [(1, 150)]) for impl in impls]
    built = builder.build(0, batches[0].common)
    for impl, batch in zip(impls, batches):
        batch.serve(impl, built)


def test_longest_extend_of_unlike_layers(folder):
    """The longest extend is one that the kernels of all layers serve."""
    config = make_vllm_config(folder)
    impls = [make_impl(config, num_heads) for num_heads in (FEW, MANY)]
    for impl in impls:
        impl.runner.kernels = TritonKernels(extend_attention=check_scratch)
        impl.runner.capability = None  # nothing was measured
    common = Batch.make(impls[0], [(32, 40), (33, 40)]).common
    built = make_shared_builder(config, impls).build(0, common)
    assert max_extend_len(HEAD_SIZE, MANY // NUM_KV_HEADS) == 32
    assert [each.num_tokens for each in built.extends] == [32]
    assert built.prefill is not None


@kernel_paths
def test_stored_tokens_fit_a_piece(folder, path, monkeypatch):
    """A slice's own tokens are dequantised at once. Fewer fit if there are as many KV
    heads as query heads.
    """
    set_scratch(monkeypatch, slice_tokens=32, piece_tokens=32)
    config = make_vllm_config(folder, "turbo4", FP16, "stored")
    impl = make_impl(config, NUM_HEADS, NUM_HEADS, path=path)
    # Extends have no slices.
    kernels = impl.runner.kernels
    impl.runner.kernels = kernels._replace(extend_attention=None)
    built = check_requests(config, impl, [(20, 9)])
    assert built.prefill is not None
