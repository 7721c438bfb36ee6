# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The soft cap of attention logits: scores s become cap * tanh(s / cap).

It is computed from exp2. The tanh of NVIDIA's GPUs is off by 2**-11, which is 0.02 of a
score near a cap of 50. The error here is about 2**-22 of the cap for all scores, as of
an fp32 number near the cap.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.interface import LOG2_E

_TWICE_LOG2_E = tl.constexpr(2 * LOG2_E)


def in_base_2(logits_soft_cap: float | None) -> float | None:
    """The cap of scores in base 2, as kernels take it; None for no cap."""
    return None if logits_soft_cap is None else logits_soft_cap * LOG2_E


@triton.jit
def capped(score, soft_cap):
    """Bound scores, fp32 of any shape, in the cap's base. -inf becomes -cap."""
    power = tl.exp2(score * (_TWICE_LOG2_E / soft_cap))
    return soft_cap - 2 * soft_cap / (power + 1)
