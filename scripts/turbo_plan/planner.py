# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Lets vLLM plan a model's KV cache on a GPU that is not there.

``turbo_recipes.device.pretend`` has to be called first, with the GPU.
"""

import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn
from turbo_recipes import build
from turbo_recipes.shapes import Shape
from turbo_recipes.verdict import Build

from turbo_plan.estimate import Experts, LayerCache, Model, Weights
from turbo_plan.gpus import GIB, Gpu
from turbo_plan.report import NO_CACHE
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.ops.turbo.cuda.decode import num_queries_at_once
from vllm.v1.core.kv_cache_planning import get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
# Bytes beside weights and activations: CUDA's context, the kernels' workspaces.
OTHER_BYTES = int(0.6 * GIB)
# Bytes per sequence and token of the vocabulary: logits in the model's dtype and in
# fp32, and the sampler's copies. From an H100: 1024 sequences of an 8B Llama's shape.
SAMPLING_BYTES = 12
# Fields of a specification whose layer does not see all tokens.
WINDOWS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True)
class Planned:
    """vLLM's plan for a cache dtype, for each GPU.

    Attributes:
        dtype: The cache's dtype.
        refused: Why it is not served; nothing else is known then.
        model: The weights and the cache that a step reads.
        cache_bytes: Bytes left for the cache; less than 0 if not even weights fit.
        tokens: Tokens that fit, in sequences as long as the context; 0 if none fits.
        users: Sequences as long as the context that fit.
        block_size: Tokens of a block.
        heads: Query heads of the whole model, which GPUs divide.
        is_quantised: Whether the weights are quantised.

    """

    dtype: str
    refused: str | None = None
    model: Model | None = None
    cache_bytes: int = 0
    tokens: int = 0
    users: float = 0
    block_size: int = 0
    heads: int = 0
    is_quantised: bool = False


def checkpoint_bytes(folder: Path) -> int | None:
    """Returns the bytes of a checkpoint's weights, if they or their index are there."""
    if (folder / INDEX).exists():
        content = json.loads((folder / INDEX).read_text())
        return content.get("metadata", {}).get("total_size")
    return (folder / WHOLE).stat().st_size if (folder / WHOLE).exists() else None


def num_bytes(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())


def weights_of(model: nn.Module, config: VllmConfig, size: int | None) -> Weights:
    """Returns the weights that a step reads, without towers for images and sound.

    Args:
        model: The model, without weights.
        config: The engine's configuration.
        size: Bytes of all weights in memory, if known.

    """
    language: Any = model
    if supports_multimodal(model):
        language = model.get_language_model()
    read, hidden = num_bytes(language), config.model_config.get_hidden_size()
    heads = [each for each in model.modules() if isinstance(each, ParallelLMHead)]
    read_whole = {id(head.weight) for head in heads}
    for table in language.modules():
        if not isinstance(table, VocabParallelEmbedding) or isinstance(
            table, ParallelLMHead
        ):
            continue
        # A step reads a few rows of the table, unless it is the head as well.
        is_head = not heads and table.embedding_dim == hidden
        if not is_head and id(table.weight) not in read_whole:
            read -= num_bytes(table)
    experts = []
    for module in language.modules():
        if isinstance(module, RoutedExperts):
            moe = module.moe_config
            count, chosen = moe.num_experts, moe.experts_per_token
            experts.append(Experts(num_bytes(module), count, chosen))
    read -= sum(each.size for each in experts)
    layers = config.model_config.get_total_num_hidden_layers()
    return Weights(size or num_bytes(model), read, layers, experts)


def cache_of(name: str, spec: KVCacheSpec, config: VllmConfig) -> LayerCache | None:
    """Returns a layer's cache; None if the specification is of something beside it."""
    if isinstance(spec, MambaSpec):
        return LayerCache(state=spec.real_page_size_bytes)
    if not isinstance(spec, AttentionSpec) or isinstance(spec, CircularBufferSpec):
        return None
    windows = (getattr(spec, each, None) for each in WINDOWS)
    layer = config.compilation_config.static_forward_context[name]
    queries = math.ceil(getattr(layer, "num_heads", 0) / spec.num_kv_heads)
    readings = 1
    # Latents are read once for all heads.
    if spec.kv_quant_mode.is_turbo and not isinstance(spec, MLAAttentionSpec):
        readings = math.ceil(queries / num_queries_at_once(spec.head_size, queries))
    return LayerCache(
        token=spec.real_page_size_bytes / spec.block_size,
        window=next(filter(None, windows), None),
        head_size=spec.head_size,
        dtype="auto" if spec.dtype == config.model_config.dtype else None,
        queries=queries,
        readings=readings,
        is_latent=isinstance(spec, MLAAttentionSpec),
    )


def activation_bytes(config: VllmConfig) -> int:
    """Returns about as many bytes as the largest step needs beside the weights."""
    text = config.model_config.hf_text_config
    hidden = config.model_config.get_hidden_size()
    inner = getattr(text, "intermediate_size", None) or 0
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    expert = chosen * (getattr(text, "moe_intermediate_size", None) or inner)
    inner = max(inner, expert) // config.parallel_config.tensor_parallel_size
    values = 3 * inner + (4 + chosen) * hidden
    layers = 2 * values * config.scheduler_config.max_num_batched_tokens
    vocabulary = config.model_config.get_vocab_size()
    rows = config.scheduler_config.max_num_seqs
    # A layer's activations are gone when tokens are sampled.
    return max(layers, SAMPLING_BYTES * rows * vocabulary)


def served_sequences() -> int:
    """Returns the number of requests that a server runs at once by default."""
    _, at_once = EngineArgs.get_batch_defaults(1)
    return at_once[UsageContext.OPENAI_API_SERVER]


def known_arguments() -> set[str]:
    """Returns the names of vLLM's engine arguments."""
    return {field.name for field in fields(EngineArgs)}


def longest_context(model: str, **args: Any) -> int | None:
    """Returns a model's longest context; None if vLLM does not read its config.

    Args:
        model: A folder or a name.
        **args: Arguments of ``EngineArgs``, without `max_model_len`.

    """
    try:
        own = {"skip_tokenizer_init": True, "distributed_executor_backend": "mp"}
        config = EngineArgs(model, **(own | args)).create_model_config()
    except Exception:
        # The plan says why.
        return None
    return config.max_model_len


def why(error: Exception) -> str:
    """Returns an error's message on one line, without pydantic's heading and input."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    message = re.sub(r"^\w+: \d+ validation errors? for \w+ ", "", message)
    message = re.sub(r"^(Value error|Assertion failed), ", "", message)
    return message.partition(" [type=")[0].partition(" For further information")[0]


def divide(tensor_parallel: int) -> None:
    """Lets layers take one GPU's share of the model, without other GPUs."""
    build.start_parallel_state()
    get_tp_group().world_size = tensor_parallel


def plan(
    model: str, dtype: str, gpu: Gpu, cache_bytes: int | None = None, **args: Any
) -> Planned:
    """Returns vLLM's plan for one cache dtype.

    Args:
        model: A folder or a name.
        dtype: The cache's dtype.
        gpu: The GPU that this process seems to have.
        cache_bytes: Bytes of the cache; None for all the memory left.
        **args: Arguments of ``EngineArgs``, with `max_model_len`, the context.

    """
    divide(args.get("tensor_parallel_size", 1))
    has_tokenizer = any(Path(model).glob("tokenizer*")) or not Path(model).is_dir()
    own = {"skip_tokenizer_init": not has_tokenizer, "kv_cache_dtype": dtype}
    own |= {"distributed_executor_backend": "mp", "dtype": "auto"}
    built, shape = Build(), Shape("", "", "", {}, ())
    try:
        build.make(shape, model, built, own | args)
    except Exception as error:
        return Planned(dtype, why(error))
    config = built.config
    assert config is not None and built.model is not None
    if not built.specs:
        return Planned(dtype, NO_CACHE)
    size = checkpoint_bytes(Path(model))
    if size is not None:
        size //= config.parallel_config.tensor_parallel_size
    weights = weights_of(built.model, config, size)
    layers = (cache_of(*each, config) for each in built.specs.items())
    found = Model(weights, [layer for layer in layers if layer])
    if cache_bytes is None:
        share = config.cache_config.gpu_memory_utilization
        used = weights.size + activation_bytes(config) + OTHER_BYTES
        cache_bytes = int(gpu.device.memory * share) - used
    tokens, users = 0, 0.0
    try:
        (cache,) = get_kv_cache_configs(
            config, [built.specs], [cache_bytes], built.groups
        )
        tokens, users = get_kv_cache_capacity(config, cache)
    except ValueError:
        # No sequence fits, and the numbers stay 0.
        pass
    return Planned(
        dtype,
        model=found,
        cache_bytes=cache_bytes,
        tokens=tokens,
        users=users,
        block_size=config.cache_config.block_size,
        heads=config.model_config.model_arch_config.total_num_attention_heads,
        is_quantised=config.model_config.quantization is not None,
    )
