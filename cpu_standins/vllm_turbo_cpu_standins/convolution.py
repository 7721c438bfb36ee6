# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for the convolutions of layers that keep a state instead of K and V."""

import torch
import torch.nn.functional as F


def update_state(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    pad_slot_id: int,
) -> torch.Tensor:
    """Convolves sequences' new tokens with what came before, causally, by channel.

    Args:
        x: [num_tokens, dim]; a token a sequence, unless `query_start_loc` says else.
        conv_state: [num_slots, dim, state_len], the newest inputs of each sequence, the
            oldest first; written.
        weight: [dim, width], width at most state_len + 1.
        bias: [dim].
        activation: "silu", "swish" or None.
        conv_state_indices: [num_sequences] or [num_sequences, 1], each one's slot; None
            for its number.
        query_start_loc: [num_sequences + 1], a sequence's first token.
        pad_slot_id: A slot of padding, which has no output and no state.

    Returns:
        [num_tokens, dim], in x's dtype; zero for padding.

    """
    if query_start_loc is None:
        starts = list(range(x.shape[0] + 1))
    else:
        starts = query_start_loc.tolist()
    slots = range(len(starts) - 1)
    if conv_state_indices is not None:
        slots = conv_state_indices.flatten().tolist()
    output = torch.zeros_like(x)
    for slot, start, end in zip(slots, starts, starts[1:]):
        if slot == pad_slot_id or start == end:
            continue
        new = x[start:end].T.to(conv_state.dtype)
        inputs = torch.cat([conv_state[slot], new], dim=-1)
        conv_state[slot] = inputs[:, -conv_state.shape[-1] :]
        inputs = inputs[:, -(weight.shape[1] - 1 + end - start) :].to(weight.dtype)
        sums = F.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0]
        if activation in ("silu", "swish"):
            sums = F.silu(sums)
        output[start:end] = sums.T
    return output
