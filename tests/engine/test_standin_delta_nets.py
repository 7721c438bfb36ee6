# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stand-ins for gated delta nets' ops, held to sums over all tokens."""

import torch
import torch.nn.functional as F

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 6, 8
DIM, WIDTH, NUM_DRAFTS = 5, 4, 2
EPS = 1e-5


class DeltaNet:
    """A gated delta net's inputs from tokens, and its weights."""

    def __init__(self, num_tokens: int) -> None:
        torch.manual_seed(0)
        self.q, self.k = torch.randn(2, num_tokens, KEY_HEADS, KEY_DIM).unbind()
        self.v = torch.randn(num_tokens, HEADS, VALUE_DIM)
        self.a, self.b = torch.randn(2, num_tokens, HEADS).unbind()
        self.decay, self.bias = torch.rand(2, HEADS).unbind()

    def gates(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a state's factor, and the factor of the error that a token adds."""
        steps = torch.log1p(torch.exp(self.a[tokens] + self.bias))
        return torch.exp(-self.decay * steps), 1 / (1 + torch.exp(-self.b[tokens]))

    def expected(
        self, tokens: slice, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the outputs, and the state after each token, computed in fp64.

        A state is a sum over all tokens so far: the addition of each, times the factors
        of all later tokens.
        """
        repeats = HEADS // KEY_HEADS
        q, k = (
            x[tokens].double().repeat_interleave(repeats, 1) for x in (self.q, self.k)
        )
        q, k = (x / (x.square().sum(-1, keepdim=True) + EPS).sqrt() for x in (q, k))
        v, state = self.v[tokens].double(), state.double()
        kept, beta = (x.double() for x in self.gates(tokens))
        added = torch.einsum("th,thk,thv->thkv", beta, k, v)
        erased = torch.einsum("th,thk,thl->thkl", beta, k, k)
        left = kept[..., None, None] * (torch.eye(KEY_DIM) - erased)
        states = []
        for t in range(len(v)):
            # The newest token's part is first; the state before all tokens is last.
            parts, product = [], torch.eye(KEY_DIM).double().expand(HEADS, -1, -1)
            for i in reversed(range(t + 1)):
                parts.append(product @ added[i])
                product = product @ left[i]
            states.append(torch.stack([*parts, product @ state]).sum(0))
        found = torch.stack(states)
        output = torch.einsum("thkv,thk->thv", found, q) * KEY_DIM**-0.5
        return output.float(), found.float()


def random_states(num_slots: int) -> torch.Tensor:
    return torch.randn(num_slots, HEADS, KEY_DIM, VALUE_DIM)


def test_prompts_go_on_from_their_states(ops):
    net, starts, slots = DeltaNet(9), [0, 5, 5, 6, 9], [3, 1, 0, 5]
    states = random_states(6)
    before = states.clone()
    g, beta = ops.fused_gdn_gating_cpu(net.decay.log(), net.a, net.b, net.bias)
    kept, expected_beta = net.gates(slice(None))
    torch.testing.assert_close(g[0].exp(), kept)
    torch.testing.assert_close(beta[0], expected_beta)
    output, found = ops.chunk_gated_delta_rule_cpu(
        *(x[None] for x in (net.q, net.k, net.v)),
        g,
        beta,
        states,
        True,
        torch.tensor(starts, dtype=torch.int32),
        False,
        True,
        torch.tensor(slots, dtype=torch.int32),
        EPS,
    )
    assert found is states or torch.equal(found, states)
    for row in (0, 2, 3):
        part, slot = slice(*starts[row : row + 2]), slots[row]
        expected, after = net.expected(part, before[slot])
        torch.testing.assert_close(output[0, part], expected)
        torch.testing.assert_close(states[slot], after[-1])
    for slot in (1, 2, 4):
        assert torch.equal(states[slot], before[slot])


def test_states_take_a_token(ops):
    net, slots, states = DeltaNet(3), [4, 1, 2], random_states(5)
    before = states.clone()
    output = ops.fused_sigmoid_gating_delta_rule_update_cpu(
        *(net.decay.log(), net.bias),
        *(x[None] for x in (net.q, net.k, net.v)),
        *(net.a, net.b, states, torch.tensor(slots, dtype=torch.int32)),
        torch.arange(4, dtype=torch.int32),
        True,
    )
    assert output.shape == (3, 1, HEADS, VALUE_DIM)
    for row, slot in enumerate(slots):
        expected, after = net.expected(slice(row, row + 1), before[slot])
        torch.testing.assert_close(output[row], expected)
        torch.testing.assert_close(states[slot], after[0])
    assert torch.equal(states[[0, 3]], before[[0, 3]])


def test_states_of_drafts(ops):
    """They begin at the last accepted draft's state; the state after each is kept."""
    net, starts, states = DeltaNet(5), [0, 3, 5], random_states(8)
    slots, accepted = torch.tensor([[1, 2, 3], [4, 5, 6]]), [3, 1]
    before = states.clone()
    output = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        *(net.decay.log(), net.bias, net.q, net.k, net.v, net.a, net.b, states),
        *(slots.int(), torch.tensor(accepted).int(), torch.tensor(starts).int()),
        True,
    )
    for row, (start, end) in enumerate(zip(starts, starts[1:])):
        source = slots[row, accepted[row] - 1]
        expected, after = net.expected(slice(start, end), before[source])
        torch.testing.assert_close(output[start:end], expected)
        torch.testing.assert_close(states[slots[row, : end - start]], after)
    assert torch.equal(states[[0, 6, 7]], before[[0, 6, 7]])


def convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Returns [num_tokens, dim] for inputs [width - 1 + num_tokens, dim]."""
    sums = [
        (inputs[t : t + WIDTH] * weight.T).sum(0) + bias
        for t in range(len(inputs) - WIDTH + 1)
    ]
    return F.silu(torch.stack(sums))


def convolution(num_tokens: int, num_slots: int) -> tuple[torch.Tensor, ...]:
    """Returns inputs, weight, bias, and states that have room for drafts."""
    torch.manual_seed(0)
    return (
        torch.randn(num_tokens, DIM),
        torch.randn(DIM, WIDTH),
        torch.randn(DIM),
        torch.randn(num_slots, DIM, WIDTH - 1 + NUM_DRAFTS),
    )


def test_convolutions_of_prompts(ops):
    """The second prompt goes on from its state, and the first has none yet."""
    x, weight, bias, states = convolution(7, 4)
    before, slots = states.clone(), torch.tensor([3, 1], dtype=torch.int32)
    output = ops.causal_conv1d_fwd_cpu(
        *(x.T, ops.causal_conv1d_weight_pack(weight), bias, states),
        *(torch.tensor([0, 2, 7], dtype=torch.int32), slots),
        *(torch.tensor([False, True]), True, -1, True),
    ).T
    history = before[1, :, : WIDTH - 1].T
    inputs = torch.cat([torch.zeros(WIDTH - 1, DIM), x[:2]])
    torch.testing.assert_close(output[:2], convolved(inputs, weight, bias))
    assert torch.equal(states[3, :, : WIDTH - 1], inputs[-WIDTH + 1 :].T)
    inputs = torch.cat([history, x[2:]])
    torch.testing.assert_close(output[2:], convolved(inputs, weight, bias))
    assert torch.equal(states[1, :, : WIDTH - 1], inputs[-WIDTH + 1 :].T)
    assert torch.equal(states[[0, 2]], before[[0, 2]])


def test_convolutions_of_a_token(ops):
    x, weight, bias, states = convolution(2, 4)
    before, slots = states.clone(), [2, 0]
    output = ops.causal_conv1d_update_cpu(
        x, states, weight, bias, True, None, torch.tensor(slots).int(), -1, True
    )
    for row, slot in enumerate(slots):
        inputs = torch.cat([before[slot, :, : WIDTH - 1].T, x[row : row + 1]])
        expected = convolved(inputs, weight, bias)
        torch.testing.assert_close(output[row : row + 1], expected)
        assert torch.equal(states[slot, :, : WIDTH - 1], inputs[1:].T)
    assert torch.equal(states[[1, 3]], before[[1, 3]])


def test_convolutions_of_drafts(ops):
    """They come behind the accepted drafts; all inputs are kept for the next step."""
    x, weight, bias, states = convolution(2 * (1 + NUM_DRAFTS), 4)
    x = x.view(2, 1 + NUM_DRAFTS, DIM)
    before, slots, accepted = states.clone(), [2, 0], [3, 1]
    output = ops.causal_conv1d_update_cpu(
        *(x, states, weight, bias, True),
        *(torch.tensor(accepted).int(), torch.tensor(slots).int(), -1, True),
    )
    for row, (slot, num) in enumerate(zip(slots, accepted)):
        history = before[slot, :, num - 1 : num - 1 + WIDTH - 1].T
        inputs = torch.cat([history, x[row]])
        torch.testing.assert_close(output[row], convolved(inputs, weight, bias))
        assert torch.equal(states[slot], inputs[1:].T)
    assert torch.equal(states[[1, 3]], before[[1, 3]])
