# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The emulated GPU in place of a real one, for the turbo CUDA kernels."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_turbo_cpu_standins.cuda.build import build, load

# Multiprocessors are few, because each has blocks in a launch: see src/runtime.cc.
PROPERTIES = SimpleNamespace(
    name="emulated", multi_processor_count=4, shared_memory_per_block_optin=227 << 10
)
# Some kernels are chosen by the capability.
CAPABILITY = (9, 0)
# Tokens that share an offset of K. They are as few as kernels allow, so that short
# tests have several segments.
OFFSET_SEGMENT = 128


@cache
def install() -> None:
    """Has vLLM's turbo CUDA kernels built and run on the CPU, in this process.

    Tensors on the CPU then count as the GPU's.
    """
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.ops.turbo import interface
    from vllm.v1.attention.ops.turbo.cuda import build as cuda_build

    def build_emulated(module: Any, device: torch.device) -> Path:
        return build(
            module.source,
            cuda_build.SOURCE_DIR,
            f"{module.kernel}_{module.instance}",
            {cuda_build.HEADER_NAME: module.header},
            module.flags,
        )

    def load_emulated(path: Path, name: str) -> Any:
        return load(path, name)

    interface.OFFSET_SEGMENT = OFFSET_SEGMENT
    cuda_build.find = lambda module, device: None
    cuda_build.build = build_emulated
    cuda_build._load_function = load_emulated
    torch.cuda.get_device_properties = lambda device=None: PROPERTIES
    count = PROPERTIES.multi_processor_count
    type(current_platform).num_compute_units = classmethod(lambda *_: count)
    capability = DeviceCapability(*CAPABILITY)
    type(current_platform).get_device_capability = classmethod(
        lambda *_, **__: capability
    )
