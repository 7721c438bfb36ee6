# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The part of a layer at work that all kinds of layouts share: kernels and scratch."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Generic

import torch

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.attention.ops.turbo.choose import (
    ChosenKernels,
    KernelSource,
    KernelsT,
    share_kernels,
    start_builds,
)
from vllm.v1.attention.ops.turbo.interface import TORCH, TensorSpecs
from vllm.v1.attention.ops.turbo.layer.scratch import take_scratch
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape, num_bytes


def num_draft_slots(vllm_config: VllmConfig) -> int:
    """Query tokens of a request that a drafter's first pass adds to the last step's.

    That pass takes all query tokens of the step before it, rejected ones included.
    """
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else speculative.max_num_new_slots_for_drafting


def decode_query_len(vllm_config: VllmConfig) -> int:
    """The most query tokens of a decode request, also in drafters."""
    return max_decode_query_len(vllm_config) + num_draft_slots(vllm_config)


class Runner(ABC, Generic[KernelsT]):
    """One layer, with the kernels that were chosen for it.

    Attributes:
        shape: Heads, head size and dtype; with MLA the latent as the one KV head.
        stored: Whether query tokens are also read from the cache.
        kernel_choice: ``attention_config.turbo_kernel``.
        max_num_seqs: The most requests of a step.
        max_num_tokens: The most query tokens of a step.
        cache_config: vLLM's ``CacheConfig``, whose block size may be set after the
            layers are made.
        num_sms: Multiprocessors of the GPU.

    """

    def __init__(self, shape: LayerShape, vllm_config: VllmConfig) -> None:
        self.shape = shape
        self.stored = vllm_config.attention_config.turbo_prefill == "stored"
        self.kernel_choice = vllm_config.attention_config.turbo_kernel
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.cache_config = vllm_config.cache_config
        self.num_sms = 1
        if not current_platform.is_cpu():
            device = torch.accelerator.current_device_index()
            self.num_sms = num_compute_units(device)

    @property
    @abstractmethod
    def source(self) -> KernelSource[KernelsT]:
        """The sets of kernels to choose from; equal for layers that share a choice."""

    @property
    def expected_source(self) -> KernelSource[KernelsT]:
        """The source of the kernels that are built before all of it is known."""
        return self.source

    @property
    @abstractmethod
    def launch_key(self) -> tuple[object, ...]:
        """The key of layers that launch the same kernels."""

    @abstractmethod
    def largest_scratch(self) -> list[TensorSpecs]:
        """The largest tensors of each request to the workspace, over all steps."""

    def run_collectives(self, device: torch.device) -> None:
        """Exchange as much data with other ranks as the largest step does."""

    def start_builds(self) -> None:
        """Begin to build the kernels; ``chosen_kernels`` waits for their end."""
        if not current_platform.is_cpu():
            start_builds(self.kernel_choice, self.expected_source)

    @cached_property
    def chosen_kernels(self) -> ChosenKernels[KernelsT]:
        """The kernels, shared by layers of a shape. This may build them."""
        if current_platform.is_cpu():
            return ChosenKernels(None)
        return share_kernels(self.kernel_choice, self.source)

    @property
    def kernels(self) -> KernelsT | None:
        """The kernels that store and attend; None if PyTorch does."""
        return self.chosen_kernels.kernels

    @kernels.setter
    def kernels(self, kernels: KernelsT | None) -> None:
        """Use these kernels for this layer alone."""
        self.chosen_kernels = ChosenKernels(kernels)

    @property
    def entry_points(self) -> KernelsT:
        """The kernels, for a layer that has some."""
        kernels = self.kernels
        assert kernels is not None
        return kernels

    @property
    def runs_torch(self) -> bool:
        """Whether PyTorch's operators store and attend."""
        return self.kernels is None or self.kernels.name == TORCH

    @property
    def kernels_used(self) -> str:
        """The kernels that store and decode, and the reason, for users."""
        if self.runs_torch:
            return "PyTorch's operators, because this is a CPU"
        return f"{self.entry_points.name} kernels, because {self.entry_points.reason}"

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory that the profile run reserves."""
        return 0 if self.runs_torch else max(map(num_bytes, self.largest_scratch()))

    def reserve(self, device: torch.device) -> None:
        """Allocate the largest step's scratch, and tensors that kernels keep."""
        for specs in self.largest_scratch():
            take_scratch(specs, device)
        # Made here, and not in the memory pool of a CUDA graph.
        for size in {self.shape.head_size, self.shape.head_size_v}:
            self.entry_points.make_matrices(size, device)
