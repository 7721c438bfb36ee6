# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The bias of K is found whatever the model calls its projection, and of this rank's
heads; long ones are warned of.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.ops.turbo import key_bias

from .backend_utils import make_vllm_config
from .utils import BF16

HIDDEN, HEAD_SIZE, HEADS, KV_HEADS = 256, 64, 8, 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """Of an engine with one rank, whose layers are made within."""
    folder: Path = tmp_path_factory.mktemp("model")
    config = make_vllm_config(folder)
    with set_current_vllm_config(config):
        init_distributed_environment(
            1, 0, f"file://{folder / 'ranks'}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)
        yield config
    cleanup_dist_env_and_memory()


class SelfAttention(nn.Module):
    """An attention module as models have them."""

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
    """Load biases of Q, K and V that tell heads apart, and return all of K's."""
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
    """Divided, or fewer than ranks and so replicated."""
    for place in (linear, parameter):
        for name, value in (("rank", rank), ("world_size", num_ranks)):
            function = f"get_tensor_model_parallel_{name}"
            monkeypatch.setattr(place, function, lambda value=value: value)
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
    """Let the last head's bias have a norm, and the others' be short."""
    bias = found_bias(module)
    bias.fill_(0.5)
    bias[-1] = norm / HEAD_SIZE**0.5


def warnings_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = []
    monkeypatch.setattr(
        key_bias.logger,
        "warning_once",
        lambda message, *args, scope: found.append(message % args),
    )
    key_bias.warn_of_key_biases(model)
    return found


def test_long_biases_are_warned_of(config, monkeypatch):
    modules = [make_module(config) for _ in range(5)]
    modules.append(make_module(config, bias=False))
    for module, norm in zip(modules, (600, 22, 41, 39.5, 900)):
        set_norm(module, norm)
    with set_default_torch_dtype(BF16):
        modules[4].k_norm = RMSNorm(HEAD_SIZE)  # bounds K
    indices = [module.attn.layer_name.split(".")[2] for module in modules]
    monkeypatch.setattr(config.cache_config, "kv_cache_dtype_skip_layers", ["7"])
    (line,) = warnings_of(nn.ModuleList(modules), monkeypatch)
    assert f"layers {indices[0]}, {indices[2]} of ModuleList" in line
    assert "up to 600 long" in line
    # What is advised is a command line, and keeps what is skipped already.
    advice = line.partition("dtype: ")[2].split()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(advice)
    assert arguments.kv_cache_dtype_skip_layers == ["7", indices[0], indices[2]]


def test_short_biases_and_other_dtypes_are_not(config, monkeypatch):
    module = make_module(config)
    set_norm(module, 39.5)
    assert not warnings_of(nn.ModuleList([module]), monkeypatch)
    set_norm(module, 100)
    module.attn.kv_cache_dtype = "fp8"
    assert not warnings_of(nn.ModuleList([module]), monkeypatch)
