# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for layers of experts, which compute one expert after the other."""

import torch
import torch.nn.functional as F


def prepack_weight(weight: torch.Tensor, packed_weight: torch.Tensor, isa: str) -> None:
    """Copies `weight`, because the op below needs no tiles.

    Args:
        weight: [num_experts, n, k].
        packed_weight: The same; written.
        isa: Ignored; the instructions that the native op uses.

    """
    packed_weight.copy_(weight)


def fused_experts(
    output: torch.Tensor,
    input: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    skip_weighted: bool,
    act: str,
    isa: str,
) -> None:
    """Writes the weighted sum of the results of each token's experts.

    Args:
        output: [num_tokens, hidden_size], written.
        input: [num_tokens, hidden_size].
        w13: [num_experts, 2 * intermediate_size, hidden_size], with the gate first;
            from `prepack_weight`.
        w2: [num_experts, hidden_size, intermediate_size], from `prepack_weight`.
        w13_bias: [num_experts, 2 * intermediate_size], or None.
        w2_bias: [num_experts, hidden_size], or None.
        topk_weights: [num_tokens, top_k] fp32.
        topk_ids: [num_tokens, top_k].
        skip_weighted: Whether the input already has the weights.
        act: Must be "silu".
        isa: Ignored.

    """
    if act != "silu":
        raise NotImplementedError(f"experts with {act}")
    sums = torch.zeros(output.shape)
    for expert in topk_ids.unique().tolist():
        rows, places = (topk_ids == expert).nonzero(as_tuple=True)
        bias = None if w13_bias is None else w13_bias[expert]
        gate, up = F.linear(input[rows], w13[expert], bias).chunk(2, dim=-1)
        bias = None if w2_bias is None else w2_bias[expert]
        made = F.linear(F.silu(gate) * up, w2[expert], bias).float()
        if not skip_weighted:
            made *= topk_weights[rows, places, None]
        sums.index_add_(0, rows, made)
    output.copy_(sums)
