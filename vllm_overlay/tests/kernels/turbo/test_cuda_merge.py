# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA merge, compared to the same sums in fp64."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.cuda.constants import head_size_header
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    AttendedTokens,
    DecodeBatch,
    Partials,
    RawTokens,
)
from vllm.v1.attention.ops.turbo.triton.merge import merge_splits as triton_merge

from .attention_utils import assert_within, merge_call
from .utils import BF16, CAN_RUN_CUDA, DEVICE, FP16, gaussian, requires_nvidia


def can_build() -> bool:
    if not CAN_RUN_CUDA:
        return False
    try:
        cuda_merge.MERGE.load(128, None, DEVICE)
    except RuntimeError:
        return False
    return True


requires_cuda = pytest.mark.skipif(
    not can_build(), reason="needs an NVIDIA GPU, nvcc and FlashInfer"
)
all_sizes = pytest.mark.parametrize("head_size", SUPPORTED_HEAD_SIZES)
output_dtypes = pytest.mark.parametrize(
    "dtype", [BF16, FP16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
with_raw = pytest.mark.parametrize("with_raw", [False, True])
# Rounding of the output; for fp32, rounding of sums over up to 512 terms.
TOLERANCES = {BF16: 2.0**-8, FP16: 2.0**-11, torch.float32: 2.0**-18}
NUM_KV_HEADS = 2


def partial_results(
    counts: list[int], num_splits: int, num_heads: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results of the first ``counts`` splits of each sequence.

    Returns:
        The results, (B * num_splits, Hq, D), and LSEs, (B * num_splits, Hq), both fp32.
        Other splits have NaN and -Inf.

    """
    shape = (len(counts), num_splits, num_heads)
    written = torch.arange(num_splits)[None, :] < torch.tensor(counts)[:, None]
    written = written.to(DEVICE)[..., None].expand(shape)
    partial = gaussian(*shape, head_size, seed=1)
    partial[~written] = math.nan
    lse = 2 * gaussian(*shape, seed=2)
    lse[~written] = -math.inf
    return partial.flatten(0, 1), lse.flatten(0, 1)


def raw_tokens(num_seqs: int, group: int, head_size: int, dtype) -> RawTokens:
    """Views of one tensor, as of a fused projection; scores are as large as LSEs."""
    num_heads = group * NUM_KV_HEADS
    sizes = [num_heads, NUM_KV_HEADS, NUM_KV_HEADS]
    qkv = gaussian(num_seqs, sum(sizes), head_size, dtype=dtype, seed=3)
    query, key, value = qkv.split(sizes, 1)
    return RawTokens(query, key, value, head_size**-0.5)


def expected_output(
    partial: torch.Tensor,
    lse: torch.Tensor,
    seq_lens: torch.Tensor,
    raw: RawTokens | None,
) -> torch.Tensor:
    """The merged output, (B, Hq, D) fp64."""
    num_seqs = seq_lens.shape[0]
    num_heads, head_size = partial.shape[1:]
    lse = lse.view(num_seqs, -1, num_heads).double()
    matrix = rotation_matrix(head_size, lse.device, torch.float64, inverse=True)
    parts = partial.view(*lse.shape, head_size).double()
    parts = parts.where((lse != -math.inf)[..., None], 0) @ matrix * head_size**-0.5
    if raw is not None:
        group = num_heads // raw.key.shape[1]
        exists = (seq_lens > 0)[:, None]
        key, value = (
            x.double().repeat_interleave(group, 1) for x in (raw.key, raw.value)
        )
        score = (raw.query.double() * key).sum(-1) * raw.scale / math.log(2)
        lse = torch.cat([lse, score.where(exists, -math.inf)[:, None]], 1)
        parts = torch.cat([parts, value.where(exists[..., None], 0)[:, None]], 1)
    weights = (lse * math.log(2)).softmax(1).nan_to_num()
    return (weights[..., None] * parts).sum(1)


def batch_of(seq_lens: torch.Tensor) -> DecodeBatch:
    """Sequences with one query token. The block table is empty: a merge reads none."""
    table = torch.empty(0, 0, dtype=torch.int32, device=DEVICE)
    return DecodeBatch(len(seq_lens), table, seq_lens)


def merge(
    partial: torch.Tensor,
    lse: torch.Tensor,
    seq_lens: torch.Tensor,
    dtype: torch.dtype,
    raw: RawTokens | None = None,
    num_warps: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merge into rows of a wider tensor, whose other elements must stay."""
    num_heads, head_size = partial.shape[1:]
    shape = (seq_lens.shape[0], num_heads + 1, head_size)
    buffer = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    output = buffer[:, 1:]
    if num_warps is not None:
        num_warps = min(num_warps, cuda_merge.block_warps(head_size))
    call = merge_call(batch_of(seq_lens), output, NUM_KV_HEADS, raw, sinks=sinks)
    cuda_merge.merge_splits(Partials(partial, lse), call, num_warps)
    assert buffer[:, 0].isnan().all()
    return output


def lengths(counts: list[int]) -> torch.Tensor:
    """Lengths that surely have tokens in ``counts`` splits, or only a raw token."""
    return torch.tensor([100 * n + 1 for n in counts], device=DEVICE).int()


@requires_cuda
@all_sizes
@output_dtypes
@with_raw
@pytest.mark.parametrize("num_warps", [None, 1, 2, 4, 8])
@pytest.mark.parametrize(
    "counts, num_splits",
    [([1, 0, 1], 1), ([3, 1, 2], 3), ([8, 3, 0, 1, 9], 51), ([64, 33, 32], 64)],
    ids=str,
)
def test_against_fp64(head_size, dtype, with_raw, num_warps, counts, num_splits):
    for group in (1, 4, 5):
        num_heads = group * NUM_KV_HEADS
        partial, lse = partial_results(counts, num_splits, num_heads, head_size)
        raw = raw_tokens(len(counts), group, head_size, dtype)
        arguments = partial, lse, lengths(counts)
        raw = raw if with_raw else None
        output = merge(*arguments, dtype, raw, num_warps)
        expected = expected_output(*arguments, raw)
        allowed = TOLERANCES[dtype] * expected.abs().max()
        assert_within(output, expected, allowed)
        again = merge(*arguments, dtype, raw, num_warps)
        assert torch.equal(output, again)


@requires_cuda
@all_sizes
@with_raw
@pytest.mark.parametrize("num_warps", [1, 8])
@pytest.mark.parametrize(
    "counts, num_splits", [([1, 0, 1], 1), ([8, 3, 0, 1, 9], 51)], ids=str
)
@pytest.mark.parametrize("sinks_dtype", TOLERANCES, ids=str)
def test_sinks(head_size, with_raw, num_warps, counts, num_splits, sinks_dtype):
    """Sinks count as one more split, whose values are zero; alone they give zero."""
    num_heads = 4 * NUM_KV_HEADS
    # Both KV heads' query heads have the same sinks, in different places.
    sinks = torch.tensor([-math.inf, -20.0, 0.0, 20.0], device=DEVICE)
    sinks = torch.cat([sinks, sinks.roll(1)])
    partial, lse = partial_results(counts, num_splits, num_heads, head_size)
    raw = raw_tokens(len(counts), 4, head_size, torch.float32)
    raw = raw if with_raw else None
    arguments = partial, lse, lengths(counts)
    output = merge(*arguments, torch.float32, raw, num_warps, sinks.to(sinks_dtype))
    shape = (len(counts), num_splits, num_heads)
    ones = (sinks / math.log(2)).expand(len(counts), 1, -1)
    lse = torch.cat([lse.view(shape), ones], 1).flatten(0, 1)
    partial = torch.cat(
        [
            partial.view(*shape, head_size),
            torch.zeros_like(ones)[..., None].expand(-1, -1, -1, head_size),
        ],
        1,
    ).flatten(0, 1)
    expected = expected_output(partial, lse, lengths(counts), raw)
    allowed = TOLERANCES[torch.float32] * expected.abs().max()
    assert_within(output, expected, allowed)


SINKS_NOT_TAKEN = {
    "heads": ((7,), torch.float32, "7 along axis 0, not 8"),
    "axes": ((8, 1), torch.float32, "2 axes, not 1"),
    "dtype": ((8,), torch.float64, "dtype float64, not float32"),
}


@requires_cuda
@pytest.mark.parametrize("name", SINKS_NOT_TAKEN)
def test_sinks_that_are_not_taken(name):
    shape, dtype, message = SINKS_NOT_TAKEN[name]
    partial, lse = partial_results([1], 1, 8, 128)
    sinks = torch.zeros(shape, dtype=dtype, device=DEVICE)
    error = TypeError if name == "dtype" else ValueError
    with pytest.raises(error, match=f"sinks: {message}"):
        merge(partial, lse, lengths([1]), BF16, sinks=sinks)


@requires_cuda
@all_sizes
@with_raw
def test_against_triton(head_size, with_raw):
    counts = [40, 0, 7, 1] * 20
    partial, lse = partial_results(counts, 40, 8, head_size)
    raw = raw_tokens(len(counts), 4, head_size, FP16) if with_raw else None
    output = merge(partial, lse, lengths(counts), FP16, raw)
    expected = torch.empty_like(output)
    batch = batch_of(lengths(counts))
    call = merge_call(batch, expected, NUM_KV_HEADS, raw)
    triton_merge(Partials(partial, lse), call)
    allowed = 2 * TOLERANCES[FP16] * expected.abs().max()
    assert_within(output, expected, allowed)


@requires_cuda
@all_sizes
def test_padding_and_a_raw_token_alone(head_size):
    """Padding gives zeros for any q, K and V; one token gives its value."""
    partial, lse = partial_results([0, 0, 2], 4, 8, head_size)
    raw = raw_tokens(3, 4, head_size, BF16)
    for x in raw[:3]:
        x[0] = math.nan
    seq_lens = torch.tensor([0, 1, 100], device=DEVICE).int()
    output = merge(partial, lse, seq_lens, BF16, raw)
    assert (output[0] == 0).all()
    assert torch.equal(output[1], raw.value[1].repeat_interleave(4, 0))
    assert output[2].isfinite().all()


@requires_cuda
def test_large_lses():
    """Only differences of LSEs count: bit for bit if they are exact."""
    partial, lse = partial_results([40, 3], 64, 8, 128)
    lse = (lse * 64).round() / 64
    expected = merge(partial, lse, lengths([40, 3]), torch.float32)
    for offset in (2.0**14, -(2.0**14)):
        output = merge(partial, lse + offset, lengths([40, 3]), torch.float32)
        assert torch.equal(output, expected)


@requires_cuda
def test_weights_that_vanish_are_not_read():
    partial, lse = partial_results([4], 4, 2, 128)
    lse[2] = lse[0] - 1000
    partial[2] = math.nan
    expected = expected_output(partial.nan_to_num(), lse, lengths([4]), None)
    output = merge(partial, lse, lengths([4]), torch.float32)
    assert (output - expected).abs().max() <= 2.0**-18 * expected.abs().max()


@requires_cuda
@pytest.mark.parametrize("broken", ["lse", "partial", "query", "key", "value"])
def test_nan_stays_in_its_row(broken):
    partial, lse = partial_results([5, 5], 8, 8, 128)
    raw = raw_tokens(2, 4, 128, BF16)
    whole = merge(partial, lse, lengths([5, 5]), BF16, raw)
    tensors = {"lse": lse, "partial": partial, **raw._asdict()}
    tensors[broken][0, 0] = math.nan
    output = merge(partial, lse, lengths([5, 5]), BF16, raw)
    assert output[0, 0].isnan().all()
    assert torch.equal(output[0, 4:], whole[0, 4:])
    assert torch.equal(output[1], whole[1])


@requires_cuda
def test_one_split_does_not_depend_on_the_batch():
    partial, lse = partial_results([1] * 300, 1, 8, 128)
    output = merge(partial, lse, lengths([1] * 300), BF16)
    alone = merge(partial[7:8], lse[7:8], lengths([1]), BF16)
    assert torch.equal(output[7:8], alone)


@requires_nvidia
def test_it_waits_for_the_kernel_before_it():
    """The kernel right before writes the partial results, here in a graph."""
    partial, lse = partial_results([6] * 64, 6, 8, 128)
    seq_lens = lengths([6] * 64)
    expected = merge(partial, lse, seq_lens, FP16)
    scratch = [torch.full_like(x, math.nan) for x in (partial, lse)]
    output = torch.empty_like(expected)

    def run() -> None:
        for target, source in zip(scratch, (partial, lse)):
            torch.mul(source, 1, out=target)
        call = merge_call(batch_of(seq_lens), output, NUM_KV_HEADS)
        cuda_merge.merge_splits(Partials(*scratch), call)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(10):
        for x in (*scratch, output):
            x.fill_(math.nan)
        graph.replay()
        assert torch.equal(output, expected)


@requires_cuda
@all_sizes
@pytest.mark.parametrize("num_splits", [1, 2, 64])
@pytest.mark.parametrize("lse", [0.0, 14427.0, -14427.0])
def test_equal_lses_give_the_mean(head_size, num_splits, lse):
    """Equal LSEs give the mean, even with scores of 1e4 or -1e4."""
    partial, _ = partial_results([num_splits], num_splits, 8, head_size)
    lses = torch.full((num_splits, 8), lse, device=DEVICE)
    output = merge(partial, lses, lengths([num_splits]), torch.float32)
    matrix = rotation_matrix(head_size, output.device, torch.float64, inverse=True)
    expected = partial.double().mean(0) @ matrix * head_size**-0.5
    assert (output[0] - expected).abs().max() <= 2.0**-18 * expected.abs().max()


@requires_cuda
@all_sizes
@pytest.mark.parametrize("place", [0, 1, 31, 32, 63])
def test_a_dominating_split_is_alone(head_size, place):
    """Other splits have no weight, even if their partial results are huge."""
    partial, lse = partial_results([64], 64, 8, head_size)
    partial *= 1e30
    partial[place] /= 1e30
    lse[place] = lse.max() + 200
    output = merge(partial, lse, lengths([64]), torch.float32)
    alone = merge(partial[place][None], lse[place][None], lengths([1]), torch.float32)
    assert (output - alone).abs().max() <= 2.0**-20 * alone.abs().max()


@requires_cuda
@pytest.mark.parametrize("num_warps", [1, 8])
def test_partial_results_beyond_4_gib(num_warps):
    """Only the last sequences have partial results, beyond 4 GiB."""
    num_seqs, num_splits, num_heads, head_size = 2060, 64, 32, 256
    shape = (num_seqs * num_splits, num_heads, head_size)
    last = slice(-2 * num_splits, None)
    partial = torch.empty(shape, device=DEVICE)
    assert partial[: last.start].nbytes > 2**32
    lse = torch.full(shape[:2], -math.inf, device=DEVICE)
    partial[last], lse[last] = partial_results([64, 33], 64, num_heads, head_size)
    seq_lens = torch.zeros(num_seqs, dtype=torch.int32, device=DEVICE)
    seq_lens[-2:] = lengths([64, 33])
    output = merge(partial, lse, seq_lens, BF16, num_warps=num_warps)
    assert (output[:-2] == 0).all()
    alone = merge(partial[last], lse[last], seq_lens[-2:], BF16, num_warps=num_warps)
    assert torch.equal(output[-2:], alone)
    assert (alone != 0).any()


@requires_nvidia
@with_raw
def test_a_graph_is_replayed_with_other_inputs(with_raw):
    """A replay reads the lengths and raw tokens that tensors then hold."""
    batches = [[3, 6, 0, 1], [0, 0, 0, 0], [6, 6, 6, 6], [1, 2, 0, 4]]
    inputs = [
        (*partial_results(counts, 6, 8, 128), lengths(counts)) for counts in batches
    ]
    inputs[1][2].zero_()
    raw = raw_tokens(4, 4, 128, BF16)
    given = raw if with_raw else None
    static = tuple(torch.empty_like(x) for x in inputs[0])
    output = torch.empty_like(raw.query)
    merge(*inputs[0], BF16, given)  # builds and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        partial, lse, seq_lens = static
        partials, of_graph = Partials(partial, lse), batch_of(seq_lens)
        call = merge_call(of_graph, output, NUM_KV_HEADS, given)
        cuda_merge.merge_splits(partials, call)
    for index, batch in enumerate(inputs):
        for x in raw[:3]:
            x.copy_(gaussian(*x.shape, dtype=BF16, seed=index))
        for target, source in zip(static, batch):
            target.copy_(source)
        output.fill_(math.nan)
        graph.replay()
        assert torch.equal(output, merge(*batch, BF16, given))


@requires_nvidia
def test_two_streams():
    """A merge waits for its own stream's work, and for no other stream's."""
    sources = [partial_results(counts, 6, 8, 128) for counts in ([6] * 64, [3] * 64)]
    seq_lens = lengths([6] * 64)
    expected = [merge(*source, seq_lens, BF16) for source in sources]
    targets = [[torch.zeros_like(x) for x in source] for source in sources]
    streams = [torch.cuda.Stream() for _ in sources]
    torch.accelerator.synchronize()
    outputs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for target, source in zip(targets[index], sources[index]):
                    target.zero_()
                    # A merge that does not wait would run during the sleep.
                    torch.cuda._sleep(100_000)
                    target.copy_(source)
                outputs[index].append(torch.empty_like(expected[index]))
                call = merge_call(batch_of(seq_lens), outputs[index][-1], NUM_KV_HEADS)
                cuda_merge.merge_splits(Partials(*targets[index]), call)
    torch.accelerator.synchronize()
    for results, one in zip(outputs, expected):
        assert all(torch.equal(output, one) for output in results)


@all_sizes
def test_signs_are_those_of_the_rotation(head_size):
    header = head_size_header(head_size)
    words = next(x for x in header.splitlines() if "ROTATION_SIGNS" in x)
    bits = [
        int(word.strip(" u"), 0) >> i & 1
        for word in words.split(maxsplit=2)[2].split(",")
        for i in range(32)
    ]
    # The inverse rotation's first row has the same magnitudes: only signs differ.
    matrix = rotation_matrix(head_size, torch.device("cpu"), inverse=True)
    assert bits == (matrix[0] < 0).int().tolist()


@all_sizes
@pytest.mark.parametrize("num_sms", [16, 132])
def test_warps_a_row(num_sms, head_size):
    """Warps a row are a power of two, one with one split, and fit the GPU."""
    most = cuda_merge.block_warps(head_size)
    for num_rows in (1, 8, 32, 500, 1024, 4096, 10**6):
        for num_splits in range(1, MAX_KV_SPLITS + 1):
            warps = cuda_merge.warps_a_row(num_rows, num_splits, head_size, num_sms)
            assert warps in (1, 2, 4, most) and warps <= num_splits
            assert warps == 1 or warps * num_rows <= 8 * most * num_sms
    assert cuda_merge.warps_a_row(32, 64, head_size, num_sms) == most


@pytest.mark.parametrize("group", [1, 2, 4, 5, 16])
@all_sizes
def test_warps_a_row_with_tail(head_size, group):
    """A window never adds warps; it has fewer only if rows share a block's reads."""
    most = cuda_merge.block_warps(head_size)
    for num_rows in (1, 8, 32, 128, 500, 512, 1024, 2048, 10**6):
        for num_splits in (1, 7, 64):
            without = cuda_merge.warps_a_row(num_rows, num_splits, head_size, 132)
            arguments = num_rows, num_splits, group, head_size, 132
            warps = cuda_merge.warps_a_row_with_tail(*arguments)
            assert warps <= without and warps in (1, 2, 4, most)
            if warps < without:
                assert most // (2 * warps) < min(group, 4 if head_size < 256 else 2)
                assert 2 * warps * num_rows > most * 132
    assert cuda_merge.warps_a_row_with_tail(32, 64, 4, 128, 132) == 8
    assert cuda_merge.warps_a_row_with_tail(512, 51, 4, 128, 132) == 2


@requires_cuda
@all_sizes
@output_dtypes
@pytest.mark.parametrize("sinks", [None, 1.5])
def test_results_of_raw_tokens(head_size, dtype, sinks):
    """Given the result of attention to the raw tokens, the merge gives the same as
    if it attends to them, up to rounding. Tokens that do not exist have a NaN there.
    """
    query_len, group, seq_lens = 5, 2, [900, 3, 0, 40]
    num_heads, num_tokens = group * NUM_KV_HEADS, query_len * len(seq_lens)
    counts = [4, 0, 0, 1]
    partial, lse = partial_results(counts, 4, query_len * num_heads, head_size)
    partial = partial.view(-1, num_heads, head_size)
    raw = raw_tokens(num_tokens, group, head_size, dtype)
    batch = DecodeBatch(
        len(seq_lens),
        torch.empty(0, 0, dtype=torch.int32, device=DEVICE),
        torch.tensor(seq_lens, device=DEVICE).int(),
        query_len,
    )
    output = torch.full((num_tokens, num_heads, head_size), math.nan, device=DEVICE)
    own_lse = torch.full((num_heads, num_tokens), math.nan, device=DEVICE)
    key, value = (x.float().repeat_interleave(group, 1) for x in (raw.key, raw.value))
    for row, length in enumerate(seq_lens):
        end = (row + 1) * query_len
        begin = end - min(length, query_len)
        for token in range(begin, end):
            scores = torch.einsum(
                "hd,thd->ht", raw.query[token].float(), key[begin : token + 1]
            )
            scores *= raw.scale
            own_lse[:, token] = scores.logsumexp(1)
            output[token] = torch.einsum(
                "ht,thd->hd", scores.softmax(1), value[begin : token + 1]
            )
    attended = AttendedTokens(output.to(dtype), own_lse)
    if sinks is not None:
        sinks = sinks * torch.linspace(-1, 1, num_heads, device=DEVICE)
    results = []
    for tokens in (raw, raw._replace(attended=attended)):
        result = torch.full_like(attended.output, math.nan)
        partials = Partials(partial, lse.view(-1, num_heads))
        call = merge_call(batch, result, NUM_KV_HEADS, tokens, sinks=sinks)
        cuda_merge.merge_splits(partials, call)
        results.append(result.float())
    # Both results are rounded, and so is the result of attention that is given.
    sizes = 2 * results[0].abs() + output.abs().nan_to_num()
    bound = TOLERANCES[dtype] * sizes + 2.0**-16 * value.abs().max()
    assert ((results[0] - results[1]).abs() <= bound).all()
