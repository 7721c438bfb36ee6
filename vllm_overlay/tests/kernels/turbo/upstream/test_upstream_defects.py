# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Defects of vLLM's ``turboquant_*`` dtypes in results and allocations, as scenarios
that any packed dtype must pass.

Where the series mends vLLM's own code, both dtypes pass, and ``ultraquant_4bit``, which
succeeds TurboQuant and shares defects. Elsewhere vLLM's fails
strictly: once it is mended, the mark must be removed.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import turboquant_attn
from vllm.v1.attention.ops.turbo.layer import prefill_sources
from vllm.v1.attention.ops.turbo.layer.flash import FlashAttn
from vllm.v1.attention.ops.turbo.planning import prefill as prefill_plan
from vllm.v1.attention.ops.turbo.triton import prefill as triton_prefill
from vllm.v1.attention.ops.turbo.triton.kernels import TritonKernels
from vllm.v1.worker.workspace import lock_workspace

from ..backend_utils import make_vllm_config, set_path, with_drafts
from ..flash_utils import flash_attn_stand_in
from ..utils import DEVICE, FP16, ON_GPU, requires_triton
from .scene import (
    NUM_HEADS,
    OURS,
    THEIRS,
    Scene,
    all_packed,
    both,
    fails_upstream,
    make_impl,
    set_ultraquant_attention,
)


def attend(q, k, v, *, fa_version: int | None = None, **arguments) -> torch.Tensor:
    """FlashAttention's varlen function as TurboQuant calls it, in PyTorch."""
    out = torch.empty_like(q)
    return flash_attn_stand_in(q, k, v, out, return_softmax_lse=True, **arguments)[0]


def set_flash_attn(monkeypatch: pytest.MonkeyPatch, function) -> None:
    """Have TurboQuant take the path of GPUs, with ``function`` for FlashAttention."""
    monkeypatch.setattr(turboquant_attn, "_HAS_FLASH_ATTN", True)
    monkeypatch.setattr(
        turboquant_attn, "flash_attn_varlen_func", function, raising=False
    )


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ultraquant_attention(monkeypatch)
    if not ON_GPU:
        set_flash_attn(monkeypatch, attend)


@requires_triton
@all_packed
@pytest.mark.parametrize(
    "requests",
    [[(34, 0), (2, 32)], [(1, 9), (34, 0), (2, 32)]],
    ids=["prefills", "mixed"],
)
def test_prefix_beside_a_long_first_chunk(folder, flash_attn, name, requests):
    """The longest query is as long as the longest sequence, but another request of the
    batch has a prefix in the cache.
    """
    Scene(make_vllm_config(folder, name, FP16), requests).serve()


@requires_triton
@pytest.mark.parametrize("requests", [[(34, 0)], [(1, 9), (34, 0), (5, 0)]])
def test_first_chunks_alone_take_one_launch(folder, requests, monkeypatch):
    """First chunks are still one call in TurboQuant, after the repair of the above."""
    calls = []

    def count(*args, **arguments):
        calls.append(len(arguments["cu_seqlens_q"]) - 1)
        return attend(**arguments)

    set_flash_attn(monkeypatch, count)
    Scene(make_vllm_config(folder, THEIRS, FP16), requests).serve()
    assert calls == [sum(context == 0 for _, context in requests)]


@requires_triton
@all_packed
def test_drafts_by_lengths_of_the_device(folder, flash_attn, name):
    """The host does not know how many drafts of the last step were rejected."""
    config = with_drafts(make_vllm_config(folder, name, FP16))
    Scene(config, [(1, 64), (2, 31), (3, 14)]).serve(surplus=7)


@requires_triton
@both
def test_drafts_in_a_replayed_graph(folder, flash_attn, name):
    """A FULL graph of requests with drafts is captured with a dummy batch.

    A replay has new values in tensors on the device, but numbers that the host read
    stay.
    """
    config = with_drafts(make_vllm_config(folder, name, FP16))
    scene = Scene(config, [(3, 31), (3, 64)])
    builder = scene.make_builder()
    support = builder.get_cudagraph_support(config, scene.spec)
    if support.value < AttentionCGSupport.UNIFORM_BATCH.value:
        return  # vLLM captures no such batch.
    scene.store_contexts()
    dummy = scene.metadata()
    dummy.seq_lens.copy_(scene.query_lens)
    dummy.seq_lens_cpu_upper_bound = scene.query_lens.int()
    dummy.max_seq_len = config.model_config.max_model_len
    captured = builder.build_for_cudagraph_capture(dummy)
    captured.seq_lens.copy_(scene.seq_lens)
    scene.check(scene.run(captured))


def profile(scene: Scene, num_tokens: int) -> None:
    """Run the forward pass that profiles memory, before vLLM makes builders."""
    shape = (num_tokens, NUM_HEADS, scene.head_size)
    tokens = torch.empty(shape, dtype=FP16, device=DEVICE)
    scene.impl.forward(scene.layer, tokens, tokens, tokens, None, None, tokens)


@requires_triton
@fails_upstream(AssertionError)
def test_profile_run_takes_the_workspace(folder, workspace, name):
    """Memory that a step needs but the profile run does not take may be missing."""
    config = make_vllm_config(folder, name, FP16, max_num_batched_tokens=8)
    scene = Scene(config, [(1, 40)] * 4)
    if name == OURS and not ON_GPU:
        set_path(scene.impl, "triton")
    profile(scene, 8)
    lock_workspace()
    scene.serve()


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest new tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_new = not func.is_view and all(result is not x for x in args)
        if is_new and isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.nbytes)
        return result


class NoKernel:
    """A stand-in for kernels, called directly or with a grid."""

    def __call__(self, *args, **arguments) -> None:
        pass

    def __getitem__(self, grid) -> "NoKernel":
        return self


def attend_to_nothing(q, k, v, out=None, return_softmax_lse=False, **arguments):
    out = torch.zeros_like(q) if out is None else out.zero_()
    lse = torch.zeros(q.shape[1], q.shape[0], device=q.device)
    return (out, lse) if return_softmax_lse else out


@fails_upstream(AssertionError)
def test_chunk_allocates_nothing_of_its_contexts_size(
    folder, workspace, name, monkeypatch
):
    """A chunk allocates no tensor as long as its context, which no profile run could
    have taken. Kernels do nothing here, and the workspace is not counted.
    """
    monkeypatch.setattr(prefill_plan, "PIECE_BYTES", 2**14)
    set_flash_attn(monkeypatch, attend_to_nothing)
    for module, kernel in (
        (turboquant_attn, "triton_turboquant_store"),
        (turboquant_attn, "_tq_full_dequant_kv"),
        (triton_prefill, "gather_context"),
        (triton_prefill, "rotate_rows"),
        (prefill_sources, "merge_attn_states"),
    ):
        monkeypatch.setattr(module, kernel, NoKernel())
    config = make_vllm_config(folder, name, FP16, max_num_batched_tokens=160)
    largest = []
    for context in (800, 1600):
        scene = Scene(config, [(130, context)])
        if name == OURS:
            scene.impl.runner.kernels = TritonKernels(
                store=NoKernel(),
                decode_attention=NoKernel(),
                num_decode_splits=lambda *sizes: 1,
            )
            scene.impl.runner.flash_attn = FlashAttn(attend_to_nothing)
        metadata = scene.make_builder().build(0, scene.metadata())
        scene.run(metadata)  # takes the workspace
        with LargestTensor() as recorded:
            scene.run(metadata)
        largest.append(recorded.bytes)
    assert largest[0] == largest[1]


@requires_triton
@fails_upstream(RuntimeError)
@pytest.mark.parametrize("head_size", [80, 96])
def test_head_sizes_other_than_powers_of_two(folder, flash_attn, name, head_size):
    """The backend says that it supports these head sizes."""
    scene = Scene(make_vllm_config(folder, name, FP16), [(1, 40)], head_size)
    assert scene.backend.supports_head_size(head_size)
    scene.serve()


@fails_upstream(pytest.fail.Exception)
def test_alibi_is_not_dropped_in_silence(folder, name):
    """A feature that no kernel has raises an error."""
    config = make_vllm_config(folder, name, FP16)
    with pytest.raises((ValueError, NotImplementedError), match="does not support"):
        make_impl(config, alibi_slopes=[0.5] * NUM_HEADS)


@fails_upstream(TypeError, "https://github.com/vllm-project/vllm/pull/40108")
def test_layer_without_keys_and_values(folder, name):
    """A layer that shares the cache of another is served."""
    config = make_vllm_config(folder, name, FP16)
    scene = Scene(config, [(2, 32)])
    scene.impl = make_impl(config, kv_sharing_target_layer_name="layers.0.attn")
    metadata = scene.make_builder().build(0, scene.metadata())
    output = torch.zeros_like(scene.query)
    scene.impl.forward(
        scene.layer, scene.query, None, None, scene.cache, metadata, output
    )
