# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Products of keys' errors with the direction in which queries look, in kernels.

See ``interface.QueryDirection``. Products have the units of ``reference.unbias``: those
of errors with vectors have another unit than those with directions.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt

_PRODUCT_UNIT = tl.constexpr(float(1 << fmt.PRODUCT_FRACTION_BITS))
_SHIFT = tl.constexpr(2.0 ** (fmt.DIRECTION_FRACTION_BITS - fmt.PRODUCT_FRACTION_BITS))
_BIAS_WEIGHT = tl.constexpr(fmt.BIAS_WEIGHT)
# ``format.direction_pull`` for a head size of 1.
_PULL = tl.constexpr(fmt.direction_pull(1))
# A product with a direction, times this, is a part of the direction for a head size of
# 1, in the unit of ``load_direction``.
PART_UNIT = tl.constexpr(
    2.0 ** (fmt.PRODUCT_FRACTION_BITS - 2 * fmt.DIRECTION_FRACTION_BITS)
)


@triton.jit
def load_direction(p_direction, mask):
    """Elements of directions, fp32, in the unit of their products with ``error_of``."""
    return tl.load(p_direction, mask=mask, other=0.0).to(tl.float32) * _SHIFT


@triton.jit
def error_of(x, decoded, CODEBOOK: tl.constexpr):
    """Errors of normalised vectors, in the unit of products with vectors."""
    GAIN: tl.constexpr = CODEBOOK[2]
    return x * _PRODUCT_UNIT - decoded * GAIN


@triton.jit
def pull_of(square, HEAD_SIZE: tl.constexpr):
    """Weights of squared products with directions, beside ``square`` of the vectors."""
    PULL: tl.constexpr = _PULL / HEAD_SIZE
    return square * PULL


@triton.jit
def cost_of(rest, along, pull):
    """Costs of errors' products with vectors and with directions."""
    return rest * rest * _BIAS_WEIGHT + along * along * pull
