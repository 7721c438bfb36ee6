# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The offset of K follows weights that are loaded in any way after an engine's start,
as soon as no request has keys that were stored with the old offset.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    marlin_permute_bias,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.attention.ops.turbo.keys import bias as key_bias
from vllm.v1.attention.ops.turbo.keys.offset import mean_rotary, mean_rotated
from vllm.v1.attention.ops.turbo.serving import weight_updates
from vllm.v1.attention.ops.turbo.serving.weight_updates import (
    WeightUpdates,
    follow_weights,
)
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker

from ..backend_utils import make_vllm_config
from .test_key_bias import (
    HEAD_SIZE,
    KV_HEADS,
    MarlinFP8Kernel,
    SelfAttention,
    found_bias,
    load_biases,
    make_module,
    make_rotary,
    set_norm,
)


@pytest.fixture
def config(rank_config: VllmConfig, folder: Path) -> Iterator[VllmConfig]:
    """A configuration of the test's own, with only the test's layers."""
    config = make_vllm_config(folder)
    with set_current_vllm_config(config):
        yield config


def step(
    new: dict[str, int] | None = None,
    old: int = 0,
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
    resumed: tuple[str, ...] = (),
) -> SchedulerOutput:
    """The scheduler's output for a worker.

    Args:
        new: New requests, and the tokens of each from the prefix cache.
        old: Number of other running requests.
        finished: Requests that have finished.
        preempted: Requests that were preempted.
        resumed: Requests that run again after preemption.

    """
    output = SchedulerOutput.make_empty()
    requests = (new or {}).items()
    output.scheduled_new_reqs = [
        NewRequestData(name, None, [], None, None, ([],), hit, None)
        for name, hit in requests
    ]
    output.finished_req_ids = set(finished)
    output.preempted_req_ids = set(preempted)
    output.scheduled_cached_reqs.resumed_req_ids = set(resumed)
    output.total_num_scheduled_tokens = len(requests) + old + len(resumed)
    return output


def start(*modules: SelfAttention) -> None:
    """Start an engine with a model: set offsets and process weights."""
    key_bias.set_key_offsets(nn.ModuleList(modules))
    for module in modules:
        module.attn.impl.process_weights_after_loading(torch.bfloat16)


def started_module(config: VllmConfig) -> SelfAttention:
    """A module with the weights of ``load_format="dummy"``."""
    module = make_module(config)
    module.rotary_emb = make_rotary(config)
    # Left out, as a CPU's kernels reorder weights, which does not affect biases.
    module.qkv_proj.quant_method = None
    record_metadata_for_reloading(module)
    nn.init.uniform_(module.qkv_proj.bias, -1e-3, 1e-3)
    start(module)
    return module


def serving_module(config: VllmConfig) -> tuple[SelfAttention, WeightUpdates]:
    """A module with loaded biases that serves request "a", and its updates."""
    module = started_module(config)
    load_biases(module.qkv_proj)
    updates = WeightUpdates(config)
    updates.before_step(step({"a": 0}))
    return module, updates


def table_of(module: SelfAttention) -> torch.Tensor:
    table = module.attn.impl.runner.scoring.key_offset
    assert table is not None
    return table


def wanted(module: SelfAttention) -> torch.Tensor:
    """The table of the bias that a module has now."""
    return mean_rotated(found_bias(module), mean_rotary(module.rotary_emb))


def reload(module: SelfAttention, config: VllmConfig) -> None:
    """Reload weights as ``reload_weights`` and weight transfer engines do."""
    initialize_layerwise_reload(module)
    load_biases(module.qkv_proj)
    finalize_layerwise_reload(module, config.model_config)


def replace(module: SelfAttention, config: VllmConfig) -> None:
    bias = torch.full_like(module.qkv_proj.bias, 3.0)
    module.qkv_proj.bias = nn.Parameter(bias, requires_grad=False)


def make_worker(config: VllmConfig) -> Worker:
    """A worker without a device and a model runner."""
    worker = object.__new__(Worker)
    worker._pp_send_work, worker.use_v2_model_runner = [], False
    worker.vllm_config, worker.profiler = config, None
    return worker


Load = Callable[[SelfAttention, VllmConfig], Any]
WAYS: dict[str, Load] = {
    "model.load_weights": lambda module, config: load_biases(module.qkv_proj),
    "reload_weights": reload,
    "a copy": lambda module, config: found_bias(module).fill_(2),
    "a copy of data": lambda module, config: module.qkv_proj.bias.data.fill_(2),
    "another parameter": replace,
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_load_weights(config: VllmConfig, way: str):
    """The table becomes that of an engine that starts with these weights, in the memory
    that CUDA graphs read.
    """
    module = started_module(config)
    table = table_of(module)
    assert table.abs().max() < 1e-2
    updates, address = WeightUpdates(config), table.data_ptr()
    WAYS[way](module, config)
    updates.before_step(step({"a": 0}))
    assert table_of(module) is table and table.data_ptr() == address
    assert torch.equal(table, wanted(module)) and table.abs().max() > 0.5


def test_worker_follows_the_weights(config: VllmConfig):
    class Runner:
        """A runner that checks that the offset is that of the current weights."""

        def execute_model(self, output: SchedulerOutput, tensors: object) -> None:
            assert torch.equal(table_of(module), wanted(module))

    module, worker = started_module(config), make_worker(config)
    worker.model_runner = Runner()
    for name in "ab":
        load_biases(module.qkv_proj)
        found_bias(module).mul_(1 + ord(name))
        Worker.execute_model(worker, step({name: 0}))
        Worker.execute_model(worker, step(finished=(name,)))


def test_no_request_is_read_with_another_offset(config: VllmConfig, log):
    """Neither a scheduled request nor a waiting one is read with another offset. The
    offset follows once the last request has ended.
    """
    module = started_module(config)
    load_biases(module.qkv_proj)
    updates = WeightUpdates(config)
    updates.before_step(step({"a": 0, "b": 0}))
    before = table_of(module).clone()
    set_norm(module, 300)
    updates.last_step_s -= 1
    updates.before_step(step(old=1, finished=("a",)))
    assert torch.equal(table_of(module), before)
    (line,) = log.warnings
    assert "up to 268 apart" in line and "pause with clear_cache" in line
    updates.last_step_s -= 1
    updates.before_step(step({"c": 0}))
    updates.before_step(step({"d": 0}, finished=("c",)))
    updates.before_step(step(finished=("b", "d")))
    assert torch.equal(table_of(module), before) and len(log.warnings) == 1
    updates.before_step(step({"e": 0}))
    assert torch.equal(table_of(module), wanted(module)) and len(log.warnings) == 1


def test_reloading_is_noticed_without_a_pause(config: VllmConfig, log):
    module = started_module(config)
    updates = WeightUpdates(config)
    updates.before_step(step({"a": 0}))
    initialize_layerwise_reload(module)
    module.qkv_proj.bias.weight_loader(
        module.qkv_proj.bias, torch.full((KV_HEADS * HEAD_SIZE,), 9.0), "k"
    )
    finalize_layerwise_reload(module, config.model_config)
    updates.before_step(step(old=1))
    (line,) = log.warnings
    assert f"up to {9 * HEAD_SIZE**0.5:.0f} apart" in line


def test_a_small_change_is_followed_later_without_a_warning(config: VllmConfig, log):
    """A small change, as by a step of training, is followed later without a warning."""
    module, updates = serving_module(config)
    found_bias(module).mul_(1.01)
    updates.last_step_s -= 1
    updates.before_step(step(old=1))
    assert not torch.equal(table_of(module), wanted(module))
    updates.before_step(step({"b": 0}, finished=("a",)))
    assert torch.equal(table_of(module), wanted(module)) and not log.warnings


def test_preempted_requests_have_no_keys(config: VllmConfig):
    """``reset_prefix_cache(reset_running_requests=True)`` preempts requests."""
    module = started_module(config)
    updates = WeightUpdates(config)
    updates.before_step(step({"a": 0}))
    load_biases(module.qkv_proj)
    updates.before_step(step(preempted=("a",), resumed=("a",)))
    assert torch.equal(table_of(module), wanted(module))
    # The request has keys again.
    found_bias(module).mul_(2)
    updates.last_step_s -= 1
    updates.before_step(step(old=1))
    assert not torch.equal(table_of(module), wanted(module))


def test_running_requests_wait_for_nothing(config, monkeypatch):
    """Reading a bias waits for the device, so it is done only when nothing runs."""
    module, read = started_module(config), []
    monkeypatch.setattr(weight_updates, "PAUSE_S", 3600)
    monkeypatch.setattr(key_bias.KeyBias, "read", lambda self: read.append(self))
    updates = WeightUpdates(config)
    updates.before_step(step({"a": 0}))
    assert len(read) == 1
    for _ in range(3):
        updates.before_step(step(old=1))
    updates.before_step(step({"b": 0}))
    updates.before_step(step(old=1, finished=("a",)))
    updates.before_step(step(finished=("b",)))
    assert len(read) == 1
    assert module.attn.impl.runner.key_bias in read


def test_layers_without_a_bias_cost_nothing(config: VllmConfig):
    module = make_module(config, bias=False)
    start(module)
    updates = WeightUpdates(config)
    updates.before_step(step({"a": 0}))
    assert not updates.layers and not updates.running


def test_an_offset_with_a_connector_stays(config: VllmConfig, log):
    """An offset stays with a connector: the format ID of its blocks cannot change."""
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both"
    )
    module = started_module(config)
    before = table_of(module).clone()
    set_norm(module, 300)
    updates = WeightUpdates(config)
    for name in "ab":
        updates.before_step(step({name: 0}))
        updates.before_step(step(finished=(name,)))
    assert torch.equal(table_of(module), before)
    (line,) = log.warnings
    assert "--load-format auto" in line and "--kv-transfer-config" in line


def test_blocks_of_former_weights_get_a_warning(config: VllmConfig, log):
    module, updates = serving_module(config)
    updates.before_step(step(finished=("a",)))
    set_norm(module, 300)
    updates.before_step(step({"b": 32, "c": 0}))
    assert torch.equal(table_of(module), wanted(module))
    (line,) = log.warnings
    assert "reset_prefix_cache" in line


@pytest.mark.parametrize("factor", [1, 3])
def test_sleep_that_drops_weights(config: VllmConfig, factor: int):
    """After sleep, ``Worker.wake_up`` restores buffers, and weights are loaded: the
    same ones or others.
    """
    module, updates = serving_module(config)
    table, before = table_of(module), table_of(module).clone()
    saved = {name: buffer.clone() for name, buffer in module.named_buffers()}
    table.fill_(7)
    module.qkv_proj.bias.data.fill_(torch.nan)
    for name, buffer in module.named_buffers():
        buffer.data.copy_(saved[name])
    load_biases(module.qkv_proj)
    module.qkv_proj.bias.data *= factor
    updates.before_step(step({"b": 0}, finished=("a",)))
    assert table_of(module) is table and torch.equal(table, wanted(module))
    assert torch.equal(table, before) == (factor == 1)


def test_a_new_bias_gets_a_warning(config: VllmConfig, log):
    """A new bias gets no offset, because kernels were chosen without one."""
    module = make_module(config)
    module.qkv_proj.bias.data.zero_()
    start(module)
    updates = WeightUpdates(config)
    set_norm(module, 300)
    updates.before_step(step({"a": 0}))
    assert module.attn.impl.runner.scoring.key_offset is None
    number = module.attn.layer_name.split(".")[2]
    (line,) = log.warnings
    assert line.endswith(f"--kv-cache-dtype-skip-layers {number}")


def test_a_bias_that_is_not_finite_is_not_followed(config: VllmConfig):
    module = started_module(config)
    updates, before = WeightUpdates(config), table_of(module).clone()
    found_bias(module)[0, 0] = torch.nan
    updates.before_step(step({"a": 0}))
    assert torch.equal(table_of(module), before)


def test_a_bias_in_marlins_order(config: VllmConfig):
    """A bias in Marlin's order is put back in order, also after later loads."""
    module = make_module(config)
    module.rotary_emb = make_rotary(config)
    projection = module.qkv_proj
    loaded = load_biases(projection)
    key_bias.set_key_offsets(nn.ModuleList([module]))

    def process() -> None:
        projection.bias.data = marlin_permute_bias(projection.bias.data)
        projection.quant_method.kernel = MarlinFP8Kernel()
        projection._already_called_process_weights_after_loading = True
        module.attn.impl.process_weights_after_loading(torch.bfloat16)

    process()
    updates, before = WeightUpdates(config), table_of(module).clone()
    assert len(updates.layers) == 1
    updates.before_step(step({"a": 0}))
    assert torch.equal(table_of(module), before)
    load_biases(projection)
    projection.bias.data *= 3
    process()
    updates.before_step(step({"b": 0}, finished=("a",)))
    means = mean_rotary(module.rotary_emb)
    assert torch.equal(table_of(module), mean_rotated(3 * loaded, means))


def test_a_bias_in_an_unknown_order_is_not_followed(config: VllmConfig):
    module = make_module(config)
    load_biases(module.qkv_proj)
    key_bias.set_key_offsets(nn.ModuleList([module]))
    module.qkv_proj.bias.data = module.qkv_proj.bias.data.flip(0)
    module.attn.impl.process_weights_after_loading(torch.bfloat16)
    before = table_of(module).clone()
    updates = WeightUpdates(config)
    updates.before_step(step({"a": 0}))
    assert not updates.layers and torch.equal(table_of(module), before)


def test_each_worker_has_its_own(config: VllmConfig):
    module = started_module(config)
    follow_weights(make_worker(config), step({"a": 0}))
    load_biases(module.qkv_proj)
    # The first worker's request does not count for the second.
    follow_weights(make_worker(config), step({"b": 0}))
    assert torch.equal(table_of(module), wanted(module))
