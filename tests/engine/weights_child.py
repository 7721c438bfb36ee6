# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds a model as on an H200, and prints the methods by which modules hold weights.

Usage: weights_child.py FOLDER, which has a config.json.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from turbo_recipes import device  # noqa: E402

device.pretend()

from turbo_recipes import build  # noqa: E402

from vllm import EngineArgs  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402


def main() -> None:
    build.inspect_in_this_process()
    build.start_parallel_state()
    args = build.ARGS | {"skip_tokenizer_init": True, "kv_cache_dtype": "turbo4"}
    config = EngineArgs(sys.argv[1], **args).create_engine_config()
    with (
        set_current_vllm_config(config),
        torch.device("meta"),
        build.WithoutMemory(),
        set_default_torch_dtype(torch.bfloat16),
    ):
        model = initialize_model(config)
    methods = defaultdict(set)
    for name, module in model.named_modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            methods[type(method).__name__].add(name.rpartition(".")[2])
    print(json.dumps({name: sorted(found) for name, found in methods.items()}))


main()
