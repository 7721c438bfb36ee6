# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The most query tokens of an extend, as measured.

With more query tokens, an extend's kernel decodes the cached context in so many passes
that dequantising it once for FlashAttention is faster. The limit depends on the kernel,
which the GPU's architecture decides, and on the heads.
"""

from collections.abc import Mapping
from typing import TypeAlias

# The most query tokens of an extend, by head size and query heads a KV head.
ExtendLimits: TypeAlias = Mapping[int, Mapping[int, int]]

# A limit is the most query tokens with which "extend" takes no longer than "prefill" at
# any shape of the command. The tuning tables have us of an extend / a prefill, by query
# tokens, at the shape that decides. All are from an H200, 2026-11, `ci/gpu.py extend`.

# Query tokens of a request, and queries of a KV head, for GPUs and heads that were not
# measured. The kernel of other GPUs was run on the H200:
# heads of 128, 64 x 4096: 1200 / 1324 for 64, 2404 / 1721 for 128.
MAX_EXTEND_LEN = 64
_MAX_EXTEND_QUERIES = 256

# By compute capability:
# heads of 64, 64 x 4096: 1184 / 1270 for 64, 2326 / 1819 for 128.
# heads of 128, 64 x 4096: 1567 / 1721 for 128, 3088 / 2834 for 256.
# heads of 256, 16 x 32768: 1009 / 1521 for 64. 2147 / 2196 for 128 is too close: other
# shapes may take longer.
_MEASURED: dict[int, ExtendLimits] = {90: {64: {8: 64}, 128: {4: 128}, 256: {8: 64}}}
# The same for kernels that end in outputs:
# heads of 64, 64 x 4096: 3012 / 3254 for 256.
# heads of 128, 64 x 4096: 2346 / 2865 for 256.
# heads of 128, 16 x 32768: 8482 / 7561 for 512.
_MEASURED_OUTPUTS: dict[int, ExtendLimits] = {90: {64: {8: 256}, 128: {4: 256}}}


def max_extend_len(
    head_size: int,
    num_queries_per_kv: int,
    capability: int | None = None,
    to_outputs: bool = False,
) -> int:
    """The most query tokens of a request that is served as an extend.

    A number of query heads between two that were measured has the limit of the larger
    one. A number above all of these has the limit that gives a KV head as many queries.

    Args:
        head_size: D.
        num_queries_per_kv: Query heads a KV head.
        capability: Compute capability of the GPU, such as 90; None if unknown.
        to_outputs: Whether ``extend_outputs`` serves, not ``extend_attention``.

    """
    measured = _MEASURED_OUTPUTS if to_outputs else _MEASURED
    limits = measured.get(capability or 0, {}).get(head_size)
    if not limits:
        few = _MAX_EXTEND_QUERIES // num_queries_per_kv
        return min(MAX_EXTEND_LEN, max(1, few))
    covering = [group for group in limits if group >= num_queries_per_kv]
    if covering:
        return limits[min(covering)]
    largest = max(limits)
    return max(1, limits[largest] * largest // num_queries_per_kv)
