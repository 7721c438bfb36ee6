# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for ops of quantised weights, and for a kernel without a native op."""

from typing import Any

import torch

BLOCK_N = 16
BITS = 4
HALVES = (torch.float16, torch.bfloat16)


def gemm_wna16(
    input: torch.Tensor,
    q_weight: torch.Tensor,
    output: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> None:
    """Writes `input @ weight + bias` into `output`, with a weight of 4 bits.

    Args:
        input: [m, k].
        q_weight: int32 [n / 16, k * 16 / 8], blocks of 16 columns. A block has its rows
            one after the other, with the first column in the lowest bits.
        output: [m, n].
        scales: [groups, n]; a group has consecutive k.
        zeros: int32 [groups, n / 8], the codes that stand for zero; None if all are 8.
        bias: [n], or None.
        pack_factor: Codes per int32, which must be 8.
        isa_hint: Ignored. Except for "vec", a native op has another order of operands.

    """
    if pack_factor != 32 // BITS:
        raise NotImplementedError(f"the CPU stand-ins have no {pack_factor} codes")
    k = input.shape[1]
    codes = _unpack(q_weight.view(-1, k, BLOCK_N // pack_factor))
    weight = codes.transpose(0, 1).reshape(k, -1).float()
    num_groups, n = scales.shape
    offset = torch.tensor(8.0) if zeros is None else _unpack(zeros).float()[:, None]
    weight = (weight.view(num_groups, -1, n) - offset) * scales.float()[:, None]
    # The native op also rounds before it multiplies.
    weight = weight.view(k, n).to(input.dtype)
    product = input.float() @ weight.float()
    if bias is not None:
        product += bias.float()
    output.copy_(product)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """The codes of int32s along the last dimension, lowest bits first."""
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & (2**BITS - 1)).flatten(-2)


def static_scaled_fp8_quant(
    result: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    group_shape: list[int] | None = None,
) -> None:
    """Writes `input / scale` into `result`, saturated.

    Args:
        result: FP8, [..., hidden size]. It may have more rows, which stay unchanged.
        input: [..., hidden size].
        scale: fp32, one element.
        group_shape: Must be None: the scale is for the whole tensor.

    """
    if scale.numel() != 1 or group_shape is not None:
        raise NotImplementedError("the CPU stand-ins have FP8 scales of whole tensors")
    largest = torch.finfo(result.dtype).max
    scaled = (input.float() / scale.float().reshape(())).clamp(-largest, largest)
    rows = result.view(-1, result.shape[-1])
    scaled = scaled.view(-1, result.shape[-1])
    rows[: len(scaled)] = scaled.to(result.dtype)


def multiply_fp8_without_onednn() -> None:
    """Has FP8 products computed in the same way on every CPU.

    On a CPU with AMX, PyTorch leaves them to oneDNN, whose reference is a hundred times
    slower than PyTorch's own product.
    """
    scaled_mm: Any = torch._scaled_mm
    if getattr(scaled_mm, "is_without_onednn", False):
        return

    def multiply(*args: Any, **kwargs: Any) -> torch.Tensor:
        enabled = torch.backends.mkldnn.enabled
        torch._C._set_mkldnn_enabled(False)
        try:
            return scaled_mm(*args, **kwargs)
        finally:
            torch._C._set_mkldnn_enabled(enabled)

    multiply.is_without_onednn = True  # type: ignore[attr-defined]
    torch._scaled_mm = multiply  # type: ignore[assignment]


def multiply_halves_in_fp32() -> None:
    """Has linear layers of 16-bit floats multiply in fp32, and round the sums once.

    On a CPU without instructions for such products, PyTorch takes eight times as long
    for them.
    """
    linear: Any = torch.nn.functional.linear
    if getattr(linear, "is_in_fp32", False):
        return

    def multiply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not (weight.is_cpu and x.dtype == weight.dtype and x.dtype in HALVES):
            return linear(x, weight, bias)
        bias = None if bias is None else bias.float()
        return linear(x.float(), weight.float(), bias).to(x.dtype)

    multiply.is_in_fp32 = True  # type: ignore[attr-defined]
    torch.nn.functional.linear = multiply  # type: ignore[assignment]


def emulate_nvfp4() -> None:
    """Lets layers of NVFP4 use vLLM's emulation.

    It runs anywhere, but vLLM does not list it for a CPU.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    linear._POSSIBLE_NVFP4_KERNELS.setdefault(
        PlatformEnum.CPU, [linear.EmulationNvFp4LinearKernel]
    )
