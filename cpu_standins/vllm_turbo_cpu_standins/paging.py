# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for process set-up and for the paged cache's addressing."""

import torch


def init_cpu_memory_env(node_ids: list[int]) -> None:
    """Binds no memory, because the default placement is good enough for tests."""


def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Writes each scheduled token's slot: `block * block_size + offset`.

    Args:
        query_start_loc: int32 [num_reqs + 1], a request's first token.
        positions: int64 [num_tokens], a token's position in its sequence.
        block_table: int32 [num_reqs, max_blocks], a sequence's blocks.
        slot_mapping: int64 [>= num_tokens], written up to num_tokens.
        block_size: Tokens per block.

    """
    num_tokens = int(query_start_loc[-1])
    lengths = query_start_loc.diff()
    rows = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    positions = positions[:num_tokens]
    blocks = block_table[rows, positions // block_size].to(torch.int64)
    slot_mapping[:num_tokens] = blocks * block_size + positions % block_size
