# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Triton merge of decode attention's splits, compared to sums in fp64."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials, RawTokens

from .attention_utils import merge_call
from .utils import DEVICE, FP16, gaussian, requires_triton

pytestmark = requires_triton

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 64
SCALE = HEAD_SIZE**-0.5
# Query tokens of each sequence.
BATCHES = {
    "one token each": [1] * 5,
    "several each": [3] * 4,
    "ragged": [3, 1, 0, 2],
}


class Splits:
    """Random results of splits; each sequence has written some of its splits.

    Attributes:
        partial: (B * S * Q, Hq, D) fp32; NaN where nothing was written.
        lse: (B * S * Q, Hq) fp32, in base 2; -inf there.

    """

    def __init__(self, counts: list[int], num_splits: int, query_len: int) -> None:
        """``counts``: number of splits of each sequence that have tokens."""
        self.shape = (len(counts), num_splits, query_len, NUM_HEADS)
        written = torch.arange(num_splits) < torch.tensor(counts)[:, None]
        written = written[..., None, None].expand(self.shape).to(DEVICE)
        self.partial = gaussian(*self.shape, HEAD_SIZE, seed=1).flatten(0, 2)
        self.partial[~written.flatten(0, 2)] = math.nan
        self.lse = 2 * gaussian(*self.shape, seed=2).flatten(0, 2)
        self.lse[~written.flatten(0, 2)] = -math.inf

    def of_row(
        self, sequence: int, place: int, head: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A row's written results, rotated back, (S, D), and LSEs, (S,), in fp64."""
        lse = self.lse.view(self.shape)[sequence, :, place, head].double()
        values = self.partial.view(*self.shape, HEAD_SIZE)[sequence, :, place, head]
        written = lse > -math.inf
        matrix = rotation_matrix(HEAD_SIZE, DEVICE, torch.float64, inverse=True)
        rotated = values[written].double() @ matrix * HEAD_SIZE**-0.5
        return rotated, lse[written] * math.log(2)


def merge(splits: Splits, query_lens: list[int], seq_lens: list[int], raw):
    """Merge into a tensor of NaN with two rows more than there are tokens."""
    from vllm.v1.attention.ops.turbo.triton.merge import merge_splits

    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    query_len = splits.shape[2]
    is_uniform = set(query_lens) == {query_len}
    num_tokens = sum(query_lens)
    buffer = torch.full((num_tokens + 2, NUM_HEADS, HEAD_SIZE), math.nan, device=DEVICE)
    call = merge_call(
        DecodeBatch(
            len(query_lens),
            torch.empty(0, 0, dtype=torch.int32, device=DEVICE),
            torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
            query_len,
            None if is_uniform else starts.to(DEVICE),
        ),
        buffer[:num_tokens],
        NUM_KV_HEADS,
        None if raw is None else RawTokens(*raw, SCALE),
    )
    merge_splits(Partials(splits.partial, splits.lse), call)
    assert buffer[num_tokens:].isnan().all()
    return buffer[:num_tokens]


def raw_tokens(num_tokens: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value, as views of one tensor."""
    sizes = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    qkv = gaussian(num_tokens, sum(sizes), HEAD_SIZE, dtype=FP16, seed=3)
    return qkv.split(sizes, 1)


def check(output: torch.Tensor, splits: Splits, query_lens: list[int], raw) -> None:
    """Compare each row to attention over the splits and tokens that it should see."""
    token = 0
    for sequence, query_len in enumerate(query_lens):
        first = token
        for place in range(query_len):
            for head in range(NUM_HEADS):
                values, scores = splits.of_row(sequence, place, head)
                if raw is not None:
                    query, key, value = (x.double() for x in raw)
                    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
                    own = key[first : token + 1, kv_head] @ query[token, head] * SCALE
                    scores = torch.cat([scores, own])
                    values = torch.cat([values, value[first : token + 1, kv_head]])
                expected = scores.softmax(0) @ values
                error = (output[token, head] - expected).abs().max().item()
                assert error <= 2**-17 * values.abs().max().item()
            token += 1


@pytest.mark.parametrize("num_splits", [1, 9, 64])
@pytest.mark.parametrize("with_raw", [False, True])
@pytest.mark.parametrize("query_lens", BATCHES.values(), ids=BATCHES)
def test_every_split_counts(query_lens, with_raw, num_splits):
    """Each split counts, with few splits and the most, and if the last splits have no
    tokens.
    """
    counts = [max(1, num_splits - 3 * row) for row in range(len(query_lens))]
    splits = Splits(counts, num_splits, max(query_lens))
    raw = raw_tokens(sum(query_lens)) if with_raw else None
    output = merge(splits, query_lens, [1000] * len(query_lens), raw)
    check(output, splits, query_lens, raw)


@pytest.mark.parametrize(
    "query_lens", [[3, 3, 3], [3, 3, 2]], ids=["uniform", "ragged"]
)
def test_tokens_that_padding_lacks(query_lens):
    """A padded request is shorter than its query: only the last query tokens exist.

    Rows before them may hold anything.
    """
    seq_lens = [1, 2, 0]
    splits = Splits([0, 0, 0], 2, 3)
    raw = raw_tokens(sum(query_lens))
    ends = torch.tensor(query_lens).cumsum(0).tolist()
    missing = [
        token
        for end, query_len, seq_len in zip(ends, query_lens, seq_lens)
        for token in range(end - query_len, end - seq_len)
    ]
    for x in raw:
        x[missing] = math.nan
    output = merge(splits, query_lens, seq_lens, raw)
    assert (output[missing] == 0).all()
    _, key, value = raw
    assert torch.equal(output[2], value[2].float().repeat_interleave(2, 0))
    # The second sequence's two tokens are like a query of two.
    short = Splits([0], 2, 2)
    own = tuple(x[4:6] for x in raw)
    check(output[4:6], short, [2], own)


def parts_of_ranks(splits: Splits, query_lens: list[int], num_ranks: int) -> Splits:
    """Results of ranks with equal shares of the splits, as splits to be merged."""
    from vllm.v1.attention.ops.turbo.triton.merge import merge_splits

    num_seqs, num_splits, query_len, _ = splits.shape
    starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    table = torch.empty(0, 0, dtype=torch.int32, device=DEVICE)
    lens = torch.full((num_seqs,), 1000, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(num_seqs, table, lens, query_len, starts)
    parts = []
    for share in torch.arange(num_splits, device=DEVICE).chunk(num_ranks):
        lse = splits.lse.view(splits.shape)[:, share].flatten(0, 2)
        partial = splits.partial.view(*splits.shape, HEAD_SIZE)[:, share]
        partial = partial.reshape(-1, NUM_HEADS, HEAD_SIZE)
        shape = (num_seqs * query_len, NUM_HEADS)
        own = Partials(
            torch.full((*shape, HEAD_SIZE), math.nan, device=DEVICE),
            torch.full(shape, math.nan, device=DEVICE),
        )
        partials = Partials(partial, lse.reshape(-1, NUM_HEADS))
        call = merge_call(batch, own.output, NUM_KV_HEADS, lse=own.lse)
        merge_splits(partials, call)
        parts.append(own)
    merged = Splits([0] * num_seqs, num_ranks, query_len)
    for result, name in ((merged.partial, "output"), (merged.lse, "lse")):
        rows = [
            getattr(own, name).view(num_seqs, -1, *result.shape[1:]) for own in parts
        ]
        result.copy_(torch.stack(rows, 1).view_as(result))
    return merged


@pytest.mark.parametrize("query_lens", BATCHES.values(), ids=BATCHES)
def test_parts_of_ranks(query_lens):
    """Ranks merge their splits, and then their results are merged like splits.

    The last rank has no tokens of some sequences.
    """
    counts = [max(1, 9 - 3 * row) for row in range(len(query_lens))]
    splits = Splits(counts, 9, max(query_lens))
    # No kernel writes rows that a sequence does not have.
    missing = torch.arange(splits.shape[2]) >= torch.tensor(query_lens)[:, None]
    missing = missing.to(DEVICE)[:, None].expand(splits.shape[:3]).flatten()
    splits.lse[missing] = math.nan
    parts = parts_of_ranks(splits, query_lens, 3)
    assert not parts.lse.isnan().any() and parts.partial.isfinite().all()
    raw = raw_tokens(sum(query_lens))
    output = merge(parts, query_lens, [1000] * len(query_lens), raw)
    check(output, splits, query_lens, raw)
