# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CUDA's merge alone: its warps, streams, graphs and refusals, and attended tokens."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda.constants import head_size_header
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import MAX_KV_SPLITS, AttendedTokens

from ..utils import BF16, DEVICE, FP16, gaussian, requires_cuda, requires_nvidia
from .merge_utils import (
    CUDA,
    TOLERANCES,
    Splits,
    all_sizes,
    output_dtypes,
    with_raw,
    with_warps,
)

SINKS_NOT_TAKEN = {
    "heads": ((7,), torch.float32, "7 along axis 0, not 8"),
    "axes": ((8, 1), torch.float32, "2 axes, not 1"),
    "dtype": ((8,), torch.float64, "dtype float64, not float32"),
}


@requires_cuda
@pytest.mark.parametrize("name", SINKS_NOT_TAKEN)
def test_sinks_that_are_not_taken(name):
    shape, dtype, message = SINKS_NOT_TAKEN[name]
    sinks = torch.zeros(shape, dtype=dtype, device=DEVICE)
    error = TypeError if name == "dtype" else ValueError
    with pytest.raises(error, match=f"sinks: {message}"):
        Splits([1], 1, None, 4, 128).merge(CUDA, BF16, sinks=sinks)


@requires_cuda
def test_parts_that_are_not_taken():
    """Parts must be fp32, with one row and LSE for each token slot and head."""
    splits = Splits([1], 1, None, 2, 128)
    output = torch.empty(1, 4, 128, device=DEVICE)
    lse = torch.empty(1, 4, device=DEVICE)
    cuda_merge.merge_splits(splits.partials, splits.call(output, lse=lse))
    for wrong, wrong_lse in (
        (output.to(BF16), lse),
        (output, lse[:, :2]),
        (output.expand(2, -1, -1), lse.expand(2, -1)),
    ):
        with pytest.raises(AssertionError):
            call = splits.call(wrong, lse=wrong_lse)
            cuda_merge.merge_splits(splits.partials, call)


@requires_nvidia
def test_it_waits_for_the_kernel_before_it():
    """The kernel right before writes the partial results, here in a graph."""
    splits = Splits([6] * 64, 6, None, 4, 128)
    expected = splits.merge(CUDA, FP16)
    sources = splits.partials
    splits.partial, splits.lse = (torch.full_like(x, math.nan) for x in sources)
    output = torch.empty_like(expected)
    call = splits.call(output)

    def run() -> None:
        for target, source in zip(splits.partials, sources):
            torch.mul(source, 1, out=target)
        cuda_merge.merge_splits(splits.partials, call)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(10):
        for x in (*splits.partials, output):
            x.fill_(math.nan)
        graph.replay()
        assert torch.equal(output, expected)


@requires_cuda
@pytest.mark.parametrize("num_warps", [1, 8])
def test_partial_results_beyond_4_gib(num_warps):
    """Only the last sequences have partial results, beyond 4 GiB."""
    kernel, num_seqs = with_warps(num_warps), 2060
    splits = Splits([64, 33], 64, None, 16, 256)
    alone = splits.merge(kernel, BF16)
    last = len(splits.lse)
    rows = num_seqs * 64
    partial = torch.empty(rows, *splits.partial.shape[1:], device=DEVICE)
    assert partial[:-last].nbytes > 2**32
    lse = torch.full((rows, 32), -math.inf, device=DEVICE)
    partial[-last:], lse[-last:] = splits.partials
    splits.partial, splits.lse = partial, lse
    more = num_seqs - 2
    splits.seq_lens, splits.query_lens = [0] * more + splits.seq_lens, [1] * num_seqs
    splits.starts = [*range(num_seqs + 1)]
    output = splits.merge(kernel, BF16)
    assert (output[:-2] == 0).all()
    assert torch.equal(output[-2:], alone)
    assert (alone != 0).any()


@requires_nvidia
@with_raw
def test_a_graph_is_replayed_with_other_inputs(with_raw):
    """A replay reads the lengths and raw tokens that tensors then hold."""
    batches = [[3, 6, 0, 1], [0, 0, 0, 0], [6, 6, 6, 6], [1, 2, 0, 4]]
    raw_dtype = BF16 if with_raw else None
    inputs = [Splits(counts, 6, None, 4, 128, raw_dtype) for counts in batches]
    inputs[1].seq_lens = [0] * 4
    first = Splits(batches[0], 6, None, 4, 128, raw_dtype)
    output = torch.empty_like(first.merge(CUDA, BF16))  # builds and loads
    call = first.call(output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_merge.merge_splits(first.partials, call)
    for index, splits in enumerate(inputs):
        if with_raw:
            for x, own in zip(first.raw[:3], splits.raw[:3]):
                own.copy_(gaussian(*x.shape, dtype=BF16, seed=index))
                x.copy_(own)
        call.batch.seq_lens.copy_(splits.batch.seq_lens)
        for target, source in zip(first.partials, splits.partials):
            target.copy_(source)
        output.fill_(math.nan)
        graph.replay()
        assert torch.equal(output, splits.merge(CUDA, BF16))


@requires_nvidia
def test_two_streams():
    """A merge waits for its own stream's work, and for no other stream's."""
    sources = [Splits(counts, 6, None, 4, 128) for counts in ([6] * 64, [3] * 64)]
    expected = [source.merge(CUDA, BF16) for source in sources]
    targets = [Splits([6] * 64, 6, None, 4, 128) for _ in sources]
    calls = [x.call(torch.empty_like(y)) for x, y in zip(targets, expected)]
    streams = [torch.cuda.Stream() for _ in sources]
    torch.accelerator.synchronize()
    outputs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                both = targets[index].partials, sources[index].partials
                for target, source in zip(*both):
                    target.zero_()
                    # A merge that does not wait would run during the sleep.
                    torch.cuda._sleep(100_000)
                    target.copy_(source)
                outputs[index].append(torch.empty_like(expected[index]))
                call = calls[index]._replace(output=outputs[index][-1])
                cuda_merge.merge_splits(both[0], call)
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
    query_lens = [query_len] * len(seq_lens)
    splits = Splits([4, 0, 0, 1], 4, query_lens, group, head_size, dtype, seq_lens)
    raw, num_tokens, num_heads = splits.raw, splits.starts[-1], splits.shape[-1]
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
    results = [splits.merge(CUDA, dtype, sinks=sinks).float()]
    splits.raw = raw._replace(attended=attended)
    results.append(splits.merge(CUDA, dtype, sinks=sinks).float())
    # Both results are rounded, and so is the result of attention that is given.
    sizes = 2 * results[0].abs() + output.abs().nan_to_num()
    bound = TOLERANCES[dtype] * sizes + 2.0**-16 * value.abs().max()
    assert ((results[0] - results[1]).abs() <= bound).all()
