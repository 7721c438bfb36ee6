# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The bias of K is found under any name of the projection, for this rank's heads. An
offset is made from it. Long biases that cannot have an offset get a warning.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from vllm import EngineArgs
from vllm.config import VllmConfig
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.ops.turbo.keys import bias as key_bias
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.keys.loading import (
    check_key_biases,
    prepare_key_biases,
)
from vllm.v1.attention.ops.turbo.keys.offset import mean_rotary, mean_rotated

from ..utils import BF16

HIDDEN, HEAD_SIZE, HEADS, KV_HEADS = 256, 64, 8, 4


@pytest.fixture
def config(rank_config: VllmConfig) -> VllmConfig:
    return rank_config


def set_rank(monkeypatch: pytest.MonkeyPatch, rank: int, num_ranks: int) -> None:
    """Have new layers divided among tensor parallel ranks, as one of these."""
    for place in (linear, parameter):
        for name, value in (("rank", rank), ("world_size", num_ranks)):
            function = f"get_tensor_model_parallel_{name}"
            monkeypatch.setattr(place, function, lambda value=value: value)


class SelfAttention(nn.Module):
    """An attention module as in models."""

    def __init__(
        self, config: VllmConfig, index: int, name: str = "qkv_proj", bias: bool = True
    ):
        super().__init__()
        projection = linear.QKVParallelLinear(
            HIDDEN, HEAD_SIZE, HEADS, KV_HEADS, bias=bias, params_dtype=BF16
        )
        setattr(self, name, projection)
        self.attn = Attention(
            projection.num_heads,
            HEAD_SIZE,
            0.125,
            projection.num_kv_heads,
            cache_config=config.cache_config,
            prefix=f"model.layers.{index}.self_attn.attn",
        )


def make_module(config: VllmConfig, **arguments) -> SelfAttention:
    index = len(config.compilation_config.static_forward_context)
    with set_default_torch_dtype(BF16):
        return SelfAttention(config, index, **arguments)


def load_biases(projection: nn.Module) -> torch.Tensor:
    """Load biases of Q, K and V that differ by head; return K's, (H, D)."""
    biases = {
        "q": torch.zeros(HEADS * HEAD_SIZE),
        "k": torch.arange(1.0, KV_HEADS + 1).repeat_interleave(HEAD_SIZE),
        "v": torch.full((KV_HEADS * HEAD_SIZE,), -1.0),
    }
    for shard, bias in biases.items():
        projection.bias.weight_loader(projection.bias, bias.to(BF16), shard)
    return biases["k"].view(KV_HEADS, HEAD_SIZE)


def found_bias(module: SelfAttention) -> torch.Tensor:
    bias = key_bias.find_key_bias(module.attn, module)
    assert bias is not None
    return bias


@pytest.mark.parametrize("name", ["qkv_proj", "query_key_value", "wqkv", "c_attn"])
def test_any_name(config, name):
    module = make_module(config, name=name)
    loaded = load_biases(getattr(module, name))
    assert torch.equal(found_bias(module).float(), loaded)


@pytest.mark.parametrize(
    "num_ranks, rank, heads", [(2, 0, [0, 1]), (2, 1, [2, 3]), (8, 5, [2])]
)
def test_heads_of_a_rank(config, monkeypatch, num_ranks, rank, heads):
    """Ranks divide the heads, or replicate them if there are more ranks."""
    set_rank(monkeypatch, rank, num_ranks)
    module = make_module(config)
    loaded = load_biases(module.qkv_proj)
    found = found_bias(module)
    assert torch.equal(found.float(), loaded[heads])


def test_below_a_lora(config):
    module = make_module(config)
    loaded = load_biases(module.qkv_proj)
    wrapper = nn.Module()
    wrapper.base_layer = module.qkv_proj
    module.qkv_proj = wrapper
    assert torch.equal(found_bias(module).float(), loaded)


def test_projection_of_k_alone(config):
    module = make_module(config, bias=False)
    assert key_bias.find_key_bias(module.attn, module) is None
    size = KV_HEADS * HEAD_SIZE
    module.o_proj = linear.RowParallelLinear(size, size)
    module.k_proj = linear.ColumnParallelLinear(HIDDEN, size)
    nn.init.constant_(module.o_proj.bias, 1)
    nn.init.constant_(module.k_proj.bias, 2)
    found = found_bias(module)
    assert found.shape == (KV_HEADS, HEAD_SIZE) and (found == 2).all()


def set_norm(module: SelfAttention, norm: float) -> None:
    """Set the norm of the last head's bias; the others' are short."""
    bias = found_bias(module)
    bias.fill_(0.5)
    bias[-1] = norm / HEAD_SIZE**0.5


def warnings_of(*modules: SelfAttention, log) -> list[str]:
    """The warnings of a model of these modules."""
    log.clear()
    key_bias.warn_of_key_biases(nn.ModuleList(modules))
    return log.warnings


def test_long_biases_get_a_warning(config, log, monkeypatch):
    modules = [make_module(config) for _ in range(5)]
    modules.append(make_module(config, bias=False))
    for module, norm in zip(modules, (600, 22, 41, 39.5, 900)):
        set_norm(module, norm)
    with set_default_torch_dtype(BF16):
        modules[4].k_norm = RMSNorm(HEAD_SIZE)  # bounds K
    indices = [module.attn.layer_name.split(".")[2] for module in modules]
    monkeypatch.setattr(config.cache_config, "kv_cache_dtype_skip_layers", ["7"])
    (line,) = warnings_of(*modules, log=log)
    assert f"layers {indices[0]}, {indices[2]} of ModuleList" in line
    assert "up to 600 long" in line
    # The advice is a command line that keeps the layers that are skipped already.
    advice = line.partition("dtype: ")[2].split()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(advice)
    assert arguments.kv_cache_dtype_skip_layers == ["7", indices[0], indices[2]]


class MarlinFP8Kernel:
    """A stand-in for vLLM's class of this name, which turbo finds by the name."""


def set_offsets(*modules: SelfAttention) -> list[torch.Tensor | None]:
    key_bias.set_key_offsets(nn.ModuleList(modules))
    return [module.attn.impl.runner.scoring.key_offset for module in modules]


def make_rotary(config: VllmConfig) -> nn.Module:
    return get_rope(
        HEAD_SIZE,
        max_position=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype=BF16,
    )


def test_layers_with_a_bias_have_an_offset(config):
    """Layers with a bias have an offset, but not with a norm of K or a zero bias."""
    modules = [make_module(config) for _ in range(4)]
    modules.append(make_module(config, bias=False))
    for module in modules[:3]:
        load_biases(module.qkv_proj)
    modules[1].rotary_emb = make_rotary(config)
    with set_default_torch_dtype(BF16):
        modules[2].k_norm = RMSNorm(HEAD_SIZE)
    found_bias(modules[3]).zero_()
    unrotated, rotated, *others = set_offsets(*modules)
    bias = found_bias(modules[0]).float()
    assert torch.equal(unrotated, bias[None])
    rotary = mean_rotary(modules[1].rotary_emb)
    assert torch.equal(rotated, mean_rotated(bias, rotary))
    assert not torch.equal(rotated[1], bias)
    assert others == [None, None, None]


def test_layers_that_share_a_cache_have_its_offset(config):
    """Layers that share a cache have no keys, and so no bias, of their own."""
    target, sharing = make_module(config), make_module(config, bias=False)
    load_biases(target.qkv_proj)
    sharing.attn.kv_sharing_target_layer_name = target.attn.layer_name
    table, shared = set_offsets(target, sharing)
    assert table is not None and shared is table


def test_layers_with_a_soft_cap_have_none(config, log):
    """Layers with a soft cap have no offset, nor has a layer whose cache one reads.

    The log says so, and long biases get a warning.
    """
    capped, target, other = (make_module(config) for _ in range(3))
    sharing = make_module(config, bias=False)
    sharing.attn.kv_sharing_target_layer_name = target.attn.layer_name
    for module in (capped, sharing):
        runner = module.attn.impl.runner
        runner.scoring = runner.scoring._replace(soft_cap=50.0)
    for module in (capped, target, other):
        set_norm(module, 600)
    modules = capped, target, sharing, other
    *offsets, last = set_offsets(*modules)
    assert offsets == [None] * 3 and last is not None
    (line,) = set(log.infos)
    assert "soft cap" in line
    (line,) = warnings_of(*modules, log=log)
    numbers = [module.attn.layer_name.split(".")[2] for module in (capped, target)]
    assert f"layers {', '.join(numbers)} of" in line


def test_a_bias_that_was_not_read_is_refused(config):
    """It is if no loader let it be read, unless the layer's offset has it."""
    modules = [make_module(config) for _ in range(4)]
    for module in modules[:3]:
        load_biases(module.qkv_proj)
    unread, measured, normalised, zero = modules
    with set_default_torch_dtype(BF16):
        normalised.k_norm = RMSNorm(HEAD_SIZE)
    found_bias(zero).zero_()
    measured.attn.impl.runner.set_key_offset(found_bias(measured)[None].float())
    check_key_biases(nn.ModuleList(modules[1:]))
    model = nn.ModuleList(modules)
    number = key_bias.layer_number(unread.attn.layer_name)
    with pytest.raises(ValueError, match=f"in layers {number} .*--load-format auto"):
        check_key_biases(model)
    # A layer that can have no offset was warned of when its bias was read.
    runner = unread.attn.impl.runner
    runner.scoring = runner.scoring._replace(soft_cap=50.0)
    prepare_key_biases(model)
    assert runner.scoring.key_offset is None
    check_key_biases(model)


def test_a_long_bias_with_an_offset_gets_no_warning(config, log):
    module = make_module(config)
    set_norm(module, 600)
    set_offsets(module)
    assert not warnings_of(module, log=log)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_have_their_heads_of_one_table(config, monkeypatch, num_ranks):
    whole = make_module(config)
    whole.rotary_emb = make_rotary(config)
    load_biases(whole.qkv_proj)
    (table,) = set_offsets(whole)
    found = []
    for rank in range(num_ranks):
        with monkeypatch.context() as patch:
            set_rank(patch, rank, num_ranks)
            module = make_module(config)
            module.rotary_emb = make_rotary(config)
            load_biases(module.qkv_proj)
            found += set_offsets(module)
    replicas = max(num_ranks // KV_HEADS, 1)
    assert torch.equal(torch.cat(found, 1), table.repeat_interleave(replicas, 1))


def test_weights_that_are_loaded_again_leave_the_offset(config):
    """Reloaded weights keep the offset, because pages that were stored with it live on.

    Neither reloading a layer's tensors nor sleeping changes the tensor that kernels
    read.
    """
    module = make_module(config)
    load_biases(module.qkv_proj)
    record_metadata_for_reloading(module)
    (offset,) = set_offsets(module)
    before = offset.clone()
    initialize_layerwise_reload(module)
    finalize_layerwise_reload(module, config.model_config)
    module.qkv_proj.bias.data *= 3
    assert set_offsets(module)[0] is offset
    assert torch.equal(offset, before)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    offset.fill_(torch.nan)
    for name, buffer in module.named_buffers():
        buffer.data.copy_(buffers[name])
    assert torch.equal(offset, before)
    # Checkpoints do not have it.
    assert not any(key_offset.BUFFER in name for name in module.state_dict())


@pytest.mark.parametrize("when", ["loading", "cached"])
def test_a_bias_in_marlins_order_has_no_offset(config, log, when):
    module = make_module(config)
    set_norm(module, 600)
    module.qkv_proj.quant_method.kernel = MarlinFP8Kernel()
    if when == "loading":
        module.qkv_proj._already_called_process_weights_after_loading = True
    with weights_already_processed() if when == "cached" else nullcontext():
        assert set_offsets(module) == [None]
        assert warnings_of(module, log=log)


def test_short_biases_and_other_dtypes_get_no_warning(config, log):
    module = make_module(config)
    set_norm(module, 39.5)
    assert not warnings_of(module, log=log)
    set_norm(module, 100)
    module.attn.kv_cache_dtype = "fp8"
    assert not warnings_of(module, log=log)
