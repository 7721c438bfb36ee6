# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A GPU that is not there, by default an H200: the answers that vLLM wants from one
before a kernel runs.

``pretend`` makes a process see it: vLLM's own CUDA platform with its lists of
attention backends, on a machine without a driver. Empty modules replace those that
cannot be loaded there: extensions that link CUDA's libraries, and packages from which
models only import names. Call it before vLLM is imported.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class Device(NamedTuple):
    """A driver's account of a GPU.

    Attributes:
        name: The GPU's name.
        memory: Bytes.
        capability: Compute capability.
        num_sms: Streaming multiprocessors.

    """

    name: str
    memory: int
    capability: tuple[int, int]
    num_sms: int


H200 = Device("NVIDIA H200", 150_110_011_392, (9, 0), 132)
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_NO_USAGE_STATS": "1",
    # We catch refusals, and report them.
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_PLUGINS": "",
    # vLLM believes in Triton without a driver if there is an interpreter.
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # With it, vLLM imports a package that is not here.
    "VLLM_KIMI_K3_GEMM_AR": "0",
}
# Extensions whose operators only kernels call.
EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._flashkda_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
HOLLOW_PACKAGES = ("torchvision", "vllm.third_party.deep_gemm")
# Operators that are called while modules are imported, and their answers on a Hopper.
ANSWERS = {
    "cutlass_scaled_mm_supports_fp8": True,
    "cutlass_scaled_mm_supports_block_fp8": True,
    "cutlass_group_gemm_supported": True,
    "cutlass_scaled_mm_supports_fp4": False,
    "mxfp4_experts_quant_supported": False,
}

# A Library takes its operators with it when it is collected.
_libraries: list[torch.library.Library] = []


class WithoutMemory(TorchFunctionMode):
    """Gives a shape, and no bytes, to all tensors that a model makes on the GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = "meta"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


class AnyName(type):
    """A class whose attributes are such classes, whatever their names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # A name without a subclass is called as a function.
        return 0 if cls.__base__ is object else super().__call__(*args, **kwargs)


class HollowModule(ModuleType):
    """A package with every name."""

    __path__: list[str] = []
    __file__ = "none"
    # transformers asks for torchvision's version.
    __version__ = "0.27"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})


class HollowFinder:
    """Finds the modules of hollow packages, for ``sys.meta_path``."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{each}.") for each in self.packages):
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return HollowModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Kernel:
    """An operator that a layer holds, and nobody calls."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> "Kernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self.name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{self.name} runs on a GPU")


class Kernels(torch._ops._OpNamespace):
    """A namespace of operators whose missing operators are kernels."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return Kernel(name)


class Inert:
    """A stream or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _make_platform(seen: Device) -> Any:
    from vllm.platforms.interface import DeviceCapability

    cuda: Any = importlib.import_module("vllm.platforms.cuda")

    class Platform(cuda.CudaPlatformBase):
        device_name = seen.name

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*seen.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return seen.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return seen.memory

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return seen.num_sms

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

    return Platform()


def _fill_torch(seen: Device) -> None:
    """Lets PyTorch describe the device, and have operators that are missing."""
    properties = SimpleNamespace(
        name=seen.name,
        major=seen.capability[0],
        minor=seen.capability[1],
        multi_processor_count=seen.num_sms,
        total_memory=seen.memory,
    )
    torch_module: Any = torch
    torch_module.accelerator.current_device_index = lambda: 0
    torch_module.accelerator.empty_cache = lambda: None
    torch_module.cuda.current_device = lambda: 0
    torch_module.cuda.get_device_properties = lambda device=None: properties
    torch_module.cuda.Stream = torch_module.cuda.Event = Inert
    torch_module.ops._flashkda_C.get_workspace_size = lambda *args: 0
    for namespace in (torch.ops._C, torch.ops._moe_C, torch.ops._C_cache_ops):
        namespace.__class__ = Kernels


def pretend(seen: Device = H200, packages: Sequence[str] = ()) -> None:
    """Lets this process see one GPU.

    Args:
        seen: The GPU.
        packages: More packages that seem to be installed, and are hollow.

    """
    os.environ.update(ENVIRONMENT)
    sys.meta_path.insert(0, HollowFinder((*HOLLOW_PACKAGES, *packages)))  # type: ignore[arg-type]
    for name in EXTENSIONS:
        sys.modules[name] = ModuleType(name)
    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)
    for name, answer in ANSWERS.items():
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda _, answer=answer: answer, "CompositeExplicitAutograd")

    platforms: Any = importlib.import_module("vllm.platforms")
    platforms._current_platform = _make_platform(seen)
    # This registers fake versions of the operators that exist, so it has to come first.
    importlib.import_module("vllm._custom_ops")
    _fill_torch(seen)
