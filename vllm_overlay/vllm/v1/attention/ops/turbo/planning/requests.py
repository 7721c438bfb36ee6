# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Spans of a step's requests that attend to packed context."""

from itertools import chain, pairwise
from typing import NamedTuple

import torch

from vllm.utils.torch_utils import async_tensor_h2d


class RequestSpan(NamedTuple):
    """Consecutive requests of a batch that attend to packed context.

    Attributes:
        first_request: The first request's index in the batch.
        num_requests: R.
        first_token: The index of its first query token in the batch.
        num_tokens: Query tokens of all R requests.
        query_len: The most query tokens of a request.
        query_start_loc: (R + 1,) int32 on the device, from zero; None if each request
            has ``query_len``.
        query_starts: The same numbers on the host, for extends; None for decodes, whose
            numbers on the host may not be exact.

    """

    first_request: int
    num_requests: int
    first_token: int
    num_tokens: int
    query_len: int
    query_start_loc: torch.Tensor | None
    query_starts: list[int] | None = None

    @staticmethod
    def of_extends(
        requests: list[tuple[int, list[int]]], device: torch.device
    ) -> list["RequestSpan"]:
        """Make spans of extends with one copy to the device: a step may have dozens.

        Args:
            requests: For each span the first request's index in the batch, and R + 1
                numbers, where requests' tokens begin in the batch.
            device: The kernels' device.

        """
        if not requests:
            return []
        own_starts = [[x - starts[0] for x in starts] for _, starts in requests]
        numbers = async_tensor_h2d([*chain(*own_starts)], device, torch.int32)
        parts = numbers.split([*map(len, own_starts)])
        return [
            RequestSpan(
                first_request,
                len(own) - 1,
                starts[0],
                own[-1],
                max(end - begin for begin, end in pairwise(own)),
                part,
                own,
            )
            for (first_request, starts), own, part in zip(requests, own_starts, parts)
        ]

    @staticmethod
    def cut_all(
        spans: list["RequestSpan"],
        bounds: list[list[tuple[int, int]]],
        device: torch.device,
    ) -> list["RequestSpan"]:
        """Cut several spans, with one copy to the device if the host has the lengths.

        Args:
            spans: The spans of extends, or spans that all lack ``query_starts``.
            bounds: The ``bounds`` of ``cut`` for each span.
            device: The kernels' device.

        """
        # Each span has at least one part.
        if sum(map(len, bounds)) == len(spans):
            return spans
        parts = []
        for span, own_bounds in zip(spans, bounds):
            if span.query_starts is None:
                return [part for x, own in zip(spans, bounds) for part in x.cut(own)]
            starts = [span.first_token + x for x in span.query_starts]
            parts += [
                (span.first_request + first, starts[first : last + 1])
                for first, last in own_bounds
            ]
        return RequestSpan.of_extends(parts, device)

    def cut(self, bounds: list[tuple[int, int]]) -> list["RequestSpan"]:
        """Cut the span into parts.

        If requests have unequal lengths, each part keeps the whole span's tokens, and
        its ``query_start_loc`` counts from the first of these.

        Args:
            bounds: First and last (exclusive) of the R requests, for each part.

        """
        if bounds == [(0, self.num_requests)]:
            return [self]
        first_request, begin = self.first_request, self.first_token
        starts = self.query_start_loc
        parts = []
        for first, last in bounds:
            part = self._replace(
                first_request=first_request + first, num_requests=last - first
            )
            if starts is not None:
                part = part._replace(query_start_loc=starts[first : last + 1])
            else:
                tokens = (last - first) * self.query_len
                part = part._replace(
                    first_token=begin + first * self.query_len, num_tokens=tokens
                )
            parts.append(part)
        return parts
