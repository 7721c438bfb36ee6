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
    """Convolves sequences' new tokens with the inputs before, causally, by channel.

    Args:
        x: [num_tokens, dim]; a token per sequence if there is no `query_start_loc`.
        conv_state: [num_slots, dim, state_len], the newest inputs of each sequence,
            with the oldest first; written.
        weight: [dim, width], width at most state_len + 1.
        bias: [dim].
        activation: "silu", "swish" or None.
        conv_state_indices: [num_sequences] or [num_sequences, 1], slots of sequences;
            None if sequence i has slot i.
        query_start_loc: [num_sequences + 1], a sequence's first token.
        pad_slot_id: The slot of padding, which has no output and no state.

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


def weight_pack(weight: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `weight`, [dim, width], in the same order."""
    return weight.clone()


def _history(conv_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The inputs before the next token. Further columns are for drafts."""
    return conv_states[..., : weight.shape[-1] - 1]


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    cache_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    silu_activation: bool,
    pad_slot_id: int,
    is_vnni: bool,
) -> torch.Tensor:
    """Convolves prompts. Those without a state start from zeros.

    Args:
        x: [dim, num_tokens].
        weight: [dim, width] or [dim, 1, width].
        bias: [dim].
        conv_states: [num_slots, dim, state_len], see `update_state`; written.
        query_start_loc: [num_sequences + 1], a sequence's first token.
        cache_indices: [num_sequences], slots of sequences.
        has_initial_state: [num_sequences].
        silu_activation: Whether to return the silu of the sums.
        pad_slot_id: The slot of padding.
        is_vnni: Ignored; whether the weight is in the native op's order.

    Returns:
        [dim, num_tokens].

    """
    assert conv_states is not None and cache_indices is not None
    assert query_start_loc is not None and has_initial_state is not None
    history = _history(conv_states, weight)
    history[cache_indices[~has_initial_state].long()] = 0
    return update_state(
        *(x.T, history, weight.flatten(1), bias, "silu" if silu_activation else None),
        *(cache_indices, query_start_loc, pad_slot_id),
    ).T


def decode(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu_activation: bool,
    num_accepted_tokens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
    pad_slot_id: int,
    is_vnni: bool,
) -> torch.Tensor:
    """Convolves one token of each sequence, or several that are not accepted yet.

    Args:
        x: [num_sequences, dim] or, with `num_accepted_tokens`, [num_sequences,
            num_tokens, dim].
        conv_states: [num_slots, dim, state_len]; written. With several tokens all
            their inputs are kept, after the newest width - 2 inputs before them.
        weight: [dim, width] or [dim, 1, width].
        bias: [dim].
        silu_activation: Whether to return the silu of the sums.
        num_accepted_tokens: [num_sequences], accepted tokens of the step before.
        conv_state_indices: [num_sequences], slots of sequences.
        pad_slot_id: The slot of padding.
        is_vnni: Ignored; whether the weight is in the native op's order.

    Returns:
        x's shape.

    """
    weight, activation = weight.flatten(1), "silu" if silu_activation else None
    rest = (weight, bias, activation)
    if num_accepted_tokens is None:
        history = _history(conv_states, weight)
        return update_state(x, history, *rest, conv_state_indices, None, pad_slot_id)
    assert conv_state_indices is not None
    output, width, num_tokens = torch.zeros_like(x), weight.shape[1], x.shape[1]
    slots = conv_state_indices.tolist()
    for row, (slot, num) in enumerate(zip(slots, num_accepted_tokens.tolist())):
        if slot == pad_slot_id:
            continue
        before = conv_states[slot, :, num - 1 : num + width - 2].clone()
        inputs = torch.cat([before, x[row].T.to(before.dtype)], dim=-1)
        starts = torch.tensor([0, num_tokens])
        output[row] = update_state(x[row], before[None], *rest, None, starts, -1)
        conv_states[slot, :, : width - 2 + num_tokens] = inputs[:, 1:]
    return output
