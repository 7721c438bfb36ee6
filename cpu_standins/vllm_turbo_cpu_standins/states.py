# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for Mamba2's state space layers, which take a token at a time, in fp32."""

from typing import Any

import torch
import torch.nn.functional as F


def _of_heads(values: torch.Tensor) -> torch.Tensor:
    """[num_heads] fp32 from values that callers expand by further dimensions."""
    while values.dim() > 1:
        values = values[..., 0]
    return values.float()


def _step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a token of each sequence to its state, and reads the state out.

    Args:
        state: [..., num_heads, head_dim, state_size] fp32.
        x: [..., num_heads, head_dim].
        dt: [..., num_heads] fp32, the step's size.
        decay: [num_heads] fp32, negative.
        b: [..., num_groups, state_size].
        c: [..., num_groups, state_size].

    Returns:
        The new state, and the output, [..., num_heads, head_dim] fp32.

    """
    repeats = x.shape[-2] // b.shape[-2]
    b, c = (y.float().repeat_interleave(repeats, -2) for y in (b, c))
    added = (x.float() * dt[..., None])[..., None] * b[..., None, :]
    state = state * torch.exp(decay * dt)[..., None, None] + added
    return state, (state * c[..., None, :]).sum(-1)


def _finish(
    output: torch.Tensor,
    x: torch.Tensor,
    skip: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    if skip is not None:
        output = output + _of_heads(skip)[:, None] * x.float()
    return output if gate is None else output * F.silu(gate.float())


def update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor | None,
    dst_state_batch_indices: torch.Tensor | None,
    null_block_id: int,
    out: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """Decodes one token of each sequence.

    Args:
        state: [num_slots, num_heads, head_dim, state_size]; written.
        x: [num_sequences, num_heads, head_dim].
        dt: [num_sequences, num_heads, head_dim], the same along head_dim.
        A: [num_heads, head_dim, state_size], the same along the last two axes.
        B: [num_sequences, num_groups, state_size].
        C: [num_sequences, num_groups, state_size].
        D: [num_heads, head_dim], the same along head_dim.
        z: [num_sequences, num_heads, head_dim], a gate.
        dt_bias: [num_heads, head_dim], the same along head_dim.
        dt_softplus: Whether to take the softplus of dt and its bias.
        state_batch_indices: [num_sequences], slots of sequences; None if sequence i has
            slot i.
        dst_state_batch_indices: [num_sequences], slots of the new states; None for the
            same slots.
        null_block_id: The slot of padding, which has no output and no state.
        out: [num_sequences, num_heads, head_dim], written.
        num_accepted_tokens: Must be None, because drafts are not served.
        cu_seqlens: [num_sequences + 1], a sequence's first token.

    """
    if num_accepted_tokens is not None:
        raise NotImplementedError("states of drafted tokens")
    if cu_seqlens is not None:
        assert (cu_seqlens.diff() == 1).all(), cu_seqlens
    num_sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    source = torch.arange(num_sequences)
    if state_batch_indices is not None:
        source = state_batch_indices.flatten()[:num_sequences].long()
    target = source
    if dst_state_batch_indices is not None:
        target = dst_state_batch_indices.flatten()[:num_sequences].long()
    rows = (source != null_block_id).nonzero().flatten()
    source, target = source[rows], target[rows]
    steps = (dt[..., 0] if dt.dim() == 3 else dt)[rows].float()
    if dt_bias is not None:
        steps = steps + _of_heads(dt_bias)
    if dt_softplus:
        steps = F.softplus(steps)
    new, output = _step(
        state[source].float(), x[rows], steps, _of_heads(A), B[rows], C[rows]
    )
    state[source] = new.to(state.dtype)
    kept = target != null_block_id
    state[target[kept]] = new[kept].to(state.dtype)
    gate = None if z is None else z[rows]
    out[rows] = _finish(output, x[rows], D, gate).to(out.dtype)


def scan(
    out: torch.Tensor,
    final_states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> None:
    """Prefills sequences, each from its own state.

    Args:
        out: [num_tokens, num_heads, head_dim], written.
        final_states: [num_sequences, num_heads, head_dim, state_size] fp32, the states
            before the tokens; replaced by those after them.
        x: [num_tokens, num_heads, head_dim].
        dt: [num_tokens, num_heads] fp32, with bias and softplus applied.
        A: [num_heads].
        B: [num_tokens, num_groups, state_size].
        C: [num_tokens, num_groups, state_size].
        D: [num_heads].
        z: [num_tokens, num_heads, head_dim], a gate.
        cu_seqlens: [num_sequences + 1], a sequence's first token.

    """
    decay, starts = _of_heads(A), cu_seqlens.tolist()
    output = torch.zeros(x.shape)
    for row, (start, end) in enumerate(zip(starts, starts[1:])):
        state = final_states[row]
        for i in range(start, end):
            state, output[i] = _step(state, x[i], dt[i].float(), decay, B[i], C[i])
        final_states[row] = state
    out.copy_(_finish(output, x, D, z))


def scan_chunks(
    scan_sequences: Any,
    *args: Any,
    out: torch.Tensor,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Prefills sequences and returns the state after each chunk, not each sequence.

    A prefix cache needs states within a sequence. vLLM's function for a CPU is asked
    for them (`return_intermediate_states`), but returns the states of sequences.

    Args:
        scan_sequences: vLLM's function.
        args: Its x, dt, A, B, C and chunk size.
        out: [num_tokens, num_heads, head_dim], written.
        initial_states: [num_sequences, num_heads, head_dim, state_size].
        seq_idx: [num_chunks], sequences of chunks.
        cu_chunk_seqlens: [num_chunks + 1], a chunk's first token.
        options: Its other arguments, the same for all chunks.

    Returns:
        [num_chunks, num_heads, head_dim, state_size].

    """
    x, dt, decay, b, c, chunk_size = args
    options = {key: value for key, value in options.items() if key != "cu_seqlens"}
    starts, rows = cu_chunk_seqlens.tolist(), seq_idx.tolist()
    states: list[torch.Tensor] = []
    for i, (row, start, end) in enumerate(zip(rows, starts, starts[1:])):
        state = None if initial_states is None else initial_states[row : row + 1]
        if i and rows[i - 1] == row:
            state = states[-1]
        part = slice(start, end)
        state = scan_sequences(
            x[part],
            dt[part],
            decay,
            b[part],
            c[part],
            chunk_size,
            out=out[part],
            initial_states=state,
            cu_seqlens=torch.tensor([0, end - start]),
            **options,
        )
        states.append(state)
    return torch.cat(states)


def keep_states_of_chunks() -> None:
    """Lets vLLM's prefill of Mamba2 on a CPU return the states that callers ask for."""
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    scan_sequences = ssd_combined._mamba_chunk_scan_combined_fwd
    if getattr(scan_sequences, "keeps_states_of_chunks", False):
        return

    def scan_either(*args: Any, **options: Any) -> torch.Tensor:
        if not options.get("return_intermediate_states"):
            return scan_sequences(*args, **options)
        *inputs, out = args
        return scan_chunks(scan_sequences, *inputs, out=out, **options)

    scan_either.keeps_states_of_chunks = True  # type: ignore[attr-defined]
    ssd_combined._mamba_chunk_scan_combined_fwd = scan_either
