# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds the layers and the cache's plan of a model without weights, as an engine does.

``device.pretend`` has to be called first, and makes the platform.
"""

import base64
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mistral_common.tokens.tokenizers.base import SpecialTokens
from transformers import CONFIG_MAPPING, PreTrainedConfig
from turbo_seeded.model import write_tokenizer

from turbo_recipes.device import WithoutMemory
from turbo_recipes.shapes import Shape
from turbo_recipes.verdict import Build
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    model_parallel_is_initialized,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.transformers_utils import config as hf_configs
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.core.kv_cache_planning import (
    get_global_kv_cache_groups,
    get_kv_cache_configs,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, init_attn_backend
from vllm.v1.worker.workspace import init_workspace_manager

# Bytes that have room for a context of any length: only the layers matter here.
CACHE_MEMORY = 2**50
ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "enforce_eager": True,
    "trust_remote_code": True,
    # The choice of decode kernels does not change which models are served.
    "attention_config": {"turbo_kernel": "triton"},
}


def inspect_in_this_process() -> None:
    """Lets vLLM inspect models' classes here, and not in a process for each."""

    def inspect(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect  # type: ignore[method-assign]


def start_parallel_state() -> None:
    """Makes a world of one process, once."""
    if model_parallel_is_initialized():
        return
    # A configuration without a model makes groups for experts as well.
    with (
        tempfile.NamedTemporaryFile() as rendezvous,
        set_current_vllm_config(VllmConfig()),
    ):
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    init_workspace_manager(torch.device("meta"))


def register_stand_in(model_type: str) -> None:
    """Registers a config class without fields, for a checkpoint that brings its own."""

    class StandIn(PreTrainedConfig):
        def __init__(self, **kwargs: Any) -> None:
            for name in ("text_config", "llm_config", "vision_config"):
                value = kwargs.get(name)
                if isinstance(value, dict):
                    kind = PreTrainedConfig
                    if name != "vision_config" and value.get("model_type"):
                        kind = CONFIG_MAPPING[value["model_type"]]
                    kwargs[name] = kind(**value)
            super().__init__(**kwargs)

    StandIn.model_type = model_type
    hf_configs._CONFIG_REGISTRY[model_type] = StandIn


def write_special_tokens(folder: Path, tokens: tuple[str, ...]) -> None:
    """Writes a tokenizer of bytes and these special tokens."""
    first = write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    like = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [
        like | {"id": first + index, "content": token}
        for index, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(tokenizer))


def write_tekken(folder: Path, audio: dict[str, Any]) -> None:
    """Writes Mistral's tokenizer, of bytes, with its settings of sound."""
    special = [
        {"rank": rank, "token_str": token.value, "is_control": True}
        for rank, token in enumerate(SpecialTokens)
    ]
    vocab = [
        {
            "rank": byte,
            "token_bytes": base64.b64encode(bytes([byte])).decode(),
            "token_str": None,
        }
        for byte in range(256)
    ]
    config = {
        "pattern": r"\p{L}+|\s+|.",
        "default_vocab_size": len(vocab) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v13",
    }
    content = {"config": config, "vocab": vocab, "audio": audio}
    (folder / "tekken.json").write_text(
        json.dumps(content | {"special_tokens": special})
    )


@contextmanager
def checkpoint(shape: Shape) -> Iterator[Path]:
    """Yields a folder with a model's configuration, without its weights."""
    if shape.stand_in:
        register_stand_in(shape.config["model_type"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if shape.audio:
            write_tekken(folder, shape.audio)
        elif shape.tokens:
            write_special_tokens(folder, shape.tokens)
        files = {"config.json": {"dtype": "bfloat16"} | shape.config, **shape.files}
        for path, content in files.items():
            (folder / path).write_text(json.dumps(content))
        yield folder


def make(shape: Shape, folder: Path | str, built: Build, own: dict[str, Any]) -> None:
    """Makes the parts that an engine makes before it serves; `built` keeps them."""
    has_tokenizer = bool(shape.tokens or shape.audio)
    args = ARGS | {"skip_tokenizer_init": not has_tokenizer} | shape.args | own
    config = built.config = EngineArgs(str(folder), **args).create_engine_config()
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    without_memory = torch.device("meta"), WithoutMemory()
    with set_current_vllm_config(config), without_memory[0], without_memory[1]:
        built.stage = "layers"
        with set_default_torch_dtype(dtype):
            built.model = initialize_model(config)
        built.stage = "start"
        current_platform.update_block_size_for_backend(config)
        register_all_kvcache_specs(config)
        specs = built.specs = get_kv_cache_spec(config)
        backends = current_platform._find_non_ssm_backends(config)
        layouts = [each.name for each in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(config, [layouts], specs.values())
        built.stage = "plan"
        built.groups = get_global_kv_cache_groups(config, [dict(specs)])
        (plan,) = get_kv_cache_configs(config, [specs], [CACHE_MEMORY], built.groups)
        # Other backends' builders read tensors that have no memory.
        if is_turbo_cache_dtype(config.cache_config.cache_dtype):
            built.stage = "metadata"
            init_attn_backend(plan, config, torch.device("meta"))


def build(shape: Shape, cache_dtype: str, **own: Any) -> Build:
    """Builds a model of this shape.

    Args:
        shape: The model's shape.
        cache_dtype: The value of ``--kv-cache-dtype``.
        **own: Other arguments of ``EngineArgs``.

    """
    start_parallel_state()
    built = Build()
    try:
        with checkpoint(shape) as folder:
            make(shape, folder, built, own | {"kv_cache_dtype": cache_dtype})
    except Exception as error:
        built.error = error
    return built
