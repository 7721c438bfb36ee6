# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for the copies between a GPU's pages and the host's memory.

vLLM's offloading asks a GPU's driver for them. Here pages are in the host's memory
already, and copies are done at once: streams order nothing, and events are over. vLLM
still decides on the copies, their places and their times.
"""

import ctypes
import time
from dataclasses import replace
from functools import cache
from typing import Any

import torch


class Stream:
    """A stream that does its work at once."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_event(self, event: "Event") -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class Event:
    """An event that is over when it is recorded."""

    def __init__(self, **options: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return (end.seconds - self.seconds) * 1e3


class HostTorch:
    """PyTorch, except for its streams and events."""

    Event = Event

    class cuda:
        Event = Event
        Stream = Stream
        current_stream = Stream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Pages(torch.Tensor):
    """Pages that vLLM takes for a GPU's."""

    @property
    def is_cuda(self) -> bool:
        return True


def _copy(destination: int, source: int, size: int) -> None:
    ctypes.memmove(destination, source, size)


def swap_blocks_batch(
    src_ptrs: torch.Tensor,
    dst_ptrs: torch.Tensor,
    sizes: torch.Tensor,
    is_src_access_order_any: bool = False,
) -> None:
    """Copies `sizes[i]` bytes from the address `src_ptrs[i]` to `dst_ptrs[i]`.

    Args:
        src_ptrs: int64 [copies].
        dst_ptrs: int64 [copies].
        sizes: int64 [copies].
        is_src_access_order_any: Ignored.

    """
    for args in zip(dst_ptrs.tolist(), src_ptrs.tolist(), sizes.tolist()):
        _copy(*args)


def memcpy_batch(dsts: int, srcs: int, sizes: int, count: int, *rest: Any) -> int:
    """Does what the driver's `cuMemcpyBatchAsync` does.

    Args:
        dsts: The address of `count` destination addresses.
        srcs: The address of `count` source addresses.
        sizes: The address of `count` sizes.
        count: The number of copies.
        rest: Attributes and the stream.

    Returns:
        0, for success.

    """
    array = ctypes.c_uint64 * count
    columns = (array.from_address(each) for each in (dsts, srcs, sizes))
    for args in zip(*columns):
        _copy(*args)
    return 0


@cache
def emulate_offloading() -> None:
    """Lets OffloadingConnector and SimpleCPUOffloadConnector run on a CPU."""
    from vllm import _custom_ops
    from vllm.v1.kv_offload.cpu import gpu_worker
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.simple_kv_offload import (
        copy_backend,
        cuda_mem_ops,
        disk_backend,
        worker,
    )

    make_worker = gpu_worker.CPUOffloadingWorker.__init__

    def make(worker: Any, kv_caches: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [
            replace(each, tensor=each.tensor.as_subclass(Pages))
            for each in kv_caches.tensors
        ]
        make_worker(worker, replace(kv_caches, tensors=tensors), *args, **kwargs)

    def get_worker(spec: CPUOffloadingSpec, kv_caches: Any) -> Any:
        # vLLM's own function asks for a GPU first.
        if spec._worker is None:
            spec._worker = spec.create_worker(kv_caches)
        return spec._worker

    host = HostTorch()
    gpu_worker.CPUOffloadingWorker.__init__ = make
    for module in (gpu_worker, copy_backend, disk_backend, worker):
        module.torch = host
    _custom_ops.swap_blocks_batch = swap_blocks_batch
    CPUOffloadingSpec.get_worker = get_worker
    # The function, and the number of attributes that it takes.
    cuda_mem_ops._batch_memcpy = memcpy_batch, 1
    disk_backend.pin_tensor = lambda tensor: None
