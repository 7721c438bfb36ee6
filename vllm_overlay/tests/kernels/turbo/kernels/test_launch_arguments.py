# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Arguments of CUDA's launches, tested without a GPU: Triton's kernels compute from the
same arguments, and the output must be right.
"""

from functools import partial
from typing import Any

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend_mma
from vllm.v1.attention.ops.turbo.cuda import family as cuda_family
from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda.family import Family
from vllm.v1.attention.ops.turbo.cuda.kernels import CudaKernels
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    DecodeBatch,
    KeyOffset,
    OffsetScores,
    Partials,
    RawTokens,
    RotatedQuery,
    StoreCall,
)

from ..attention_utils import attend_by, merge_call
from ..backend_utils import make_impl, make_vllm_config, prefill_modes, with_drafts
from ..batch_utils import Batch
from ..utils import DEVICE, FP16, requires_triton

pytestmark = requires_triton


def store(
    layout: TurboFormat,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_matrix: torch.Tensor,
    single_matrix: torch.Tensor,
    query_matrix: torch.Tensor,
    tables: torch.Tensor,
    query: torch.Tensor,
    rotated_query: torch.Tensor,
    query_scale: torch.Tensor,
    factor: float,
    key_offset: torch.Tensor | None,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *tuning: int,
) -> None:
    from vllm.v1.attention.ops.turbo.triton import store as triton_store

    scale = factor / LOG2_E / layout.key_codebook.gain
    rotated = RotatedQuery(rotated_query, query_scale)
    tokens = kv_cache, slot_mapping, key, value, layout
    call = StoreCall(*tokens, query, rotated, scale)
    if key_offset is not None:
        offset = KeyOffset(key_offset, seq_lens, query_start_loc)
        call = call._replace(key_offset=offset)
    triton_store.store(call)


def attend(
    layout: TurboFormat,
    rotated_query: torch.Tensor,
    query_scale: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    num_seqs: int,
    query_len: int,
    with_raw: bool,
    packed_lens: torch.Tensor | None,
    query: torch.Tensor,
    key_offset: torch.Tensor | None,
    factor: float,
    sliding_window: int,
    soft_cap: float,
    enable_pdl: bool,
) -> None:
    from vllm.v1.attention.ops.turbo.triton import decode as triton_decode

    assert packed_lens is None and enable_pdl
    # Only the merge reads them, which is left out.
    raw = RawTokens(rotated_query, kv_cache, kv_cache, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_decode, "launch_merge", lambda *args: None)
        # CUDA's merge gets all splits that there is room for.
        patch.setattr(
            triton_decode, "splits_of_window", lambda partials, *args: partials
        )
        attend_by(
            triton_decode.decode_attention,
            RotatedQuery(rotated_query, query_scale),
            kv_cache,
            layout,
            DecodeBatch(num_seqs, block_table, seq_lens, query_len, query_start_loc),
            Partials(partial_output, partial_lse),
            rotated_query,
            raw if with_raw else None,
            None
            if key_offset is None
            else OffsetScores(query, key_offset, factor / LOG2_E),
            sliding_window=sliding_window or None,
            soft_cap=soft_cap / LOG2_E or None,
        )


def merge(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_kv_heads: int,
    with_raw: bool,
    factor: float,
    query_start_loc: torch.Tensor | None,
    num_seqs: int,
    query_len: int,
    log2_warps: int,
    tail_pages: torch.Tensor | None,
    *others: Any,
) -> None:
    from vllm.v1.attention.ops.turbo.triton.merge import merge_splits

    assert tail_pages is None
    *_, sliding_window, sinks, soft_cap, lse, result, result_lse, enable_pdl = others
    assert enable_pdl and result is result_lse is None
    raw = RawTokens(query, key, value, factor / LOG2_E)
    no_table = torch.empty(0, 0, dtype=torch.int32, device=DEVICE)
    call = merge_call(
        DecodeBatch(num_seqs, no_table, seq_lens, query_len, query_start_loc),
        output,
        num_kv_heads,
        raw if with_raw else None,
        sliding_window=sliding_window or None,
        sinks=sinks,
        soft_cap=soft_cap / LOG2_E or None,
        lse=lse,
    )
    merge_splits(Partials(partial_output, partial_lse), call)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have CUDA's modules launch Triton's kernels; returns the names of loaded ones."""
    loaded = []
    functions = {"store": store, "decode": attend, "extend_mma": attend, "merge": merge}

    def load(family: Family, layout, *args):
        loaded.append(family.kernel)
        function = functions[family.kernel]
        return function if function is merge else partial(function, layout)

    monkeypatch.setattr(cuda_family, "load_instance", load)
    for module in (cuda_decode, extend_mma):
        monkeypatch.setattr(module, "capability_of", lambda device: None)
    monkeypatch.setattr(cuda_merge, "num_compute_units", lambda *args: 4)
    return loaded


@prefill_modes
@pytest.mark.parametrize(
    "requests",
    [[(1, 40), (1, 0)], [(3, 31), (1, 9), (5, 40)]],
    ids=["decodes", "ragged drafts and an extend"],
)
@pytest.mark.parametrize(
    "window, sinks, cap", [(None, None, None), (2, [0.0, 1.0, -20.0, 2.0], 0.5)]
)
def test_output_of_launches(folder, requests, mode, window, sinks, cap, launches):
    """Outputs are right, from views of one tensor, as models hand q, K and V over."""
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16, mode))
    if sinks is not None:
        sinks = torch.tensor(sinks, dtype=FP16, device=DEVICE)
    impl = make_impl(config, sliding_window=window, sinks=sinks, logits_soft_cap=cap)
    impl.runner.num_sms = 4
    # Renamed, because the check expects q in int8 from kernels named CUDA.
    impl.runner.kernels = CudaKernels()._replace(name="Triton")
    batch = Batch.make(impl, requests)
    qkv = torch.cat([batch.query, batch.key, batch.value], 1)
    heads = [impl.num_heads, impl.num_kv_heads, impl.num_kv_heads]
    batch.query, batch.key, batch.value = qkv.split(heads, 1)
    metadata = batch.build(config, impl)
    assert metadata.prefill is None
    batch.serve(impl, metadata)
    calls = [["decode", "merge"], ["extend_mma", "merge"]][: 1 + len(metadata.extends)]
    assert launches == ["store", *sum(calls, [])]
