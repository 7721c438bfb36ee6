# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A layer at work whose V has another head size than K, by Triton and by PyTorch."""

import pytest
import torch

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.attention.ops.turbo.interface import Scoring
from vllm.v1.attention.ops.turbo.layer.flash import FLASH_ATTN_PAIRS, FlashAttn
from vllm.v1.attention.ops.turbo.planning.prefill import prefill_limits
from vllm.v1.attention.ops.turbo.planning.scratch import (
    DecodeScratch,
    LayerShape,
    PrefillScratch,
    RawScratch,
)
from vllm.v1.attention.ops.turbo.planning.tokens import SeqLens

from ..backend_utils import make_impl, make_layer, make_vllm_config, reserve
from ..batch_utils import check_requests
from ..flash_utils import flash_attn_stand_in
from ..sequences import ints
from ..utils import BF16, DEVICE, FP16, gaussian, requires_triton

pytestmark = pytest.mark.usefixtures("short_segments")

TWO = {"head_size": 192, "head_size_v": 128}
# Query and context lengths: decodes, prefix hits, a chunk and a first one.
REQUESTS = [(1, 31), (1, 5), (9, 40), (12, 0)]
paths = pytest.mark.parametrize(
    "path", [pytest.param("triton", marks=requires_triton), "torch"]
)


@paths
@pytest.mark.parametrize("prefill", ["raw", "stored"])
def test_requests(folder, path, prefill):
    config = make_vllm_config(folder, dtype=FP16, turbo_prefill=prefill)
    check_requests(config, make_impl(config, path=path, **TWO), REQUESTS)


@paths
def test_window_and_sinks(folder, path):
    """MiMo-V2 has both in most of its layers."""
    config = make_vllm_config(folder, dtype=FP16)
    sinks = torch.tensor([0.0, -20.0, 2.0, 1.0], device=DEVICE)
    impl = make_impl(config, 4, path=path, sinks=sinks, sliding_window=20, **TWO)
    check_requests(config, impl, REQUESTS, rule="sinks")


@paths
def test_an_offset_of_k(folder, path):
    """An offset has K's size."""
    config = make_vllm_config(folder, dtype=FP16)
    offset = 20 * gaussian(3, 2, 192, seed=9)
    check_requests(
        config, make_impl(config, path=path, key_offset=offset, **TWO), REQUESTS
    )


def test_scratch_has_the_sizes_of_its_vectors():
    shape = LayerShape.of_sizes(8, 2, 192, 128, BF16)
    specs = [size for size, _ in PrefillScratch.specs(shape, 7, 5)]
    assert specs == [(7, 8, 192), (7, 8, 128), (5, 2, 192), (5, 2, 128)]
    specs = [size for size, _ in RawScratch.specs(shape, 3)]
    assert specs == [(3, 8, 128), (3, 2, 192), (3, 2, 128)]
    assert DecodeScratch.specs(shape, 3, 5)[1][0] == (5, 8, 128)
    assert LayerShape.of_sizes(8, 2, 128, 128, BF16) == LayerShape(8, 2, 128, BF16)
    # A piece has K and V of 320 numbers together, in place of 384.
    shapes = shape, LayerShape(8, 2, 192, BF16)
    pieces = [prefill_limits(x, False).piece_tokens for x in shapes]
    assert pieces[0] == pieces[1] * 384 // 320


@pytest.mark.parametrize("takes_pairs", [False, True], ids=["padded", "as they are"])
@pytest.mark.parametrize("sizes", [(192, 128), (64, 80)], ids=str)
def test_flash_attention_gets_the_sizes_that_it_takes(takes_pairs, sizes):
    """FlashAttention 2 takes one head size, so vectors are padded and outputs cut."""
    seen = []

    def function(**arguments):
        seen.append(tuple(arguments[name].shape[2] for name in ("q", "k", "v", "out")))
        return flash_attn_stand_in(**arguments)

    lens = SeqLens(ints([0, 3, 8]), 5, 8)
    query, key, value = (
        gaussian(8, heads, size, seed=heads)
        for heads, size in ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))
    )
    results = []
    for flash_attn in (
        FlashAttn(function, takes_pairs=takes_pairs),
        FlashAttn(flash_attn_stand_in, takes_pairs=True),
    ):
        output = gaussian(8, 4, sizes[1])
        lse = flash_attn.attend(query, key, value, output, lens, lens, Scoring(0.1))
        results.append((output, lse))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected)
    as_they_are = takes_pairs and sizes in FLASH_ATTN_PAIRS
    expected = (sizes[0], *sizes[:1], *sizes[1:], sizes[1])
    assert seen == [expected if as_they_are else (max(sizes),) * 4]


@requires_triton
def test_the_first_run_launches_kernels_of_both_sizes(folder, workspace):
    """The workspace that the profile run reserves has room for the requests."""
    config = make_vllm_config(folder, dtype=FP16)
    impl = make_impl(config, path="triton", **TWO)
    reserve(impl)
    check_requests(config, impl, REQUESTS)


@pytest.mark.parametrize("skipped", [False, True], ids=["packed", "skipped"])
def test_models_choice_of_a_backend(folder, skipped):
    """A model's choice for two sizes stays where the layer has no turbo dtype."""
    config = make_vllm_config(folder, dtype=FP16)
    if skipped:
        config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    chosen = AttentionBackendEnum.TRITON_ATTN_DIFFKV.get_class()
    chosen.set_head_size_v(128)
    layer = make_layer(config, attn_backend=chosen, **TWO)
    assert layer.get_attn_backend() is (chosen if skipped else TurboAttentionBackend)
    if not skipped:
        assert layer.impl.runner.layout.head_size_v == 128
        spec = layer.get_kv_cache_spec(config)
        spec = TurboAttentionBackend.customize_spec(spec)
        assert spec.state_content_bytes == 170
