# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention in plain PyTorch, which serves CPUs and is the target of other tests.

It is compared to PyTorch's dense attention with an explicit mask.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm.v1.attention.ops.turbo import reference

from ..backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    SCALE,
    make_impl,
    make_vllm_config,
    prefill_modes,
    with_drafts,
)
from ..batch_utils import Batch
from ..utils import FP16, all_presets, gaussian

# (query length, context length) of each request. A query of up to three tokens is a
# decode with drafts.
REQUESTS = [(1, 40), (3, 31), (2, 0), (7, 0), (5, 64), (33, 33)]


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: int | None
) -> torch.Tensor:
    """Dense attention. Query i sees tokens up to ``context + i``; None: all tokens."""
    group = query.shape[1] // key.shape[1]
    seen = [
        [context is None or token <= context + i for token in range(len(key))]
        for i in range(len(query))
    ]
    heads_first = (
        query.transpose(0, 1),
        torch.stack([key[:, head // group] for head in range(query.shape[1])]),
        torch.stack([value[:, head // group] for head in range(query.shape[1])]),
    )
    mask = torch.tensor(seen, device=query.device)
    output = scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=SCALE)
    return output.transpose(0, 1)


@pytest.mark.parametrize("num_queries, num_tokens", [(1, 1), (1, 9), (6, 6), (6, 20)])
def test_attention_of_one_sequence(num_queries, num_tokens):
    """Four query heads a KV head, in fp32; a loop over tokens gives the LSE."""
    query = gaussian(num_queries, 8, HEAD_SIZE, seed=1)
    key, value = (gaussian(num_tokens, 2, HEAD_SIZE, seed=seed) for seed in (2, 3))
    context = num_tokens - num_queries
    for causal in (True, False):
        output, lse = reference.attention(query, key, value, SCALE, causal)
        expected = dense_attention(query, key, value, context if causal else None)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
        for i in range(num_queries):
            last = context + i if causal else num_tokens - 1
            total = sum(
                (SCALE * (query[i].double() * key[token, [0] * 4 + [1] * 4]).sum(-1))
                .exp()
                .float()
                for token in range(last + 1)
            )
            torch.testing.assert_close(lse[i], total.log(), atol=1e-5, rtol=0)


@all_presets
@prefill_modes
def test_batches(folder, name, mode):
    """Decodes, drafts and chunks, compared token by token from the cache."""
    config = with_drafts(make_vllm_config(folder, name, FP16, mode))
    # Set before the plan, because other paths have extends.
    impl = make_impl(config, path="torch")
    batch = Batch.make(impl, REQUESTS)
    metadata = batch.build(config, impl)
    assert metadata.num_decodes == 3 and metadata.prefill is not None
    output = batch.run(impl, metadata)
    begin = 0
    for table, (num_queries, context) in zip(
        batch.common.block_table_tensor.tolist(), REQUESTS
    ):
        length = context + num_queries
        slots = [
            table[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
            for token in range(length)
        ]
        rotated = reference.load(
            batch.cache, torch.tensor(slots, device=output.device), impl.runner.layout
        )
        key, value = (reference.inverse_rotate(x) for x in rotated)
        key *= impl.runner.layout.key_codebook.gain
        own = slice(begin, begin + num_queries)
        begin = own.stop
        if mode == "raw":
            key[context:], value[context:] = batch.key[own], batch.value[own]
        expected = dense_attention(batch.query[own].float(), key, value, context)
        # The output is rounded.
        torch.testing.assert_close(
            output[own].float(), expected, atol=1e-5, rtol=2**-11
        )
