# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a text through a model that has no cache yet: it measures ``keys.means``."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_pp_group, model_parallel_is_initialized
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import set_forward_context
from vllm.lora.layers import LoRAMapping
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.interfaces import (
    requires_raw_input_tokens,
    supports_multimodal,
)
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.ops.turbo.keys import offset as key_offset
from vllm.v1.attention.ops.turbo.keys.means import Means
from vllm.v1.attention.ops.turbo.keys.pass_states import PassStates, state_layers
from vllm.v1.attention.ops.turbo.keys.text_pass import PassError, TextPass

# Tokens that run at once, whatever the engine's steps. Rounding depends on this number.
SLICE_TOKENS = 256


class PassRunner(Protocol):
    """The part of a model runner that a pass needs."""

    device: torch.device

    def get_model(self) -> nn.Module:
        """The model, without wrappers of CUDA graphs."""


# Attention layers by name, and the modules around them.
Layers = dict[str, tuple[Attention | MLAAttention, nn.Module]]


def attention_layers(model: nn.Module) -> Layers:
    """A model's layers with K and V, or with latents, of any cache dtype."""
    return {
        layer.layer_name: (layer, parent)
        for parent in model.modules()
        for layer in parent.children()
        if isinstance(layer, MLAAttention)
        or (isinstance(layer, Attention) and layer.attn_type == AttentionType.DECODER)
    }


def inverses(
    model: nn.Module, layers: Layers, count: int
) -> dict[str, key_offset.Rotary | None]:
    """The inverse of RoPE of layers with K whose RoPE is known, for some positions."""
    known: dict[nn.Module | None, key_offset.Rotary | None] = {None: None}
    found = {}
    for name, (layer, parent) in layers.items():
        if isinstance(layer, MLAAttention):
            continue
        try:
            rotary = key_offset.find_rotary(parent, model)
            if rotary is not None and rotary not in known:
                known[rotary] = key_offset.inverse_rotary(rotary, count)
        except key_offset.UnknownRotation:
            continue
        found[name] = known[rotary]
    return found


class Pass(NamedTuple):
    """A pass of a model.

    Attributes:
        text_pass: The attention of its layers.
        states: The states of its other layers; None if it has none.

    """

    text_pass: TextPass
    states: PassStates | None


def make_pass(
    runner: PassRunner,
    vllm_config: VllmConfig,
    num_text: int,
    num_tokens: int,
    stack: ExitStack,
) -> Pass:
    """A pass in which a model's layers attend until a stack is left.

    Raises:
        PassError: If a layer is of another class, or its states are of a kind that only
            decodes keep.

    """
    # Imported here, because the module has layers of one family.
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    model = runner.get_model()
    # The pass attends to all tokens, as models do whose lists are as long as the text.
    known = Attention | MLAAttention | MambaBase | DeepseekV32IndexerCache
    for module in model.modules():
        if isinstance(module, AttentionLayerBase) and not isinstance(module, known):
            name = type(module).__name__
            raise PassError(f"layers of {name} have caches or states of other kinds")
    layers = attention_layers(model)
    text_pass = TextPass(inverses(model, layers, num_text), num_text, num_tokens)
    stack.enter_context(text_pass.running([layer for layer, _ in layers.values()]))
    # Without it, small functions of layers would be compiled for each size of slices.
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    found = state_layers(model, vllm_config)
    if not found:
        return Pass(text_pass, None)
    if vllm_config.cache_config.use_replayssm:
        raise PassError("--use-replayssm")
    others = list(get_layers_from_vllm_config(vllm_config, Attention | MLAAttention))
    sizes = num_text, num_tokens
    states = PassStates(found, others, *sizes, vllm_config, runner.device)
    stack.enter_context(states.bound())
    return Pass(text_pass, states)


@torch.inference_mode()
def run_pass(
    runner: PassRunner, vllm_config: VllmConfig, text: list[int], first: list[int]
) -> Means:
    """The means of this rank's layers and heads.

    All ranks call this at the same time, before there is a cache.

    Args:
        runner: The engine's model runner, with a loaded model.
        vllm_config: The engine's configuration.
        text: Tokens of a text.
        first: The tokens of sequences of one token.

    Raises:
        PassError: If the model takes other arguments, or a layer cannot attend.

    """
    tokens = torch.tensor(text + first, device=runner.device)
    positions = torch.zeros_like(tokens)
    positions[: len(text)] = torch.arange(len(text), device=runner.device)
    step = min(SLICE_TOKENS, vllm_config.scheduler_config.max_num_batched_tokens)
    passes: list[Pass] = []

    def run(start: int, received: IntermediateTensors | None) -> object:
        if not passes:
            sizes = len(text), len(tokens)
            passes.append(make_pass(runner, vllm_config, *sizes, stack))
        text_pass, states = passes[0]
        text_pass.begin(start)
        end = min(start + step, len(text) if start < len(text) else len(tokens))
        metadata = states.begin(start, end) if states else None
        inputs = tokens[start:end], positions[start:end]
        return _run_model(runner, vllm_config, *inputs, metadata, received)

    stages = get_pp_group() if model_parallel_is_initialized() else None
    with ExitStack() as stack:
        starts = [*range(0, len(text), step), *range(len(text), len(tokens), step)]
        run_stage(run, starts, stages)
    return passes[0].text_pass.means


def run_stage(
    run: Callable[[int, IntermediateTensors | None], object],
    starts: Iterable[int],
    stages: GroupCoordinator | None,
) -> None:
    """Run slices through this rank's layers, after the stage before and for the next.

    A stage that fails sends no tensors for the slices that are left. Then the next one
    fails as well, and none waits for ever.

    Args:
        run: Runs the slice that starts at a token, with the tensors from the stage
            before, and returns the model's output.
        starts: Where the slices start.
        stages: The group of pipeline stages; None for one stage.

    Raises:
        PassError: If an earlier stage has failed. Other errors are those of ``run``.

    """
    problem: Exception | None = None
    for start in starts:
        received = None
        if stages is not None and not stages.is_first_rank:
            tensors = stages.recv_tensor_dict()
            if not tensors and problem is None:
                problem = PassError("an earlier pipeline stage has failed")
            received = IntermediateTensors(tensors or {})
        result = None
        if problem is None:
            try:
                result = run(start, received)
            except Exception as error:  # a model's may be of any class
                problem = error
        if stages is not None and not stages.is_last_rank:
            sent = result.tensors if isinstance(result, IntermediateTensors) else {}
            stages.send_tensor_dict(sent)
    if problem is not None:
        raise problem


def _run_model(
    runner: PassRunner,
    vllm_config: VllmConfig,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    metadata: dict[str, Any] | None,
    received: IntermediateTensors | None,
) -> object:
    """Run a slice of a pass through this rank's layers, without compiled graphs."""
    model = runner.get_model()
    if vllm_config.model_config.uses_mrope:
        positions = positions.expand(3, -1).contiguous()
    lora_manager = getattr(runner, "lora_manager", None)
    if lora_manager is not None:
        mapping = LoRAMapping((0,) * len(tokens), (0,), is_prefill=True)
        lora_manager.set_active_adapters(set(), mapping)
    inputs: dict[str, object] = {"input_ids": tokens, "inputs_embeds": None}
    with set_forward_context(
        metadata, vllm_config, num_tokens=len(tokens), skip_compiled=True
    ):
        if received is None and supports_multimodal(model):
            inputs["inputs_embeds"] = model.embed_input_ids(tokens)
            if not requires_raw_input_tokens(model):
                inputs["input_ids"] = None
        inputs |= {"positions": positions, "intermediate_tensors": received}
        try:
            inspect.signature(model.forward).bind(**inputs)
        except TypeError as error:
            raise PassError(f"the model takes other arguments: {error}") from error
        return model(**inputs)
