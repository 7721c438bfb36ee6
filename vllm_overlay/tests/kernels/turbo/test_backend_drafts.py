# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The backend where requests bring drafts to verify."""

from pathlib import Path

import pytest
import torch

from .backend_utils import (
    PADDING,
    Batch,
    all_paths,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    set_path,
    with_drafts,
)
from .utils import DEVICE, FP16, requires_triton

# (query length, context length) of each request that brings up to two drafts, decodes
# first.
SPECULATIVE_BATCHES = {
    "uniform": [(3, 31), (3, 0), (3, 62)],
    "one token each": [(1, 31), (1, 64)],
    "ragged": [(3, 31), (1, 64), (2, 0), (3, 14)],
    "mixed": [(1, 40), (3, 30), (20, 0), (5, 65)],
    "prefills alone": [(4, 64), (5, 0)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@requires_triton
@pytest.mark.parametrize("name", SPECULATIVE_BATCHES)
@prefill_modes
@all_paths
def test_batches_with_drafts(folder, name, mode, path):
    """Drafts are decoded, as lengths on the host are not exact for them."""
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16, mode))
    impl = make_impl(config)
    set_path(impl, path)
    requests = SPECULATIVE_BATCHES[name]
    batch = Batch.make(impl, requests)
    query_lens = [query_len for query_len, _ in requests if query_len <= 3]
    num_decodes = len(query_lens)
    upper_bound = batch.common.seq_lens_cpu_upper_bound.clone()
    upper_bound[:num_decodes] += 7
    common = batch.common.replace(seq_lens_cpu_upper_bound=upper_bound)
    metadata = make_builder(config, impl).build(0, common)
    assert metadata.num_decodes == num_decodes
    assert metadata.num_decode_tokens == sum(query_lens)
    assert (metadata.prefill is None) == (num_decodes == len(requests))
    assert (metadata.decode_start_loc is None) == (len(set(query_lens)) <= 1)
    batch.check(impl, batch.run(impl, metadata, path))


@requires_triton
@prefill_modes
@kernel_paths
def test_padded_drafts(folder, mode, path):
    """As a CUDA graph of a larger batch has them: the requests of padding begin where
    the tokens end, and yet their tokens are counted.
    """
    config = with_drafts(make_vllm_config(folder, turbo_prefill=mode), PADDING - 1)
    impl = make_impl(config)
    set_path(impl, path)
    batch = Batch.make(impl, [(PADDING, 31), (PADDING, 64)])
    common = batch.common
    starts = torch.tensor([0, PADDING, 2 * PADDING, 2 * PADDING], dtype=torch.int32)
    table = torch.zeros(3, common.block_table_tensor.shape[1]).int()
    table[:2] = common.block_table_tensor
    lens = torch.tensor([31 + PADDING, 64 + PADDING, 0], dtype=torch.int32)
    padded = common.replace(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(DEVICE),
        seq_lens_cpu_upper_bound=lens,
        num_reqs=3,
        num_actual_tokens=3 * PADDING,
        block_table_tensor=table.to(DEVICE),
    )
    metadata = make_builder(config, impl).build(0, padded)
    assert metadata.num_decodes == 3 and metadata.num_decode_tokens == 3 * PADDING
    assert metadata.decode_query_len == PADDING and metadata.decode_start_loc is None
    output = torch.full_like(batch.query, 7)
    impl._forward_kernels(
        batch.query, batch.key, batch.value, batch.cache, metadata, output
    )
    num_tokens = 2 * PADDING
    assert (output[num_tokens:] == 0).all()
    batch.check(impl, output[:num_tokens])
