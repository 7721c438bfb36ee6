# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The backend with requests that bring drafts to verify."""

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionBackend,
    TurboMetadataBuilder,
)

from ..backend_utils import (
    BLOCK_SIZE,
    NUM_KV_HEADS,
    add_layer,
    all_paths,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    with_drafts,
)
from ..batch_utils import PADDING, Batch, make_common, pad_to_graph
from ..serving.refusal_cases import speculative_config
from ..utils import DEVICE, FP16, cache_spec

# (query length, context length) of each request, decodes first. A request brings two
# drafts at most.
SPECULATIVE_BATCHES = {
    "uniform": [(3, 31), (3, 0), (3, 62)],
    "one token each": [(1, 31), (1, 64)],
    "ragged": [(3, 31), (1, 64), (2, 0), (3, 14)],
    "mixed": [(1, 40), (3, 30), (20, 0), (5, 65)],
    "prefills alone": [(4, 64), (5, 0)],
}


@pytest.mark.parametrize("name", SPECULATIVE_BATCHES)
@prefill_modes
@all_paths
def test_batches_with_drafts(folder, name, mode, path):
    """Requests with drafts are decodes: the host does not know their exact lengths."""
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16, mode))
    impl = make_impl(config, path=path)
    requests = SPECULATIVE_BATCHES[name]
    batch = Batch.make(impl, requests)
    query_lens = [query_len for query_len, _ in requests if query_len <= 3]
    num_decodes = len(query_lens)
    metadata = make_builder(config, impl).build(0, batch.hide_drafts(num_decodes))
    assert metadata.num_decodes == num_decodes
    assert metadata.num_decode_tokens == sum(query_lens)
    num_extends = sum(extend.num_requests for extend in metadata.extends)
    assert (metadata.prefill is None) == (num_decodes + num_extends == len(requests))
    assert (metadata.decode_start_loc is None) == (len(set(query_lens)) <= 1)
    batch.serve(impl, metadata)


@prefill_modes
@kernel_paths
def test_padded_drafts(folder, mode, path):
    """A CUDA graph of a larger batch: padded requests begin where the tokens end, but
    the number of tokens includes theirs.
    """
    config = with_drafts(make_vllm_config(folder, turbo_prefill=mode), PADDING - 1)
    impl = make_impl(config, path=path)
    batch = Batch.make(impl, [(PADDING, 31), (PADDING, 64)])
    padded = pad_to_graph(batch.common, 3, 3 * PADDING)
    metadata = make_builder(config, impl).build(0, padded)
    assert metadata.num_decodes == 3 and metadata.num_decode_tokens == 3 * PADDING
    assert metadata.decode_query_len == PADDING and metadata.decode_start_loc is None
    batch.check_padded(impl, metadata)


@kernel_paths
def test_padding_alone(folder, path):
    """A rank without requests runs padding beside ranks that have requests."""
    config = with_drafts(make_vllm_config(folder))
    impl = make_impl(config, path=path)
    batch = Batch.make(impl, [(3, 0)])
    common, none = batch.common, [0] * 3
    table = common.block_table_tensor.expand(3, -1).contiguous()
    slots = torch.full_like(common.slot_mapping, -1)
    padding = make_common(none, none, table, slots).replace(
        num_actual_tokens=3, max_query_len=3, max_seq_len=3
    )
    before = batch.cache.clone()
    metadata = make_builder(config, impl).build(0, padding)
    output = batch.run(impl, metadata)
    assert (output == 0).all() and torch.equal(batch.cache, before)


# Requests by lengths on the device, and query lengths on the host: an even share of the
# same sum.
ADAPTIVE_BATCHES = {
    "decodes": ([(3, 31), (1, 64), (2, 30)], [2, 2, 2]),
    "none kept of one": ([(1, 31), (3, 62)], [2, 2]),
    "mixed": ([(3, 40), (1, 30), (20, 0), (5, 65)], [2, 2, 20, 5]),
}


def with_adaptive_verification(config: VllmConfig) -> VllmConfig:
    """The configuration with adaptive verification of two drafts a request."""
    speculative = with_drafts(config).speculative_config
    assert speculative is not None
    speculative.enable_adaptive_verification = True
    return config


@pytest.mark.parametrize("name", ADAPTIVE_BATCHES)
@prefill_modes
@all_paths
def test_query_lens_of_the_device(folder, name, mode, path):
    """Adaptive verification distributes drafts on the device. The host knows only their
    sum, and the most that a request can have.
    """
    requests, host_lens = ADAPTIVE_BATCHES[name]
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    config = with_adaptive_verification(config)
    impl = make_impl(config, path=path)
    batch = Batch.make(impl, requests)
    host_starts = torch.tensor([0, *host_lens]).cumsum(0).int()
    num_decodes = sum(length <= 3 for length in host_lens)
    common = batch.hide_drafts(num_decodes).replace(query_start_loc_cpu=host_starts)
    assert common.max_query_len >= 3
    metadata = make_builder(config, impl).build(0, common)
    assert metadata.num_decodes == num_decodes
    batch.serve(impl, metadata)


@prefill_modes
@kernel_paths
def test_replay_of_other_query_lens(folder, mode, path):
    """A CUDA graph of one token a request is replayed with fewer and longer requests.

    Only tensors on the device change between capture and replay.
    """
    config = with_adaptive_verification(make_vllm_config(folder, turbo_prefill=mode))
    impl = make_impl(config, path=path)
    num_captured = 6
    batch = Batch.make(impl, [(3, 31), (1, 64)])
    common = batch.common
    ones, width = [1] * num_captured, common.block_table_tensor.shape[1]
    table = torch.zeros(num_captured, width, dtype=torch.int32, device=DEVICE)
    slots = torch.full((num_captured,), -1).to(common.slot_mapping)
    capture = make_common(ones, ones, table, slots).replace(max_query_len=3)
    builder = make_builder(config, impl)
    spec = builder.kv_cache_spec
    assert builder.get_varlen_cudagraph_max_query_len(config, spec) == 3
    metadata = builder.build_for_cudagraph_capture(capture)
    num_tokens = common.num_actual_tokens
    capture.query_start_loc[:] = num_tokens
    capture.query_start_loc[:3] = common.query_start_loc
    capture.seq_lens[:] = 0
    capture.seq_lens[:2] = common.seq_lens
    capture.block_table_tensor[:2] = common.block_table_tensor
    slots[:num_tokens] = common.slot_mapping[:num_tokens]
    output = torch.full_like(batch.query[:num_captured], 7)
    q, k, v = (x[:num_captured] for x in (batch.query, batch.key, batch.value))
    impl.forward(None, q, k, v, batch.cache, metadata, output)
    batch.check(impl, output[:num_tokens])


@prefill_modes
@kernel_paths
def test_next_step_of_a_drafter(folder, mode, path):
    """A drafter builds metadata once, and changes tensors in it between steps."""
    config = with_drafts(make_vllm_config(folder, turbo_prefill=mode))
    impl = make_impl(config, path=path)
    batch = Batch.make(impl, [(1, 31), (1, 64), (1, 0)])
    common = batch.common
    first = common.replace(
        seq_lens=common.seq_lens - 1, slot_mapping=common.slot_mapping - 1
    )
    builder = make_builder(config, impl)
    assert builder.supports_draft_decode_metadata_update
    metadata = builder.build(0, first)
    first.seq_lens.add_(1)
    first.slot_mapping.add_(1)
    builder.update_draft_decode_metadata(metadata)
    batch.serve(impl, metadata)


@pytest.mark.parametrize(
    "method, parallel, own, drafts",
    [
        ("eagle", False, 3, 3),
        ("mtp", False, 3, 3),
        ("draft_model", False, 3, 4),
        ("draft_model", True, 5, 7),
    ],
)
def test_decodes_of_a_drafter(folder, method, parallel, own, drafts):
    """A drafter's first pass has more tokens than the step. Requests with drafts must
    stay decodes then, because the host has no exact lengths of them.
    """
    config = make_vllm_config(folder, dtype=FP16)
    config = speculative_config(config, method)
    assert config.speculative_config is not None
    config.speculative_config.parallel_drafting = parallel
    names = {"target": False, "draft": True}
    for name, is_draft in names.items():
        add_layer(config, name, is_draft=is_draft)
    impl = make_impl(config)
    spec = cache_spec(impl.runner.layout, NUM_KV_HEADS, BLOCK_SIZE)

    def threshold_of(*layers: str) -> int:
        builder = TurboMetadataBuilder(spec, list(layers), config, DEVICE)
        return builder.reorder_batch_threshold

    assert threshold_of("target") == threshold_of("target", "draft") == own
    assert threshold_of("draft") == drafts
    assert impl.runner.max_query_len == drafts


@prefill_modes
@all_paths
def test_first_pass_of_a_draft_model(folder, mode, path):
    """The first pass has the step's tokens and the token sampled after them."""
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    config = speculative_config(config, "draft_model")
    add_layer(config, "layers.0.attn", is_draft=True)
    impl = make_impl(config, path=path)
    batch = Batch.make(impl, [(4, 31), (2, 64), (20, 0), (5, 40)])
    metadata = make_builder(config, impl).build(0, batch.hide_drafts(2))
    assert metadata.num_decodes == 2 and metadata.decode_query_len == 4
    batch.serve(impl, metadata)


def test_non_causal_drafts(folder):
    """DFlash's layers are refused here even if the selection let them pass."""
    config = with_drafts(make_vllm_config(folder))
    impl = make_impl(config)
    common = Batch.make(impl, [(3, 31)]).common.replace(causal=False)
    with pytest.raises(NotImplementedError, match="turbo4.*non-causal"):
        make_builder(config, impl).build(0, common)


def test_adaptive_verification_is_claimed():
    assert TurboAttentionBackend.supports_device_cpu_query_lens_mismatch()
