# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for gated delta nets, which take a token at a time, in fp32."""

from typing import get_type_hints

import torch
import torch.nn.functional as F


def _per_head(x: torch.Tensor, num_heads: int, eps: float | None) -> torch.Tensor:
    """K or q in fp32 for each of v's heads, normalised to length 1 with `eps`."""
    x = x.float().repeat_interleave(num_heads // x.shape[-2], -2)
    if eps is None:
        return x
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a token of each sequence to its state, and reads the state out.

    Args:
        state: [..., num_heads, k_dim, v_dim] fp32.
        q: [..., num_heads, k_dim] fp32.
        k: [..., num_heads, k_dim] fp32.
        v: [..., num_heads, v_dim] fp32.
        g: [..., num_heads] fp32, the logarithm of the factor that the state keeps.
        beta: [..., num_heads] fp32, how far the value at k moves to v.

    Returns:
        The new state, and the output, [..., num_heads, v_dim] fp32.

    """
    state = state * torch.exp(g)[..., None, None]
    found = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * ((v - found) * beta[..., None])[..., None, :]
    return state, (state * q[..., None]).sum(-2) * q.shape[-1] ** -0.5


def gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns g, [1, num_tokens, num_heads] fp32, and beta, the same in b's dtype.

    Args:
        A_log: [num_heads].
        a: [num_tokens, num_heads].
        b: [num_tokens, num_heads].
        dt_bias: [num_heads].

    """
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], torch.sigmoid(b.float()).to(b.dtype)[None]


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefills sequences, each from its own state.

    Args:
        query: [1, num_tokens, num_k_heads, k_dim].
        key: [1, num_tokens, num_k_heads, k_dim].
        value: [1, num_tokens, num_v_heads, v_dim].
        g: [1, num_tokens, num_v_heads].
        beta: [1, num_tokens, num_v_heads].
        initial_state: [num_slots, num_v_heads, k_dim, v_dim]; written.
        output_final_state: Ignored; the states are returned in any case.
        cu_seqlens: [num_sequences + 1], a sequence's first token.
        head_first: Must be False: heads before tokens are not served.
        use_qk_l2norm_in_kernel: Whether q and k are to be normalised.
        initial_state_indices: [num_sequences], slots of sequences.
        eps: Added to the square of the length of q and k.

    Returns:
        [1, num_tokens, num_v_heads, v_dim] in value's dtype, and all states.

    """
    assert not head_first
    num_heads, norm = value.shape[-2], eps if use_qk_l2norm_in_kernel else None
    q, k = (_per_head(x[0], num_heads, norm) for x in (query, key))
    v, g, beta = (x[0].float() for x in (value, g, beta))
    output, starts = torch.zeros(v.shape), cu_seqlens.tolist()
    slots = initial_state_indices.tolist()
    for slot, start, end in zip(slots, starts, starts[1:]):
        state = initial_state[slot].float()
        for i in range(start, end):
            state, output[i] = _step(state, q[i], k[i], v[i], g[i], beta[i])
        initial_state[slot] = state
    return output[None].to(value.dtype), initial_state


def decode(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor:
    """Decodes one token of each sequence.

    The arguments are those of `prefill` and `gating`. The softplus is PyTorch's own.

    Returns:
        [num_sequences, 1, num_v_heads, v_dim] in v's dtype.

    """
    assert (cu_seqlens.diff() == 1).all(), cu_seqlens
    output = verify(
        *(A_log, dt_bias, q[0], k[0], v[0], a, b, initial_state_source),
        *(initial_state_indices[:, None], torch.ones(len(a)).int(), cu_seqlens),
        *(use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold),
    )
    return output[:, None]


def verify(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    spec_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor:
    """Decodes several tokens of each sequence, and keeps the state after each.

    Args:
        A_log: See `gating`.
        dt_bias: See `gating`.
        q: [num_tokens, num_k_heads, k_dim].
        k: [num_tokens, num_k_heads, k_dim].
        v: [num_tokens, num_v_heads, v_dim].
        a: [num_tokens, num_v_heads].
        b: [num_tokens, num_v_heads].
        initial_state_source: [num_slots, num_v_heads, k_dim, v_dim]; written.
        spec_state_indices: [num_sequences, most tokens], the slots of the states after
            a sequence's first token, its second, ...
        num_accepted_tokens: [num_sequences], the number of the state to go on from, of
            those in the slots. It counts from 1.
        cu_seqlens: [num_sequences + 1], a sequence's first token.
        use_qk_l2norm_in_kernel: Whether q and k are to be normalised.
        softplus_beta: Must be 1.
        softplus_threshold: Must be PyTorch's.

    Returns:
        [num_tokens, num_v_heads, v_dim] in v's dtype.

    """
    assert (softplus_beta, softplus_threshold) == (1, 20)
    states, norm = initial_state_source, 1e-5 if use_qk_l2norm_in_kernel else None
    q, k = (_per_head(x, v.shape[-2], norm) for x in (q, k))
    g, beta = (x[0].float() for x in gating(A_log, a, b, dt_bias))
    output, starts = torch.zeros(v.shape), cu_seqlens.tolist()
    rows = zip(spec_state_indices.tolist(), num_accepted_tokens.tolist())
    for (slots, accepted), start, end in zip(rows, starts, starts[1:]):
        state = states[slots[accepted - 1]].float()
        for slot, i in zip(slots, range(start, end)):
            state, output[i] = _step(state, q[i], k[i], v[i].float(), g[i], beta[i])
            states[slot] = state
    return output.to(v.dtype)


def serve_fp32() -> None:
    """Lets vLLM's gated delta nets on a CPU take fp32, which native ops do not."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    core = gdn_attention.cpu_gdn_attention_core
    if getattr(core, "serves_fp32", False):
        return

    # vLLM derives the op's schema from its arguments and their types.
    def core_of_any(mixed_qkv, b, a, core_attn_out, layer_name):  # type: ignore
        inputs = (mixed_qkv, b, a, core_attn_out)
        context = get_forward_context()
        if mixed_qkv.dtype != torch.float32 or context.attn_metadata is None:
            core(*inputs, layer_name)
            return
        name = gdn_attention._resolve_layer_name(layer_name)
        layer = context.no_compile_layers[name]
        metadata = context.attn_metadata[layer.prefix]
        if not metadata.num_actual_tokens:
            return
        width = layer.conv1d.weight.size(-1)
        state_len = gdn_attention._conv_buffer_view(layer).size(-1)
        # A longer state has room for drafts.
        if state_len == width - 1:
            gdn_attention._cpu_gdn_attention_nonspec(layer, metadata, *inputs)
        else:
            sizes = (width, state_len)
            gdn_attention._cpu_gdn_attention_spec_aware(
                layer, metadata, *inputs, *sizes
            )

    core_of_any.__annotations__ = get_type_hints(core) | {"return": None}
    core_of_any.serves_fp32 = True  # type: ignore[attr-defined]
    gdn_attention.cpu_gdn_attention_core = core_of_any
