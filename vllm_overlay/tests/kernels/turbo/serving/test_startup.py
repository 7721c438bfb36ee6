# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks and log lines of a cache when the engine starts."""

from dataclasses import replace
from pathlib import Path

import pytest
import regex as re
import torch

from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionBackend,
    TurboAttentionImpl,
)
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.serving import startup
from vllm.v1.attention.ops.turbo.serving.startup import describe_cache
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from .. import backend_utils
from ..backend_utils import make_layer, make_vllm_config
from ..flash_utils import FLASH_ATTN
from ..rank_utils import RankGroup, Ranks
from ..utils import requires_triton
from .refusal_cases import PACKED, OwnAttention, serve_options


def make_impl(
    folder: Path, num_kv_heads: int, head_size: int, num_heads: int = 8, **batch: int
) -> TurboAttentionImpl:
    config = make_vllm_config(folder, "turbo4", **batch)
    impl = backend_utils.make_impl(
        config, num_heads, num_kv_heads, head_size=head_size, scale=0.1
    )
    impl.runner.flash_attn = FLASH_ATTN  # for the scratch that it takes
    return impl


def test_cpu(monkeypatch, folder):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    line = describe_cache(3 * [make_impl(folder, 2, 128)])
    assert line == (
        "KV cache turbo4: 272 bytes a token and layer (layers: 3, KV heads: 2, "
        "head size: 128; PyTorch's operators, because this is a CPU), 3.76 times fewer "
        "than in bf16; 0.0 MiB of workspace; prefill attends to raw K and V."
    )


@requires_triton
def test_gpu_with_layers_of_two_shapes(monkeypatch, folder):
    """Each shape has its kernels; the workspace is the largest of all layers."""
    large, small = make_impl(folder, 2, 256), make_impl(folder, 4, 96)
    small.runner.stored = large.runner.stored = True
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    large.runner.kernels = kernels.cuda_kernels(
        large.runner.layout, "they could be loaded"
    )
    small.runner.kernels = kernels.triton_kernels("head size 96 has no others")
    line = describe_cache([small, large, large])
    assert line.startswith(
        "KV cache turbo4: 408 bytes a token and layer (layers: 1, KV heads: 4, "
        "head size: 96; Triton kernels, because head size 96 has no others), "
        "544 bytes a token and layer (layers: 2, KV heads: 2, "
        "head size: 256; CUDA kernels, because they could be loaded), "
    )
    ratio = (4 * 4 * 96 + 2 * 2 * 4 * 256) / (408 + 2 * 544)
    assert f" {ratio:.2f} times fewer" in line and line.endswith("stored K and V.")
    most = max(impl.runner.workspace_bytes for impl in (small, large)) / 2**20
    assert f"in bf16; {most:.1f} MiB of workspace" in line
    assert most == pytest.approx(large.runner.workspace_bytes / 2**20) and most > 64


def test_layers_with_an_offset_of_k_are_counted(monkeypatch, folder):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    impls = [make_impl(folder, 2, 128) for _ in range(3)]
    assert "offset" not in describe_cache(impls)
    for impl in impls[1:]:
        impl.runner.set_key_offset(torch.ones(1, 2, 128))
    line = describe_cache(impls)
    assert re.search(r"raw K and V; K offset: 2 of 3 layers \([0-9a-f]{8}\)\.$", line)


def test_the_line_names_soft_caps(monkeypatch, folder):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    impls = [make_impl(folder, 2, 128) for _ in range(3)]
    for impl in impls[1:]:
        runner = impl.runner
        runner.scoring = runner.scoring._replace(soft_cap=50.0)
    line = describe_cache(impls)
    assert "(layers: 1, KV heads: 2, head size: 128; PyTorch" in line
    assert "(layers: 2, KV heads: 2, head size: 128, soft cap: 50; PyTorch" in line


def test_layers_that_are_left_out_are_counted(log, monkeypatch, folder):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    impls = [make_impl(folder, 2, 128) for _ in range(3)]
    assert "not packed" not in describe_cache(impls)
    assert "raw K and V; 2 of 5 layers are not packed." in describe_cache(impls, 2)
    config = make_vllm_config(folder, num_hidden_layers=3)
    config.cache_config.kv_cache_dtype_skip_layers = ["1"]
    for _ in range(3):
        make_layer(config)
    startup.log_turbo_cache(config)
    (line,) = (x for x in log.infos if x.startswith("KV cache turbo4"))
    assert "(layers: 2, " in line
    assert line.endswith("; 1 of 3 layers are not packed.")


POOLING = dict(runner="pooling", prefill="raw", caching=True, chunked=False)


@pytest.mark.parametrize(
    "changes, flags",
    [
        ({}, "--disable-prefix-caching"),
        ({"caching": False, "chunked": True}, "--disable-chunked-prefill"),
        ({"chunked": True}, "--disable-prefix-caching and --disable-chunked-prefill"),
        ({"caching": False}, None),
        ({"prefill": "stored"}, None),
        ({"runner": "generate"}, None),
    ],
    ids=str,
)
def test_scores_that_depend_on_the_cache(folder, changes, flags):
    case = POOLING | changes
    config = make_vllm_config(folder, turbo_prefill=case["prefill"])
    config.model_config.runner_type = case["runner"]
    config.cache_config.enable_prefix_caching = case["caching"]
    config.scheduler_config.enable_chunked_prefill = case["chunked"]
    advice = startup.pooling_advice(config)
    if flags is None:
        assert advice is None
        return
    assert f"pass {flags}, which gives" in advice
    assert "or --attention-config.turbo_prefill stored" in advice
    assert set(flags.split(" and ")) <= serve_options()


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_of_ranks_with_the_same_layers_logs_the_line(
    is_first, log, monkeypatch, folder
):
    """One rank logs the line in each pipeline stage and data parallel rank."""
    config = add_layers(folder)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    monkeypatch.setattr(startup, "model_parallel_is_initialized", lambda: True)
    group = RankGroup(Ranks(2), int(not is_first))
    monkeypatch.setattr(startup, "get_tp_group", lambda: group)
    reports: list[str] = []
    monkeypatch.setattr(startup, "report_kernels", reports.append)
    log.clear()
    startup.log_turbo_cache(config)
    assert [line.options["scope"] for line in log] == ["process"] * is_first
    # All ranks report their own kernels.
    assert reports == ["PyTorch's operators, because this is a CPU"]


@requires_triton
def test_documented_line(monkeypatch, folder):
    batch = dict(max_num_seqs=96, max_num_batched_tokens=8192)
    impl = make_impl(folder, 8, 128, 32, **batch)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    impl.runner.kernels = kernels.cuda_kernels(
        impl.runner.layout, "they could be loaded"
    )
    impl.runner.num_sms = 132
    page = Path(__file__).parents[4] / "docs/features/quantization/turbo.md"
    _, _, block = page.read_text().partition("```text\n")
    documented = " ".join(block.partition("\n```")[0].split("\n"))
    assert describe_cache(32 * [impl]) == documented


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_prefix_caching": False},
        {"mamba_cache_mode": "none"},
        {"prefix_match_unit": 16},
        {"block_size": 16},
    ],
    ids=str,
)
def test_advice_for_hits_of_whole_blocks(changes):
    """Only long blocks of a hybrid get the advice."""
    hybrid = {"block_size": 3968, "mamba_cache_mode": "align"}
    advice = startup.prefix_hit_advice(CacheConfig(**hybrid))
    assert advice is not None
    assert "of 3968 tokens" in advice and "--prefix-match-unit 16 " in advice
    assert startup.prefix_hit_advice(CacheConfig(**hybrid | changes)) is None


def add_layers(folder: Path, *layers: AttentionLayerBase) -> VllmConfig:
    """The configuration of a model with one of vLLM's layers, and further layers."""
    config = make_vllm_config(folder)
    make_layer(config)
    context = config.compilation_config.static_forward_context
    context |= {f"layers.{i}.attn": layer for i, layer in enumerate(layers, 1)}
    return config


platforms = pytest.mark.parametrize("platform", [Platform, current_platform])


@platforms
@pytest.mark.parametrize(
    "backend, spec",
    [
        # Layers as in MiniMax-M3 and Inkling, and one that TURBO was selected for.
        (FlashAttentionBackend, replace(PACKED, state_content_bytes=None)),
        (
            FlashAttentionBackend,
            FullAttentionSpec(
                block_size=32, num_kv_heads=2, head_size=64, dtype=torch.uint8
            ),
        ),
        (TurboAttentionBackend, PACKED),
    ],
)
def test_layer_of_its_own_kind(folder, platform, backend, spec):
    config = add_layers(folder, OwnAttention(backend, spec))
    message = (
        "--kv-cache-dtype turbo4 does not support this: layer layers.1.attn of "
        rf"LlamaForCausalLM \(OwnAttention, {backend.get_name()}\) "
        r"\(supported: vLLM's own attention layers\)\. "
        "Use --kv-cache-dtype fp8 or auto instead"
    )
    with pytest.raises(ValueError, match=message):
        platform.update_block_size_for_backend(config)


@platforms
@pytest.mark.parametrize(
    "changes",
    [
        dict(state_content_bytes=72),
        dict(kv_quant_mode=KVQuantMode.NONE),
        dict(kv_quant_mode=KVQuantMode.K4V3),
    ],
)
def test_layer_with_other_bytes(folder, platform, changes):
    layer = OwnAttention(TurboAttentionBackend, replace(PACKED, **changes))
    config = add_layers(folder, layer)
    layer.impl = config.compilation_config.static_forward_context["layers.0.attn"].impl
    with pytest.raises(ValueError, match=r"layer layers\.1\.attn of Llama"):
        platform.update_block_size_for_backend(config)


@platforms
def test_layer_that_says_no_dtype(folder, platform):
    """Without a dtype, the pages tell: pages of a turbo mode must be TURBO's."""
    layers = [OwnAttention(FlashAttentionBackend, PACKED) for _ in range(2)]
    for layer in layers:
        del layer.kv_cache_dtype
    layers[0].spec = replace(
        PACKED, state_content_bytes=None, kv_quant_mode=KVQuantMode.NONE
    )
    config = add_layers(folder, *layers)
    with pytest.raises(ValueError, match=r"layer layers\.2\.attn of Llama"):
        platform.update_block_size_for_backend(config)


@platforms
def test_other_layers_pass(folder, platform):
    """Layers with a cache of another dtype, or with TURBO's pages and backend, pass."""
    other = OwnAttention(FlashAttentionBackend, PACKED)
    other.kv_cache_dtype = "auto"
    same = OwnAttention(TurboAttentionBackend, PACKED)
    config = add_layers(folder, other, same)
    same.impl = config.compilation_config.static_forward_context["layers.0.attn"].impl
    platform.update_block_size_for_backend(config)
