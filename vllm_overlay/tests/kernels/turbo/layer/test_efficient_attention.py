# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""PyTorch's memory-efficient attention, as prefill calls it for heads of 512, and
FlashAttention 4 where vLLM has it.

A CPU has no such operator: a stand-in in plain PyTorch returns the same.
"""

import math
from functools import partial

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.interface import Scoring
from vllm.v1.attention.ops.turbo.layer import flash
from vllm.v1.attention.ops.turbo.layer.efficient_attention import efficient_attention
from vllm.v1.attention.ops.turbo.planning.tokens import SeqLens

from ..flash_utils import FLASH_ATTN, flash_attn_of_gpu
from ..utils import BF16, DEVICE, ON_GPU, gaussian, model_dtypes

# The operator pads the LSE of each sequence to a multiple of this.
LSE_TILE = 32
EFFICIENT = flash.FlashAttn(efficient_attention, is_efficient=True)


def operator_stand_in(
    query,
    key,
    value,
    bias,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    custom_mask_type,
    compute_log_sumexp,
    *,
    scale,
):
    """A stand-in for aten::_efficient_attention_forward, with NaN in unused rows."""
    assert bias is None and dropout_p == 0 and compute_log_sumexp
    assert custom_mask_type in (0, 2) and query.shape[2] == key.shape[2]
    output = torch.full_like(query, math.nan)
    num_sequences = cu_seqlens_q.numel() - 1
    rows = -(-max_seqlen_q // LSE_TILE) * LSE_TILE
    lse = torch.full((num_sequences, query.shape[2], rows), math.nan)
    for i in range(num_sequences):
        queries, keys = (
            slice(*x[i : i + 2].tolist()) for x in (cu_seqlens_q, cu_seqlens_k)
        )
        if keys.start == keys.stop:
            continue
        result, own = reference.attention(
            query[0, queries].float(),
            key[0, keys].float(),
            value[0, keys].float(),
            scale,
            custom_mask_type == 2,
        )
        output[0, queries] = result.to(output.dtype)
        lse[i, :, : own.shape[0]] = own.T
    return output, lse, None, None, max_seqlen_q, max_seqlen_k


@pytest.fixture(autouse=True)
def operator(monkeypatch):
    if not ON_GPU:
        name = "_efficient_attention_forward"
        monkeypatch.setattr(torch.ops.aten, name, operator_stand_in)


@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("version", [None, 2, 3, 4])
def test_heads_that_it_serves(monkeypatch, version, is_cuda):
    """The operator serves heads of 512 on NVIDIA GPUs without FlashAttention 4."""
    monkeypatch.setattr(current_platform, "is_cuda", lambda: is_cuda)
    monkeypatch.setattr(current_platform, "is_rocm", lambda: False)
    monkeypatch.setattr(flash, "is_flash_attn_varlen_func_available", lambda: True)
    monkeypatch.setattr(flash, "get_flash_attn_version", lambda head_size: version)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", print, raising=False)
    without = EFFICIENT if is_cuda else None
    for head_size in (256, 512):
        found = flash.get_flash_attn(head_size)
        if version is None or (head_size == 512 and version < 4):
            assert found == (without if head_size == 512 else None)
        else:
            assert not found.is_efficient and isinstance(found.function, partial)
            assert found.function.func is print
            assert found.function.keywords == {"fa_version": version}
    monkeypatch.setattr(flash, "is_flash_attn_varlen_func_available", lambda: False)
    assert flash.get_flash_attn(256) is None
    assert flash.get_flash_attn(512) == without


def flash_attn_4():
    """FlashAttention 4, if prefill calls it for heads of 512; otherwise skip."""
    found = flash_attn_of_gpu(512)
    if found is None or found.is_efficient:
        pytest.skip("vLLM has no FlashAttention 4 for heads of 512 here")
    return found


# Numbers of queries and of keys of each sequence.
LENGTHS = {
    "one": ([40], [40]),
    "chunks": ([3, 70, 1, 33], [3, 70, 1, 33]),
    "contexts": ([3, 70, 1, 33], [300, 0, 41, 7]),
    "behind": ([3, 70, 1, 33], [20, 70, 100, 64]),
}


@model_dtypes
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("served", ["operator", "flash_attn_4"])
def test_equals_flash_attention(served, lengths, group, dtype):
    """Output and LSE are equal, also from views and for sequences without keys."""
    tested = EFFICIENT if served == "operator" else flash_attn_4()
    query_lens, key_lens = LENGTHS[lengths]
    causal = lengths != "contexts"
    num_kv_heads, size = 2, 512
    query = gaussian(sum(query_lens), 4 * group, size, dtype=dtype, seed=1)
    query = query[:, : num_kv_heads * group]
    qkv = gaussian(sum(key_lens), 2 * num_kv_heads + 1, size, dtype=dtype, seed=2)
    bounds = [
        torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
        for lens in (query_lens, key_lens)
    ]
    results = []
    for flash_attn in (tested, FLASH_ATTN):
        out = torch.full_like(query, math.nan)
        key, value = qkv[:, :num_kv_heads], qkv[:, num_kv_heads:-1]
        lens = [
            SeqLens(cu_lens, max(own), sum(own))
            for cu_lens, own in zip(bounds, (query_lens, key_lens))
        ]
        scoring = Scoring(size**-0.5)
        lse = flash_attn.attend(query, key, value, out, *lens, scoring, causal=causal)
        results.append((out, lse))
    (output, lse), (expected, expected_lse) = results
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(output, expected, rtol=rounding, atol=2 * rounding)
    has_keys = ~expected_lse.isinf()
    assert (lse[~has_keys] == -math.inf).all()
    torch.testing.assert_close(
        lse[has_keys], expected_lse[has_keys], rtol=0, atol=2 * rounding
    )


@pytest.mark.skipif(not ON_GPU, reason="reads the statistics of CUDA's allocator")
@pytest.mark.parametrize("group", [1, 8])
def test_memory_beside_the_output(group):
    """At most 8 MiB a KV head, for the lengths that need most."""
    num_kv_heads, size, lens = 2, 512, [2] * 512 + [1024]
    num_tokens = sum(lens)
    query = gaussian(num_tokens, num_kv_heads * group, size, dtype=BF16, seed=1)
    key = gaussian(num_tokens, num_kv_heads, size, dtype=BF16, seed=2)
    bounds = torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
    out = torch.empty_like(query)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    own = SeqLens(bounds, max(lens), num_tokens)
    efficient_attention(query, key, key, out, own, own, 1.0)
    taken = torch.accelerator.max_memory_allocated() - before
    assert taken <= (8 * num_kv_heads + 1) * 2**20, taken
