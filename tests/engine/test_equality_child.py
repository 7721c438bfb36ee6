# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The defects that `turbo_equality/child.py` plants."""

from types import SimpleNamespace

import pytest
import torch
from turbo_equality.child import BUILDERS, Swap

from vllm.v1.attention.backend import CommonAttentionMetadata


@pytest.mark.parametrize("builder", BUILDERS)
def test_swapped_pages_are_planned(builder, monkeypatch):
    """The builder gets the swapped table, and plans from it."""
    lens = torch.tensor([9, 9], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=torch.arange(3, dtype=torch.int32),
        query_start_loc_cpu=torch.arange(3, dtype=torch.int32),
        seq_lens=lens,
        num_reqs=2,
        num_actual_tokens=2,
        max_query_len=1,
        max_seq_len=9,
        block_table_tensor=torch.arange(6, dtype=torch.int32).view(2, 3),
        slot_mapping=torch.zeros(2, dtype=torch.int64),
    )
    num_decodes = 2

    def build(builder, common_prefix_len, common_attn_metadata, fast_build=False):
        table = common_attn_metadata.block_table_tensor.tolist()
        return SimpleNamespace(num_decodes=num_decodes, planned=table)

    monkeypatch.setattr(builder, "build", build)

    def planned() -> list[list[int]]:
        return builder.build(None, 0, common_attn_metadata=common).planned

    with Swap().installed() as swap:
        assert planned() == [[0, 1, 2], [3, 4, 5]]
        swap.page = 1
        assert planned() == [[0, 4, 2], [3, 1, 5]]
        num_decodes = 1
        assert planned() == [[0, 1, 2], [3, 4, 5]]
    assert common.block_table_tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    num_decodes = 2
    assert planned() == [[0, 1, 2], [3, 4, 5]]
