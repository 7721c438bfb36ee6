# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for the sampler's fused ops."""

import torch


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns int64 [batch], the first index of each row's largest logit."""
    return logits.argmax(dim=-1)


def fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Samples one token per row by the Gumbel-max rule.

    A row's noise comes from its own seed alone, so a request's tokens do not
    depend on the batch it runs in. The stream differs from the native op's.

    Args:
        logits: float32 [batch, vocab], -inf where a token is masked.
        seeds: int64 [batch].

    Returns:
        int64 [batch].

    """
    noise = torch.empty_like(logits, dtype=torch.float64)
    for row, seed in zip(noise, seeds.tolist()):
        row.exponential_(generator=torch.Generator().manual_seed(seed))
    # -log of an Exp(1) draw is a Gumbel draw.
    return (logits.double() - noise.log()).argmax(dim=-1)


def rejection_greedy_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
) -> None:
    """Accepts drafted tokens up to the first that the target would not choose.

    Args:
        output_token_ids: int64 [batch, max_spec_len + 1], written up to the first
            mismatch, which is included, or up to the bonus token if all agree.
        cu_num_draft_tokens: int64 [batch], inclusive sums of the drafts' lengths.
        draft_token_ids: int64 [num_drafted].
        target_argmax: int64 [num_drafted].
        bonus_token_ids: int64 [batch, 1].
        is_greedy: bool [batch], rows to handle; None means all.
        max_spec_len: The length of the longest draft.

    """
    start = 0
    for row, end in enumerate(cu_num_draft_tokens.tolist()):
        target = target_argmax[start:end]
        agrees = target == draft_token_ids[start:end]
        start = end
        if is_greedy is not None and not is_greedy[row]:
            continue
        num_accepted = int(agrees.long().cumprod(0).sum())
        num_written = min(num_accepted + 1, target.numel())
        output_token_ids[row, :num_written] = target[:num_written]
        if num_accepted == target.numel():
            output_token_ids[row, num_accepted] = bonus_token_ids[row, 0]
