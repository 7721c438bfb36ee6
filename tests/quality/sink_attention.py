# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Causal attention with sliding windows and sinks, by PyTorch's flash kernels.

A sink is one more logit of a head's softmax, which has no value. The kernels have no
sinks, but their outputs need only be scaled. Let lse be the log of the exponents' sum.
With the sink it is lse' = log(exp(lse) + exp(sink)), and the output is exp(lse - lse')
times the kernel's. The kernels' backward recomputes the probabilities from the log of
the sum, and the term that a row's gradients share from the output. Given lse' and the
scaled output, it returns the gradients of attention with the sink.
"""

import torch

aten = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def spans(window: int) -> dict[str, int | None]:
    """Returns the CUDA kernels' arguments for a window in tokens; 0: all tokens."""
    if window == 0:
        return {"window_size_left": None, "window_size_right": None}
    return {"window_size_left": window - 1, "window_size_right": 0}


def cpu_mask(query: torch.Tensor, window: int) -> dict[str, torch.Tensor]:
    """Returns the CPU kernels' mask, (1, 1, tokens, tokens), added to scores."""
    tokens = query.shape[1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window:
        seen = seen.triu(1 - window)
    mask = torch.zeros(1, 1, tokens, tokens, dtype=query.dtype)
    return {"attn_mask": mask.masked_fill(~seen, float("-inf"))}


def heads_first(query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Returns (batch, query heads, tokens, head_dim) of each, as CPU kernels want."""
    groups = query.shape[2] // others[0].shape[2]
    repeated = [x.repeat_interleave(groups, dim=2) for x in others]
    return [x.transpose(1, 2) for x in (query, *repeated)]


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
) -> Pair:
    """Returns attention without sinks, and the logs of the sums; see `attend`."""
    if query.is_cuda:
        length = query.shape[1]
        sizes = (None, None, length, length, 0.0, True, False)
        output, lse, *_ = aten._flash_attention_forward(
            query, key, value, *sizes, scale=scale, **spans(window)
        )
        return output, lse
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first(query, key, value), scale=scale, **cpu_mask(query, window)
    )
    return output.transpose(1, 2), lse


@torch.library.custom_op("needle::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    window: int,
) -> Pair:
    """Returns causal attention with sinks, and the logs of the sums, with the sinks.

    Args:
        query: (batch, tokens, heads, head_dim), bfloat16 on a GPU.
        key: (batch, tokens, KV heads, head_dim), a divisor of the heads.
        value: as `key`.
        sinks: (heads,), a logit each.
        scale: the factor of the products of queries and keys.
        window: Tokens that a query sees, its own the last; 0: all.

    Returns:
        As `query`, contiguous; and (batch, heads, tokens), float32.

    """
    output, lse = flash_forward(query, key, value, scale, window)
    total = torch.logaddexp(lse.float(), sinks.float()[:, None])
    share = (lse - total).exp().transpose(1, 2)[..., None]
    return (output * share).to(query.dtype).contiguous(), total.contiguous()


@torch.library.custom_op("needle::attend_backward", mutates_args=())
def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    total: torch.Tensor,
    scale: float,
    window: int,
) -> Triple:
    """Returns the gradients of `query`, `key` and `value`, contiguous; see `attend`."""
    if query.is_cuda:
        length = query.shape[1]
        # The state of dropout's random numbers. Without dropout it is not read.
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        offset = torch.empty((), dtype=torch.uint64, device=query.device)
        sizes = (None, None, length, length, 0.0, True, seed, offset)
        given = (grad.contiguous(), query, key, value, output, total)
        grads = aten._flash_attention_backward(
            *given, *sizes, scale=scale, **spans(window)
        )
        return tuple(x.contiguous() for x in grads)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.transpose(1, 2),
        *heads_first(query, key, value),
        output.transpose(1, 2),
        total,
        0.0,
        False,
        scale=scale,
        **cpu_mask(query, window),
    )
    # A KV head's gradient is the sum over the query heads that read it.
    return tuple(
        found.transpose(1, 2).unflatten(2, (given.shape[2], -1)).sum(3).contiguous()
        for found, given in zip(grads, (query, key, value))
    )


@attend.register_fake
def _(query, key, value, sinks, scale, window):
    batch, tokens, heads, _ = query.shape
    total = query.new_empty(batch, heads, tokens, dtype=torch.float32)
    return query.new_empty(query.shape), total


@attend_backward.register_fake
def _(grad, query, key, value, output, total, scale, window):
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def save_for_backward(ctx, inputs, output):
    query, key, value, sinks, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, sinks, *output)
    ctx.set_materialize_grads(False)


def backward(ctx, grad, grad_total):
    if grad_total is not None:
        raise ValueError("the logs of the sums have no gradient")
    query, key, value, sinks, output, total = ctx.saved_tensors
    grads = attend_backward(
        grad, query, key, value, output, total, ctx.scale, ctx.window
    )
    # The term that a softmax takes off each logit's gradient: a sink's has no other.
    common = (grad.float() * output.float()).sum(-1).transpose(1, 2)
    of_sinks = -((sinks.float()[:, None] - total).exp() * common).sum((0, 2))
    return *grads, of_sinks.to(sinks.dtype), None, None


attend.register_autograd(backward, setup_context=save_for_backward)
