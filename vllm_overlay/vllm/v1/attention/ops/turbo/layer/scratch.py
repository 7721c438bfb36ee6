# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The scratch of a layer, from vLLM's workspace."""

from collections.abc import Callable
from itertools import chain, islice
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.formats.output_scratch import OutputScratch
from vllm.v1.attention.ops.turbo.interface import TensorSpecs
from vllm.v1.attention.ops.turbo.planning.decode import DecodePlan
from vllm.v1.attention.ops.turbo.planning.largest_batch import LargestBatch
from vllm.v1.attention.ops.turbo.planning.scratch import (
    DecodeScratch,
    LayerShape,
    PrefillScratch,
    RawScratch,
    SharedScratch,
    num_bytes,
)
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    is_workspace_manager_initialized,
)


def take_scratch(specs: TensorSpecs, device: torch.device) -> list[torch.Tensor]:
    """Scratch tensors of vLLM's workspace, which overlap those of earlier calls.

    So kernels that read earlier tensors have to come before kernels that write these,
    in the stream's order.

    Args:
        specs: Shapes and dtypes of the tensors.
        device: The device, used if vLLM's workspace is not initialised.

    """
    # A new workspace manager fails if it is asked for no bytes.
    if is_workspace_manager_initialized() and num_bytes(specs) > 0:
        return current_workspace_manager().get_simultaneous(*specs)
    return [torch.empty(s, dtype=dtype, device=device) for s, dtype in specs]


class LayerScratch(NamedTuple):
    """The sizes of a layer that its scratch follows from.

    Attributes:
        shape: The layer's shape, with the query heads of this rank.
        context_shape: The same with the query heads of all ranks that share the
            context.
        is_shared: Whether ranks share the context.
        piece_tokens: ``PrefillLimits.piece_tokens``.
        output_specs: Shapes and dtypes of ``OutputScratch`` for a number of tiles.

    """

    shape: LayerShape
    context_shape: LayerShape
    is_shared: bool
    piece_tokens: int
    output_specs: Callable[[int], TensorSpecs]

    def decode_specs(self, sizes: DecodePlan | LargestBatch) -> dict[str, TensorSpecs]:
        """Shapes and dtypes of each part of ``DecodeScratch``; empty without the part.

        A part has the name of its field, and ``splits`` has the first three fields.
        """
        shape, num_tokens = self.context_shape, sizes.num_tokens
        parts: dict[str, TensorSpecs] = {
            "splits": DecodeScratch.specs(shape, num_tokens, sizes.num_partials),
            "shared": [],
            "raw": RawScratch.specs(self.shape, sizes.num_raw_tokens),
            "outputs": [],
            "query": [],
        }
        if self.is_shared:
            parts["shared"] = SharedScratch.specs(shape, num_tokens, sizes.num_slots)
        elif shape.own_size_v is not None:
            rows = (num_tokens, shape.num_heads, shape.head_size)
            parts["query"] = [(rows, torch.float16)]
        if (num_tiles := sizes.num_raw_tiles) > 0:
            parts["outputs"] = self.output_specs(num_tiles)
        return parts

    def prefill_specs(self, num_tokens: int | None) -> TensorSpecs:
        """Shapes and dtypes of ``PrefillScratch``; none if ``num_tokens`` is None."""
        return PrefillScratch.specs(
            self.context_shape, num_tokens, self.piece_tokens, self.is_shared
        )

    def take_for_decodes(self, plan: DecodePlan, device: torch.device) -> DecodeScratch:
        """Take the scratch that all layers of a shape share in a step."""
        parts = self.decode_specs(plan)
        # One request to the workspace has all of them.
        taken = iter(take_scratch([*chain.from_iterable(parts.values())], device))
        tensors = {name: [*islice(taken, len(part))] for name, part in parts.items()}
        query_scale, partial, partial_lse = tensors["splits"]
        shared, raw, outputs = (tensors[x] for x in ("shared", "raw", "outputs"))
        return DecodeScratch(
            query_scale,
            partial,
            partial_lse,
            shared=SharedScratch._make(shared) if shared else None,
            raw=RawScratch._make(raw) if raw else None,
            outputs=OutputScratch._make(outputs) if outputs else None,
            query=tensors["query"][0] if tensors["query"] else None,
        )

    def take_for_prefill(
        self, num_tokens: int | None, device: torch.device
    ) -> PrefillScratch | None:
        """Take the scratch of a prefill; none if ``num_tokens`` is None."""
        tensors = take_scratch(self.prefill_specs(num_tokens), device)
        if not tensors:
            return None
        query, output, key, value, *context = tensors
        return PrefillScratch(query, output, key, value, *context)

    def largest(self, batch: LargestBatch, slice_tokens: int) -> list[TensorSpecs]:
        """The largest tensors of each request to the workspace, over all steps.

        Args:
            batch: The most of the sizes of decodes and extends.
            slice_tokens: The most query tokens of a prefill's slice.

        """
        decode = [*chain.from_iterable(self.decode_specs(batch).values())]
        return [decode, self.prefill_specs(slice_tokens)]
