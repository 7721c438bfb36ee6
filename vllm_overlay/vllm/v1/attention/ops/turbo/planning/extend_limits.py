# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Up to how many query tokens a request is an extend, by what was measured.

Of more, so many passes would decode its cached context that dequantising it once for
FlashAttention is faster: where the ways meet depends on the kernel, which is one of the
GPU's kind, and on the heads.
"""

from collections.abc import Mapping
from typing import TypeAlias

# By head size and query heads a KV head, the most query tokens of an extend.
ExtendLimits: TypeAlias = Mapping[int, Mapping[int, int]]

# Query tokens of a request, and queries of a KV head, where nothing was measured. On an
# H200 in November 2026 the kernel of other GPUs took 1200 us for 64 sequences of 4096,
# with 64 tokens each, and dequantising 1324; with 128 tokens each 2404 and 1721.
MAX_EXTEND_LEN = 64
_MAX_EXTEND_QUERIES = 256

# By compute capability: the most with which "extend" takes no longer than "prefill" at
# any shape of `ci/gpu.py extend`. On an H200 in November 2026, 64 sequences of 4096
# decide: with 128 tokens each 1567 us against 1721, with 256 3088 against 2834. With
# heads of 64 and 64 tokens each it is 1184 against 1270, with 128 2326 against 1819. 16
# sequences of 32768 take with heads of 256 and 64 tokens 1009 against 1521, with 128
# 2147 against 2196, which at other shapes may be more.
_MEASURED: dict[int, ExtendLimits] = {90: {64: {8: 64}, 128: {4: 128}, 256: {8: 64}}}
# The same of kernels that end in outputs: with 256 tokens each 2346 us against 2865,
# but with 512 16 sequences of 32768 take 8482 against 7561. With heads of 64 and 256
# tokens each it is 3012 against 3254.
_MEASURED_OUTPUTS: dict[int, ExtendLimits] = {90: {64: {8: 256}, 128: {4: 256}}}


def max_extend_len(
    head_size: int,
    num_queries_per_kv: int,
    capability: int | None = None,
    to_outputs: bool = False,
) -> int:
    """Query tokens of a request that ``extend_attention`` is to serve, at most.

    A number of query heads between two that were measured has the limit of the larger
    one. A still larger number has the limit that gives a KV head as many queries.

    Args:
        head_size: D.
        num_queries_per_kv: Query heads a KV head.
        capability: Compute capability of the GPU, such as 90; None for none.
        to_outputs: Whether it is ``extend_outputs`` that is to serve.

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
