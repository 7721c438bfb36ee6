# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GPUs, by their data sheets, and how much of an H200's bandwidth was measured."""

from dataclasses import dataclass

from turbo_recipes.device import H200, Device

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU that may be bought.

    Attributes:
        device: What its driver says. Where none was asked, the memory is the data
            sheet's, less a hundredth or two that drivers keep.
        bandwidth: Of its memory, in bytes a second.
        is_measured: Whether what is below was measured on it.

    """

    device: Device
    bandwidth: float
    is_measured: bool = False


GPUS = {
    "H200": Gpu(H200, 4.8e12, is_measured=True),
    "H100": Gpu(Device("NVIDIA H100", int(79.1 * GIB), (9, 0), 132), 3.35e12),
    "H20": Gpu(Device("NVIDIA H20", int(95.1 * GIB), (9, 0), 78), 4.0e12),
    "A100": Gpu(Device("NVIDIA A100", int(79.1 * GIB), (8, 0), 108), 2.039e12),
    "A100-40GB": Gpu(Device("NVIDIA A100", int(39.4 * GIB), (8, 0), 108), 1.555e12),
    "A10": Gpu(Device("NVIDIA A10", int(22.0 * GIB), (8, 6), 72), 0.6e12),
    "RTX-4090": Gpu(Device("NVIDIA RTX 4090", int(23.5 * GIB), (8, 9), 128), 1.008e12),
    "L4": Gpu(Device("NVIDIA L4", int(22.0 * GIB), (8, 9), 58), 0.3e12),
    "L40S": Gpu(Device("NVIDIA L40S", int(44.4 * GIB), (8, 9), 142), 0.864e12),
}

# Of the bandwidth, by cache dtype, for heads of up to 128 and for larger ones: what
# decode attention reads its cache at. An H200, `ci/gpu.sh bench`, decode.jsonl, commit
# 591568a: 32 x 65536 tokens of 32/8 heads of 128, and 32 x 32768 of 16/2 heads of 256.
ATTENTION = {
    "auto": (0.955, 0.909),
    "fp8": (0.622, 0.329),
    "nvfp4": (0.188, 0.216),
    "turbo4": (0.804, 0.586),
    "k4v3": (0.671, 0.514),
    "turbo3": (0.523, 0.405),
}
SMALL_HEAD = 128
# Query heads of a KV head of what was measured, at most.
MEASURED_QUERIES = 8
# Of the bandwidth, for weights and states; microseconds a layer and a sequence of a
# step. One fit to engine.jsonl, of a Llama of 8B's shape: an H200, `ci/gpu.sh engine`.
WEIGHTS = 0.9
LAYER_S = 42e-6
SEQUENCE_S = 9e-6
