# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Splits of a sequence in the CUDA kernels: enough to keep the GPU busy, and no more
than they can use.
"""

from itertools import product

import pytest

from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend_mma
from vllm.v1.attention.ops.turbo.interface import MAX_KV_SPLITS

# Multiprocessors, KV heads, sequences, query tokens of each.
CASES = list(product((40, 80, 132), (1, 2, 8), (1, 3, 32, 256, 1024), (1, 4, 8)))
# Splits of all query tokens that need little memory in any batch.
FEW = 4096
# The most teams of warps on a multiprocessor. Each has a range of its own.
TEAMS = 4

all_kernels = pytest.mark.parametrize(
    "kernel", [cuda_decode, extend_mma], ids=["decode", "extend_mma"]
)


@all_kernels
def test_a_long_sequence_can_have_every_multiprocessor(kernel):
    """A long sequence alone, or beside a few short ones, can have them all."""
    for num_sms, num_kv_heads, num_seqs, query_len in CASES:
        splits = kernel.num_kv_splits(num_seqs, num_kv_heads, num_sms, query_len)
        wanted = min(MAX_KV_SPLITS, -(-num_sms // num_kv_heads))
        if num_seqs * query_len * wanted <= FEW:
            assert splits >= wanted, (num_sms, num_kv_heads, num_seqs, query_len)


@all_kernels
def test_no_more_than_can_be_used(kernel):
    """Splits are at most those that a sequence alone can use, or in a large batch one
    of twice the average length. A range that is cut has two ends.
    """
    for num_sms, num_kv_heads, num_seqs, query_len in CASES:
        splits = kernel.num_kv_splits(num_seqs, num_kv_heads, num_sms, query_len)
        teams = TEAMS * num_sms
        assert 2 <= splits <= MAX_KV_SPLITS
        assert splits <= max(2, teams // num_kv_heads + 2)
        rows = num_seqs * query_len
        average = TEAMS * teams / (num_seqs * num_kv_heads)
        assert rows * splits <= max(FEW, rows * (2 * average + 3))
