# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for the ops that give a drafting model its inputs."""

import torch


def prepare_inputs(
    cu_num_draft_tokens: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    query_start_loc: torch.Tensor,
    token_indices_to_sample: torch.Tensor,
    num_rejected_tokens: torch.Tensor,
    num_reqs: int,
) -> None:
    """Finds the rejected drafts of each request, and its last valid token.

    Args:
        cu_num_draft_tokens: int64 [batch], inclusive sums of the drafts' lengths.
        valid_sampled_tokens_count: int64 [batch].
        query_start_loc: int32 [batch + 1].
        token_indices_to_sample: int32 [batch], written.
        num_rejected_tokens: int64 [batch], written.
        num_reqs: Requests of the batch.

    """
    num_drafts = cu_num_draft_tokens[:num_reqs].diff(
        prepend=cu_num_draft_tokens.new_zeros(1)
    )
    rejected = num_drafts + 1 - valid_sampled_tokens_count[:num_reqs]
    rejected = torch.where(num_drafts > 0, rejected, 0)
    num_rejected_tokens[:num_reqs] = rejected
    token_indices_to_sample[:num_reqs] = (
        query_start_loc[1 : num_reqs + 1] - 1 - rejected
    )


def prepare_next_token(
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    next_token_ids: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
) -> None:
    """Finds each request's last sampled token, and counts its sampled tokens.

    Args:
        sampled_token_ids: int64 [batch, num_sampled_tokens_per_req], -1 for none.
        discard_request_mask: bool [batch], requests that sample no token.
        backup_next_token_ids: int64 [batch], for requests without a sampled token.
        next_token_ids: int64 [batch], written.
        valid_sampled_tokens_count: int64 [batch], written.
        vocab_size: The bound of valid tokens, which are below it.
        num_sampled_tokens_per_req: The most sampled tokens of a request.
        num_reqs: Requests of the batch.

    """
    for row in range(num_reqs):
        sampled = sampled_token_ids[row, :num_sampled_tokens_per_req]
        valid = sampled[(sampled != -1) & (sampled < vocab_size)]
        count = 0 if discard_request_mask[row] else valid.numel()
        next_token_ids[row] = valid[-1] if count else backup_next_token_ids[row]
        valid_sampled_tokens_count[row] = count


def step_slot_mapping(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out_clamped_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    block_size: int,
    max_model_len: int,
    pad_id: int,
) -> None:
    """Moves each request to its next draft token.

    A request that would exceed `max_model_len` gets position 0, length 1 and no slot.

    Args:
        positions: int64 [batch].
        block_table: int32 [>= batch, blocks].
        seq_lens: int32 [batch], updated.
        out_clamped_positions: int64 [batch], written.
        out_slot_mapping: int64 [padded batch], written.
        block_size: Tokens of a block.
        max_model_len: The length of the longest sequence.
        pad_id: The value that stands for no slot.

    """
    count = positions.numel()
    past = positions + 1 >= max_model_len
    position = torch.where(past, 0, positions + 1)
    column = (position // block_size).clamp(max=block_table.shape[1] - 1)
    block = block_table[:count].gather(1, column[:, None])[:, 0].long()
    slots = block * block_size + position % block_size
    out_slot_mapping.fill_(pad_id)
    out_slot_mapping[:count] = torch.where(past, pad_id, slots)
    lens = (seq_lens[:count] + 1).clamp(max=max_model_len)
    seq_lens[:count] = torch.where(past, 1, lens)
    # This comes last, because `positions` may be the same tensor.
    out_clamped_positions[:count] = position


def expand_inputs(
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_is_rejected_token_mask: torch.Tensor,
    out_is_masked_token_mask: torch.Tensor,
    out_new_token_indices: torch.Tensor,
    out_hidden_state_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    total_input_tokens: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
) -> None:
    """Gives each request room for more tokens.

    Its tokens are the valid ones, the one sampled after them, those drafted in
    parallel, and then as many as were rejected.

    Args:
        target_token_ids: int64 [tokens], of the step before.
        target_positions: int64 [tokens].
        next_token_ids: int64 [batch], sampled.
        out_input_ids: int64 [new tokens], written, as are the other outputs.
        out_positions: int64 [new tokens].
        out_is_rejected_token_mask: bool [new tokens].
        out_is_masked_token_mask: bool [new tokens], drafted in parallel.
        out_new_token_indices: int32 [batch * num_padding_slots_per_request], indices of
            the sampled token and of those drafted in parallel.
        out_hidden_state_mapping: int32 [tokens], the new index of each token; only with
            `shift_input_ids`.
        query_start_loc: int32 [batch + 1].
        query_end_loc: int32 [batch], the last valid token's index.
        padding_token_id: The id of rejected tokens.
        parallel_drafting_token_id: The id of tokens drafted in parallel.
        total_input_tokens: Input tokens of the step before.
        num_padding_slots_per_request: Slots for the sampled token and for those drafted
            in parallel.
        shift_input_ids: Whether a request's first token is dropped.

    """
    added = num_padding_slots_per_request
    shift = int(shift_input_ids)
    begins, ends = query_start_loc.tolist(), query_end_loc.tolist()
    for row, (begin, next_begin, end) in enumerate(zip(begins, begins[1:], ends)):
        num_valid = end + 1 - begin - shift
        num_new = num_valid + added + next_begin - end - 1
        first = begin + row * (added - shift)
        out = slice(first, first + num_new)
        sampled = first + num_valid
        out_input_ids[out] = padding_token_id
        source = slice(begin + shift, begin + shift + num_valid)
        out_input_ids[first:sampled] = target_token_ids[:total_input_tokens][source]
        out_input_ids[sampled] = next_token_ids[row]
        out_input_ids[sampled + 1 : sampled + added] = parallel_drafting_token_id
        offsets = torch.arange(num_new)
        rejected = offsets >= num_valid + added
        out_positions[out] = torch.where(rejected, 0, target_positions[begin] + offsets)
        out_is_rejected_token_mask[out] = rejected
        out_is_masked_token_mask[out] = False
        out_is_masked_token_mask[sampled + 1 : sampled + added] = True
        out_new_token_indices[row * added : (row + 1) * added] = torch.arange(
            sampled, sampled + added
        )
        if shift_input_ids:
            places = first + torch.arange(next_begin - begin)
            out_hidden_state_mapping[begin:next_begin] = places
