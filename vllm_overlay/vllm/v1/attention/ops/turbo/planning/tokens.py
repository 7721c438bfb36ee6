# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tokens of a prefill's requests that lie end to end, on the device."""

from typing import NamedTuple

import torch

from vllm.utils.torch_utils import async_tensor_h2d


class SeqLens(NamedTuple):
    """Lengths of R requests' tokens.

    Attributes:
        cu_lens: (R + 1,) int32 on the device, from zero, where each request's begin.
        max_len: Most tokens of a request.
        num_tokens: Tokens of all R requests.

    """

    cu_lens: torch.Tensor
    max_len: int
    num_tokens: int

    @staticmethod
    def of_host(cu_lens: torch.Tensor, device: torch.device) -> "SeqLens":
        """Copy cumulative lengths, (R + 1,) int32, from the host to a device."""
        max_len, num_tokens = int(cu_lens.diff().max()), int(cu_lens[-1])
        return SeqLens(async_tensor_h2d(cu_lens, device), max_len, num_tokens)


class CachedPiece(NamedTuple):
    """Cached tokens that are dequantised at a time: a run of each of R requests.

    Attributes:
        starts: (R,) int32 on the device, the position of each run's first token in its
            request.
        lens: Where runs begin in the buffer, the most cached tokens of a run, and
            tokens of the buffer.
        cached_lens: (R,) int32 on the device, cached tokens of each run; None if each
            run ends where the next one begins.

    """

    starts: torch.Tensor
    lens: SeqLens
    cached_lens: torch.Tensor | None = None


class KeyRuns(NamedTuple):
    """Keys of R requests: for each a run of tokens, cached ones and then raw ones.

    Raw tokens are the step's. There are none if all are read from the cache.

    Attributes:
        cached: The cached tokens, with ``cached_lens``.
        raw_starts: (R,) int32 on the device, the index of each run's first raw token
            among the prefills'.
        lens: Where runs begin in the buffer, and the most tokens of a run.
        num_rotated: Tokens of the buffer up to the last cached one. They are rotated
            back.

    """

    cached: CachedPiece
    raw_starts: torch.Tensor
    lens: SeqLens
    num_rotated: int
