# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stand-ins for Mamba2's ops, held to sums over all tokens."""

import pytest
import torch
from vllm_turbo_cpu_standins import states

HEADS, GROUPS, HEAD_DIM, STATE_SIZE = 4, 2, 6, 8


def summed_up(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a state space model's outputs, and the state after the last token.

    There is one sequence, and each head has its own group. Each state is a sum over all
    tokens so far, in fp64.
    """
    state, x, dt, decay, b, c = (y.double() for y in (state, x, dt, decay, b, c))
    age = dt.cumsum(0)
    outputs, states = [], []
    for t in range(len(x)):
        weight = torch.exp(decay * (age[t] - age[: t + 1])) * dt[: t + 1]
        states.append(
            torch.einsum("sh,shd,shn->hdn", weight, x[: t + 1], b[: t + 1])
            + torch.exp(decay * age[t])[:, None, None] * state
        )
        outputs.append(torch.einsum("hdn,hn->hd", states[-1], c[t]))
    return torch.stack(outputs).float(), states[-1].float()


class StateSpace:
    """The inputs of a layer of Mamba2 from tokens, and its weights."""

    def __init__(self, num_tokens: int) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(num_tokens, HEADS, HEAD_DIM)
        self.gate = torch.randn(num_tokens, HEADS, HEAD_DIM)
        self.dt = torch.rand(num_tokens, HEADS)
        self.b, self.c = torch.randn(2, num_tokens, GROUPS, STATE_SIZE).unbind()
        self.decay, self.skip = -torch.rand(HEADS) - 0.1, torch.randn(HEADS)

    def expected(
        self, tokens: slice, state: torch.Tensor, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        b, c = (
            y[tokens].repeat_interleave(HEADS // GROUPS, 1) for y in (self.b, self.c)
        )
        x = self.x[tokens]
        output, state = summed_up(state, x, self.dt[tokens], self.decay, b, c)
        output += self.skip[:, None] * x
        gate = self.gate[tokens]
        return output * gate * torch.sigmoid(gate) if gated else output, state


@pytest.mark.parametrize("gated", [False, True])
def test_scans_go_on_from_their_states(ops, gated):
    layer, starts = StateSpace(9), [0, 5, 5, 6, 9]
    states = torch.randn(4, HEADS, HEAD_DIM, STATE_SIZE)
    before, out = states.clone(), torch.full_like(layer.x, float("nan"))
    ops.mamba_chunk_scan_fwd_cpu(
        out,
        states,
        layer.x,
        layer.dt,
        layer.decay,
        layer.b,
        layer.c,
        layer.skip,
        layer.gate if gated else None,
        torch.tensor(starts, dtype=torch.int32),
    )
    assert torch.equal(states[1], before[1])
    for row in (0, 2, 3):
        part = slice(*starts[row : row + 2])
        output, state = layer.expected(part, before[row], gated)
        torch.testing.assert_close(out[part], output)
        torch.testing.assert_close(states[row], state)


@pytest.mark.parametrize("moves", [False, True])
def test_states_take_a_token(ops, moves):
    """A state stays or moves to another slot; padding has no output and no state."""
    layer, padding = StateSpace(3), 0
    states = torch.randn(6, HEADS, HEAD_DIM, STATE_SIZE)
    before, out = states.clone(), torch.full_like(layer.x, 7.0)
    slots = torch.tensor([[4], [padding], [2]], dtype=torch.int32)
    targets = torch.tensor([[1], [padding], [5]], dtype=torch.int32) if moves else slots
    bias = torch.randn(HEADS)
    raw = torch.log(torch.expm1(layer.dt)) - bias
    expanded = (HEADS, HEAD_DIM)
    ops.selective_state_update_cpu(
        states,
        layer.x,
        raw[..., None].expand(-1, -1, HEAD_DIM),
        layer.decay[:, None, None].expand(*expanded, STATE_SIZE),
        layer.b,
        layer.c,
        layer.skip[:, None].expand(expanded),
        None,
        bias[:, None].expand(expanded),
        True,
        slots,
        targets,
        padding,
        out,
        None,
        torch.arange(4, dtype=torch.int32),
    )
    for row, slot, target in ((0, 4, targets[0].item()), (2, 2, targets[2].item())):
        output, state = layer.expected(slice(row, row + 1), before[slot])
        torch.testing.assert_close(out[row], output[0])
        torch.testing.assert_close(states[target], state)
    assert (out[1] == 7).all() and torch.equal(states[0], before[0])


def test_states_of_drafts_are_refused(ops):
    layer = StateSpace(1)
    rest = (layer.b, layer.c, None, None, None, False, None, None, 0, layer.x)
    state = torch.zeros(1, HEADS, HEAD_DIM, STATE_SIZE)
    with pytest.raises(NotImplementedError, match="drafted"):
        ops.selective_state_update_cpu(
            state, layer.x, layer.dt, layer.decay, *rest, torch.ones(1).int(), None
        )


def test_states_after_each_chunk():
    """There are two sequences, the first of which has two and a half chunks."""
    layer, starts, rows = StateSpace(9), [0, 2, 4, 5, 9], [0, 0, 0, 1]
    initial = torch.randn(2, HEADS, HEAD_DIM, STATE_SIZE)
    out = torch.full_like(layer.x, float("nan"))

    def scan_sequences(x, dt, decay, b, c, size, *, out, initial_states, cu_seqlens, D):
        found = initial_states.clone()
        states.scan(out, found, x, dt, decay, b, c, D, None, cu_seqlens)
        return found

    found = states.scan_chunks(
        scan_sequences,
        *(layer.x, layer.dt, layer.decay, layer.b, layer.c, 2),
        out=out,
        initial_states=initial,
        seq_idx=torch.tensor(rows),
        cu_chunk_seqlens=torch.tensor(starts),
        cu_seqlens=torch.tensor([0, 5, 9]),
        D=layer.skip,
    )
    for chunk, row in enumerate(rows):
        first = 5 * row
        part = slice(first, starts[chunk + 1])
        output, state = layer.expected(part, initial[row])
        torch.testing.assert_close(out[part], output)
        torch.testing.assert_close(found[chunk], state)
