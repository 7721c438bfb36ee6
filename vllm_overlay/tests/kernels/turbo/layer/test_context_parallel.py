# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode context parallelism: ranks that each have a share of every sequence's tokens
attend as one rank that has all tokens.
"""

from typing import Any

import pytest
import torch

from vllm.v1.attention.ops import dcp
from vllm.v1.attention.ops.turbo.cuda.kernels import CudaKernels
from vllm.v1.attention.ops.turbo.layer import launching, warm_up
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner
from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel
from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.planning import prefill as prefill_plan
from vllm.v1.attention.ops.turbo.planning import scratch

from ..backend_utils import (
    all_paths,
    kernel_paths,
    make_builder,
    set_path,
)
from ..kernels.test_launch_arguments import launches  # noqa: F401
from ..rank_utils import NUM_HEADS, Rank, RankGroup, SharedRequests
from ..utils import (
    BF16,
    DEVICE,
    FP16,
    INVALID_BLOCK,
    ON_GPU,
    all_presets,
    requires_triton,
)

pytestmark = requires_triton

# (query length, context length) of each request, decodes first. Some ranks have no
# token of the shortest contexts.
BATCHES = {
    "decodes": [(1, 31), (1, 3), (1, 0), (1, 95)],
    "drafts": [(3, 31), (1, 64), (2, 0), (3, 1)],
    "uniform drafts": [(3, 31), (3, 0), (3, 62)],
    "mixed": [(1, 40), (3, 65), (20, 0), (5, 65), (4, 2)],
    "prefills": [(33, 0), (4, 1), (9, 70)],
    "first chunks": [(33, 0), (7, 0)],
}


# Number of ranks, and of consecutive tokens on a rank. Kernels in the interpreter see
# only lengths and slots of either; other tests have two ranks and 16 tokens.
SHARES = [(2, 1), (4, 16), *([(2, 16), (4, 1)] if ON_GPU else [])]


@pytest.fixture(autouse=True)
def with_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an interpreted kernel the list of constants that vLLM's launcher reads."""
    kernel = dcp.CorrectAttnCPOutKernel.kernel
    if not hasattr(kernel, "constexprs"):
        constants = [name for name in kernel.arg_names if name.isupper()]
        monkeypatch.setattr(kernel, "constexprs", constants, raising=False)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_ranks, interleave", SHARES)
@all_paths
def test_batches(folder, monkeypatch, name, num_ranks, interleave, path):
    scene = SharedRequests(folder, monkeypatch, BATCHES[name], num_ranks, interleave)
    scene.check(scene.run(path))
    counts = {rank.group.num_collectives for rank in scene.ranks}
    has_context = any(context for _, context in BATCHES[name])
    assert len(counts) == 1 and (path == "torch" or (min(counts) > 0) == has_context)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@all_presets
@kernel_paths
def test_formats(folder, monkeypatch, name, head_size, path):
    requests = [(1, 33), (2, 1), (5, 40)]
    scene = SharedRequests(
        folder, monkeypatch, requests, 2, 16, name, head_size, BF16, num_drafts=1
    )
    scene.check(scene.run(path))


@all_paths
def test_sinks_count_once(folder, monkeypatch, path):
    """Sinks count once for any number of ranks, and for requests without context."""
    sinks = torch.tensor([-20.0, 0.0, 2.0, 20.0], dtype=FP16, device=DEVICE)
    requests = [(1, 31), (2, 1), (1, 0), (6, 40), (5, 0)]
    scene = SharedRequests(folder, monkeypatch, requests, sinks=sinks)
    scene.check(scene.run(path))


@all_paths
def test_soft_cap(folder, monkeypatch, path):
    requests = [(1, 31), (3, 1), (6, 40)]
    scene = SharedRequests(folder, monkeypatch, requests, logits_soft_cap=0.5)
    scene.check(scene.run(path))


@kernel_paths
def test_all_to_all(folder, monkeypatch, path):
    """Results are joined by vLLM's other backend: ``--dcp-comm-backend a2a``."""

    class Done:
        def wait(self) -> None:
            pass

    def all_to_all_single(received, sent, group, async_op):
        group.all_to_all(received, sent)
        return Done()

    monkeypatch.setattr(dcp.dist, "all_to_all_single", all_to_all_single)
    scene = SharedRequests(
        folder, monkeypatch, BATCHES["mixed"], 2, 16, comm_backend="a2a"
    )
    scene.check(scene.run(path))


@kernel_paths
def test_pieces_and_slices(folder, monkeypatch, path):
    """A prefill of several pieces and slices has equally many collectives on each rank,
    even if one rank's share fits one piece.
    """
    # Bytes of K and V, or of a row, of the heads of all ranks.
    row = 4 * NUM_HEADS * 64
    monkeypatch.setattr(prefill_plan, "ROW_BYTES", 12 * row)
    monkeypatch.setattr(prefill_plan, "PIECE_BYTES", 16 * 4 * 64)
    monkeypatch.setattr(scratch, "PARTIAL_BYTES", 12 * 2 * row)
    requests = [(1, 64), (3, 20), (7, 17), (20, 33), (4, 0), (9, 31)]
    scene = SharedRequests(folder, monkeypatch, requests, 2, 16)
    scene.check(scene.run(path))
    first, second = (rank.group.num_collectives for rank in scene.ranks)
    assert first == second > 6


@kernel_paths
def test_padding(folder, monkeypatch, path):
    """Padded requests of a CUDA graph have no tokens on any rank."""
    scene = SharedRequests(folder, monkeypatch, [(1, 31), (1, 2)])
    for rank in scene.ranks:
        set_path(rank.impl, path)
        metadata = rank.build(rank.common(padded_reqs=2))
        local = rank.impl.runner.context_parallel.local_lens(torch.tensor([31, 2]))
        assert metadata.local_seq_lens.tolist() == [*(local + 1).tolist(), 0, 0]
    unpadded = Rank.common
    monkeypatch.setattr(Rank, "common", lambda rank: unpadded(rank, padded_reqs=2))
    scene.check(scene.run(path))


@pytest.mark.parametrize("query_len", [1, 3])
def test_padding_with_query_tokens(folder, monkeypatch, query_len):
    """Padded requests have as many query tokens as others, but no sequence. Their block
    table is not read.
    """
    contexts, num_padded = [31, 2], 2
    scene = SharedRequests(
        folder, monkeypatch, [(query_len, context) for context in contexts]
    )
    for rank in scene.ranks:
        common = rank.common(num_padded, query_len)
        num_padded_tokens = query_len * num_padded
        common.num_actual_tokens += num_padded_tokens
        common.slot_mapping = torch.nn.functional.pad(
            common.slot_mapping, (0, num_padded_tokens), value=-1
        )
        common.block_table_tensor[len(contexts) :] = INVALID_BLOCK
        local_lens = rank.impl.runner.context_parallel.local_lens
        local = local_lens(torch.tensor(contexts)) + query_len
        found = rank.build(common).local_seq_lens
        assert found.tolist() == [*local.tolist(), *[0] * num_padded]


def test_lengths_stay_where_they_are(folder, monkeypatch):
    """A CUDA graph reads local lengths from the tensor that it was captured with."""
    scene = SharedRequests(folder, monkeypatch, [(1, 31), (3, 9)])
    rank = scene.ranks[1]
    builder = make_builder(rank.config, rank.impl)
    captured = builder.build_for_cudagraph_capture(rank.common())
    common = rank.common()
    common.seq_lens += 5
    replayed = builder.build(0, common)
    assert captured.local_seq_lens.data_ptr() == replayed.local_seq_lens.data_ptr()
    assert captured.local_seq_lens.tolist() == [36 // 2 + 1, 14 // 2 + 3]
    # Requests with drafts are decodes.
    assert builder.reorder_batch_threshold == 3


@pytest.mark.skipif(DEVICE.type != "cpu", reason="records launches in place of CUDA's")
def test_launches_of_cuda(folder, monkeypatch, launches):  # noqa: F811
    """CUDA's launches share the context, including extends, which only CUDA has."""
    requests = [(3, 31), (1, 9), (5, 40), (2, 1)]
    scene = SharedRequests(folder, monkeypatch, requests, 2, 16)
    # Renamed, because the check expects q in int8 from kernels named CUDA.
    scene.check(scene.run("triton", CudaKernels()._replace(name="Triton")))
    calls = ["decode", "merge", "merge", "extend_mma", "merge", "merge"]
    assert sorted(launches) == sorted(2 * ["store", *calls])


def test_extends_have_room_for_all_ranks(folder, monkeypatch):
    """A step has fewer extends than without context parallelism, because the gathered
    queries of all ranks would take too much memory.
    """
    monkeypatch.setattr(layer_runner, "max_extend_len", lambda *_: 400)
    scene = SharedRequests(folder, monkeypatch, [(400, 1)] * 7)
    runner = scene.ranks[0].impl.runner
    runner.kernels, runner.max_num_tokens = CudaKernels(), 4096
    built = scene.ranks[0].build()
    assert sum(span.num_tokens for span in built.extends) == 5 * 400
    assert built.prefill is not None
    of_decodes = runner.max_num_seqs * runner.max_query_len
    assert runner.largest_batch.num_tokens == of_decodes + 2048


def test_first_run(folder, monkeypatch):
    """Kernels run before the first collective, because a driver may refuse a launch.

    Then ranks exchange as much as any step may, so that the profile run counts it.
    """

    class Forgetful(set):
        """A set that stays empty: on GPUs each rank has a process of its own."""

        def add(self, key: object) -> None:
            pass

    monkeypatch.setattr(launching, "_warm", Forgetful())
    monkeypatch.setattr(warm_up, "_PREFILL_CONTEXT", 32)
    monkeypatch.setattr(warm_up, "_PREFILL_LENS", (2, 20))
    check, sizes = ContextParallel.check, set()

    def check_a_few(
        self: ContextParallel, num_tokens: int, num_slots: int, *others: Any
    ) -> None:
        sizes.add((num_tokens, num_slots))
        check(self, 2, 3, *others)

    # The interpreter takes a minute for the sizes of a profile run.
    monkeypatch.setattr(ContextParallel, "check", check_a_few)
    scene = SharedRequests(folder, monkeypatch, [(1, 31)])
    counts = []

    def count_collectives(runner: TurboRunner, device: torch.device) -> None:
        warm_up.run_kernels(runner, device)
        counts.append(runner.context_parallel.group.num_collectives)

    for rank in scene.ranks:
        set_path(rank.impl, "triton")
    runners = [rank.impl.runner for rank in scene.ranks]
    scene.others.run(
        lambda index: launching.warm_up(runners[index], DEVICE, count_collectives)
    )
    assert counts == [0, 0]
    runner, _ = runners
    assert sizes == {(runner.max_num_tokens, runner.largest_batch.num_slots)}
    # One for queries; LSE and output, two each for prefills and decodes.
    assert [rank.group.num_collectives for rank in scene.ranks] == [5, 5]


@pytest.mark.parametrize("does_nothing", ["all_gather", "reduce_scatter"])
def test_collectives_that_do_nothing(folder, monkeypatch, does_nothing):
    """Without NCCL's library collectives do nothing, which the check reports."""
    scene = SharedRequests(folder, monkeypatch, [(1, 31)])
    runners = [rank.impl.runner for rank in scene.ranks]
    shared = [runner.context_parallel for runner in runners]

    def leave_it(_: RankGroup, x: torch.Tensor, dim: int) -> torch.Tensor:
        size = list(x.shape)
        size[dim] = size[dim] * 2 if does_nothing == "all_gather" else size[dim] // 2
        return x.new_zeros(size)

    monkeypatch.setattr(RankGroup, does_nothing, leave_it)
    with pytest.raises(RuntimeError, match="VLLM_NCCL_SO_PATH"):
        scene.others.run(lambda i: shared[i].check(2, 3, runners[i].shape, DEVICE))
