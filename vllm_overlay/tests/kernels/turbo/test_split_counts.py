# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Splits of a sequence that the CUDA kernels have room for: enough to keep the GPU
busy, and no more than they can use.
"""

from itertools import product

import pytest

from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend as cuda_extend
from vllm.v1.attention.ops.turbo.interface import MAX_KV_SPLITS

# Multiprocessors, KV heads, sequences, query tokens of each.
CASES = list(product((40, 80, 132), (1, 2, 8), (1, 3, 32, 256, 1024), (1, 4, 8)))
# Splits of all query tokens that are no burden, whatever the batch.
FEW = 4096
# Teams of warps that a multiprocessor holds at most, each with a range of its own.
TEAMS = 4

all_kernels = pytest.mark.parametrize(
    "kernel", [cuda_decode, cuda_extend], ids=["decode", "extend"]
)


@all_kernels
def test_a_long_sequence_can_have_every_multiprocessor(kernel):
    """Alone, or beside others that are short, if there are few of them."""
    for num_sms, num_kv_heads, num_seqs, query_len in CASES:
        splits = kernel.num_kv_splits(num_seqs, num_kv_heads, num_sms, query_len)
        wanted = min(MAX_KV_SPLITS, -(-num_sms // num_kv_heads))
        if num_seqs * query_len * wanted <= FEW:
            assert splits >= wanted, (num_sms, num_kv_heads, num_seqs, query_len)


@all_kernels
def test_no_more_than_can_be_used(kernel):
    """By a sequence alone, and in a large batch by one of twice the average length:
    each range that is cut has two ends.
    """
    for num_sms, num_kv_heads, num_seqs, query_len in CASES:
        splits = kernel.num_kv_splits(num_seqs, num_kv_heads, num_sms, query_len)
        teams = TEAMS * num_sms
        assert 2 <= splits <= MAX_KV_SPLITS
        assert splits <= max(2, teams // num_kv_heads + 2)
        rows = num_seqs * query_len
        average = TEAMS * teams / (num_seqs * num_kv_heads)
        assert rows * splits <= max(FEW, rows * (2 * average + 3))
