# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GPUs, by their data sheets, and the shares of bandwidth measured on an H200."""

import argparse
import re
from dataclasses import dataclass

from turbo_recipes.device import H200, Device

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU that may be bought.

    Attributes:
        device: Its driver's account. Without one, the memory is the data sheet's, less
            a hundredth or two that drivers keep.
        bandwidth: Bytes per second of its memory.
        is_measured: Whether the efficiencies below were measured on it.

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
    "RTX-3090": Gpu(Device("NVIDIA RTX 3090", int(23.6 * GIB), (8, 6), 82), 0.936e12),
    "RTX-5090": Gpu(Device("NVIDIA RTX 5090", int(31.3 * GIB), (12, 0), 170), 1.792e12),
    "A6000": Gpu(Device("NVIDIA RTX A6000", int(47.4 * GIB), (8, 6), 84), 0.768e12),
    "RTX-PRO-6000": Gpu(
        Device("NVIDIA RTX PRO 6000 Blackwell", int(94.9 * GIB), (12, 0), 188), 1.792e12
    ),
    "B200": Gpu(Device("NVIDIA B200", int(178.0 * GIB), (10, 0), 148), 8.0e12),
    # It shares its memory with the system.
    "GB10": Gpu(Device("NVIDIA GB10", int(119.0 * GIB), (12, 1), 48), 0.273e12),
}
# Compute capability and multiprocessors of a GPU that is given by numbers without them.
CAPABILITY, NUM_SMS = (8, 0), 108
NUMBERS = re.compile(r"(\d+\.?\d*):(\d+\.?\d*)(?::(\d+)\.(\d))?")


def plain(name: str) -> str:
    """Returns a GPU's name in the form that is compared."""
    return re.sub(r"[\s-]", "", name).casefold().removeprefix("nvidia")


# A driver's name that two GPUs share means the first one.
NAMED = {plain(gpu.device.name): gpu for gpu in reversed(GPUS.values())}
NAMED |= {plain(name).removeprefix("rtx"): gpu for name, gpu in GPUS.items()}
NAMED |= {plain(name): gpu for name, gpu in GPUS.items()}


def parse_gpu(text: str) -> Gpu:
    """Returns a GPU by its name, or by numbers: `GIB:GB_S`, `GIB:GB_S:CAPABILITY`.

    Case, spaces, hyphens and a leading "NVIDIA" make no difference.

    Raises:
        argparse.ArgumentTypeError: If it is neither.

    """
    if gpu := NAMED.get(plain(text)):
        return gpu
    numbers = NUMBERS.fullmatch(text)
    if numbers is None or not float(numbers[1]) or not float(numbers[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not in the list: {', '.join(GPUS)}; another GPU is given by "
            "its GiB of memory and GB/s, as in 24:936, or with its compute capability, "
            "as in 24:936:8.6"
        )
    capability = (int(numbers[3]), int(numbers[4])) if numbers[3] else CAPABILITY
    memory = int(float(numbers[1]) * GIB)
    name = f"a GPU of {numbers[1]} GiB and {numbers[2]} GB/s"
    return Gpu(Device(name, memory, capability, NUM_SMS), float(numbers[2]) * 1e9)


# Share of the bandwidth at which decode attention reads its cache, by cache dtype, for
# heads of up to 128 and for larger ones. An H200, `ci/gpu.py bench`, decode.jsonl,
# commit 591568a: 32 x 65536 tokens of 32/8 heads of 128; 32 x 32768 of 16/2 of 256.
ATTENTION = {
    "auto": (0.955, 0.909),
    "fp8": (0.622, 0.329),
    "nvfp4": (0.188, 0.216),
    "turbo4": (0.804, 0.586),
    "k4v3": (0.671, 0.514),
    "turbo3": (0.523, 0.405),
}
SMALL_HEAD = 128
# The most query heads per KV head that were measured.
MEASURED_QUERIES = 8
# Share of the bandwidth for weights and states; seconds of a step per layer and per
# sequence. They fit engine.jsonl: an 8B Llama's shape on an H200, `ci/gpu.py engine`.
WEIGHTS = 0.9
LAYER_S = 42e-6
SEQUENCE_S = 9e-6

# Microseconds of decode attention to latents of MLA, by cache dtype and by query heads
# of a GPU. An H200, `ci/gpu.py mla`, mla.jsonl, 32 x 32768 tokens. Arithmetic bounds
# caches of few bits, so their times also depend on the number of multiprocessors.
LATENT_US = {
    "auto": {8: 284.7, 16: 286.1, 20: 288.6, 32: 288.2, 64: 294.6, 128: 464.6},
    "fp8": {8: 210.8, 16: 211.2, 20: 210.8, 32: 212.5, 64: 218.9, 128: 406.9},
    "turbo4": {8: 175.5, 16: 202.3, 20: 219.1, 32: 246.9, 64: 386.2, 128: 713.2},
}
LATENT_TOKENS = 32 * 32768
# A latent of 512 and a rotary key of 64.
LATENT_SIZE = 576
# The kernels are Hopper's.
LATENT_CAPABILITY = (9, 0)


def latent_seconds(gpu: Gpu, dtype: str, queries: int, token: float) -> float | None:
    """Returns the seconds of MLA's attention to one token of a sequence's context.

    Args:
        gpu: The GPU that reads.
        dtype: The cache's dtype.
        queries: Query heads on a GPU.
        token: Bytes of a token in a layer.

    Returns:
        None if nothing like it was measured.

    """
    measured = LATENT_US.get(dtype, {})
    heads = next((count for count in measured if count >= queries), None)
    if heads is None or gpu.device.capability != LATENT_CAPABILITY:
        return None
    as_measured = measured[heads] * 1e-6 / LATENT_TOKENS
    as_computed = as_measured * H200.num_sms / gpu.device.num_sms
    return max(as_computed, token / (WEIGHTS * gpu.bandwidth))
