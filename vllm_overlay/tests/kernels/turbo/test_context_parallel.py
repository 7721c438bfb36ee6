# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode context parallelism: ranks that each have a share of every sequence's tokens
attend as one rank that has all tokens.
"""

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
    TurboMetadata,
)
from vllm.v1.attention.ops import dcp
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda.kernels import CudaKernels
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner
from vllm.v1.attention.ops.turbo.layer import warm_up
from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel
from vllm.v1.attention.ops.turbo.layer.kernels import KernelSet
from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.planning import prefill as prefill_plan
from vllm.v1.attention.ops.turbo.planning import scratch

from .attention_utils import check_request
from .backend_utils import (
    BLOCK_SIZE,
    all_paths,
    kernel_paths,
    make_builder,
    make_vllm_config,
    rounds_queries,
    set_path,
    with_drafts,
)
from .batch_utils import make_common, pad_to_graph
from .rank_utils import RankGroup, Ranks
from .test_launch_arguments import launches  # noqa: F401
from .utils import (
    BF16,
    DEVICE,
    FP16,
    INVALID_BLOCK,
    ON_GPU,
    all_presets,
    gaussian,
    load_context,
    make_block_table,
    new_cache,
    num_blocks_for,
    requires_triton,
)

pytestmark = requires_triton

# Query heads of a rank.
NUM_HEADS = 2
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


class Rank:
    """One of the ranks: its layer, and its share of the requests.

    Attributes:
        impl: The layer's implementation.
        cache: (num_blocks, 1, N, C) uint8.
        table: (R, max_blocks) int32, blocks of its share.

    """

    def __init__(
        self,
        config: VllmConfig,
        group: RankGroup,
        requests: list[tuple[int, int]],
        head_size: int,
        monkeypatch: pytest.MonkeyPatch,
        **options: Any,
    ) -> None:
        self.group, self.config, self.requests = group, config, requests
        self.interleave = config.parallel_config.cp_kv_cache_interleave_size
        with monkeypatch.context() as patch:
            patch.setattr(parallel_state, "_DCP", group)
            with set_current_vllm_config(config):
                self.impl = TurboAttentionImpl(
                    NUM_HEADS,
                    head_size,
                    head_size**-0.5,
                    1,
                    kv_cache_dtype=config.cache_config.cache_dtype,
                    **options,
                )
        assert self.impl.dcp_world_size == group.world_size
        assert self.impl.need_to_return_lse_for_decode
        layout = self.impl.runner.layout
        longest = [sum(request) for request in requests]
        self.table = make_block_table(longest, BLOCK_SIZE)
        num_blocks = num_blocks_for(longest, BLOCK_SIZE)
        self.cache = new_cache(layout, num_blocks, 1, BLOCK_SIZE)

    def slots(self, row: int, first: int, last: int) -> torch.Tensor:
        """Slots of a request's positions, as the model runner computes them.

        They are int64, and -1 for positions of other ranks.
        """
        positions = torch.arange(first, last, device=DEVICE)
        stripe, size = self.interleave * self.group.world_size, self.interleave
        place = positions // stripe * size + positions % size
        blocks = self.table[row, place // BLOCK_SIZE].long()
        slots = blocks * BLOCK_SIZE + place % BLOCK_SIZE
        is_own = positions // size % self.group.world_size == self.group.rank_in_group
        return torch.where(is_own, slots, -1)

    def common(
        self, padded_reqs: int = 0, padded_query_len: int = 0
    ) -> CommonAttentionMetadata:
        query_lens = [query for query, _ in self.requests]
        slots = [self.slots(i, c, q + c) for i, (q, c) in enumerate(self.requests)]
        lens = [sum(request) for request in self.requests]
        common = make_common(query_lens, lens, self.table, torch.cat(slots))
        num_reqs = len(query_lens) + padded_reqs
        return pad_to_graph(common, num_reqs, sum(query_lens), padded_query_len)

    def build(self, common: CommonAttentionMetadata | None = None) -> TurboMetadata:
        builder = make_builder(self.config, self.impl)
        assert not builder.supports_draft_decode_metadata_update
        return builder.build(0, common or self.common())


class Scene:
    """Requests that ranks share.

    Attributes:
        key: K of each request, (context + query length, 1, D).
        value: V of each request, likewise.
        query: (T, Hq, D), the query heads of all ranks.

    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        requests: list[tuple[int, int]],
        num_ranks: int = 2,
        interleave: int = 1,
        name: str = "turbo4",
        head_size: int = 64,
        dtype: torch.dtype = FP16,
        num_drafts: int = 2,
        comm_backend: str = "ag_rs",
        sinks: torch.Tensor | None = None,
        logits_soft_cap: float | None = None,
    ) -> None:
        self.requests, self.num_ranks, self.dtype = requests, num_ranks, dtype
        self.options = {"logits_soft_cap": logits_soft_cap}
        if sinks is not None:
            self.options["sinks"] = sinks
        num_heads = num_ranks * NUM_HEADS
        self.query = gaussian(
            sum(query for query, _ in requests), num_heads, head_size, dtype=dtype
        )
        self.key, self.value = (
            [
                gaussian(sum(request), 1, head_size, dtype=dtype, seed=2 * row + seed)
                for row, request in enumerate(requests)
            ]
            for seed in (1, 2)
        )
        self.others = Ranks(num_ranks)
        self.ranks = []
        for index in range(num_ranks):
            config = make_vllm_config(folder, name, dtype)
            config = with_drafts(config, num_drafts)
            parallel = config.parallel_config
            parallel.decode_context_parallel_size = num_ranks
            parallel.cp_kv_cache_interleave_size = interleave
            parallel.dcp_comm_backend = comm_backend
            own = slice(index * NUM_HEADS, (index + 1) * NUM_HEADS)
            rank = Rank(
                config,
                RankGroup(self.others, index),
                requests,
                head_size,
                monkeypatch,
                sinks=None if sinks is None else sinks[own].contiguous(),
                logits_soft_cap=logits_soft_cap,
            )
            layout = rank.impl.runner.layout
            for row, (_, context) in enumerate(requests):
                reference.store(
                    StoreCall(
                        rank.cache,
                        rank.slots(row, 0, context),
                        self.key[row][:context],
                        self.value[row][:context],
                        layout,
                    )
                )
            self.ranks.append(rank)

    def run(self, path: str, kernels: KernelSet | None = None) -> torch.Tensor:
        """The output of all ranks' query heads, (T, Hq, D)."""
        ends = [context for _, context in self.requests]
        key, value = (
            torch.cat([x[end:] for x, end in zip(tensors, ends)])
            for tensors in (self.key, self.value)
        )
        for rank in self.ranks:
            set_path(rank.impl, path)
            if kernels is not None:
                rank.impl.runner.kernels = kernels
                rank.impl.runner.num_sms = 4
        metadata = [rank.build() for rank in self.ranks]

        def forward(index: int) -> torch.Tensor:
            rank = self.ranks[index]
            query = self.query.chunk(self.num_ranks, 1)[index]
            output = torch.full_like(query, 7, memory_format=torch.contiguous_format)
            return rank.impl.forward(
                None, query, key, value, rank.cache, metadata[index], output
            )

        return torch.cat(self.others.run(forward), 1)

    def context(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised K and V of a request's context, put together from all ranks."""
        length = self.requests[row][1]
        key, value = (
            torch.zeros(length, *x.shape[1:], device=DEVICE)
            for x in (self.key[row], self.value[row])
        )
        for rank in self.ranks:
            is_own = rank.slots(row, 0, length) >= 0
            count = int(is_own.sum())
            layout = rank.impl.runner.layout
            own = load_context(rank.cache, rank.table[row], count, layout)
            key[is_own], value[is_own] = own
        return key, value

    def check(self, output: torch.Tensor) -> None:
        """Compare each request to attention over all its tokens."""
        begin, scale = 0, self.query.shape[2] ** -0.5
        lens = [num_queries for num_queries, _ in self.requests]
        runner = self.ranks[0].impl.runner
        decodes = list(takewhile(lambda n: n <= runner.max_query_len, lens))
        is_rounded = rounds_queries(runner, decodes)
        for row, (num_queries, context) in enumerate(self.requests):
            part = slice(begin, begin + num_queries)
            begin = part.stop
            key, value = self.context(row)
            key = torch.cat([key, self.key[row][context:].float()])
            value = torch.cat([value, self.value[row][context:].float()])
            is_own = is_rounded and row < len(decodes)
            check_request(
                output[part],
                self.query[part],
                key,
                value,
                scale,
                self.dtype,
                num_queries if is_own else None,
                is_rounded,
                **self.options,
            )


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_ranks, interleave", SHARES)
@all_paths
def test_batches(folder, monkeypatch, name, num_ranks, interleave, path):
    scene = Scene(folder, monkeypatch, BATCHES[name], num_ranks, interleave)
    scene.check(scene.run(path))
    counts = {rank.group.num_collectives for rank in scene.ranks}
    has_context = any(context for _, context in BATCHES[name])
    assert len(counts) == 1 and (path == "torch" or (min(counts) > 0) == has_context)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@all_presets
@kernel_paths
def test_formats(folder, monkeypatch, name, head_size, path):
    requests = [(1, 33), (2, 1), (5, 40)]
    scene = Scene(
        folder, monkeypatch, requests, 2, 16, name, head_size, BF16, num_drafts=1
    )
    scene.check(scene.run(path))


@all_paths
def test_sinks_count_once(folder, monkeypatch, path):
    """Sinks count once for any number of ranks, and for requests without context."""
    sinks = torch.tensor([-20.0, 0.0, 2.0, 20.0], dtype=FP16, device=DEVICE)
    requests = [(1, 31), (2, 1), (1, 0), (6, 40), (5, 0)]
    scene = Scene(folder, monkeypatch, requests, sinks=sinks)
    scene.check(scene.run(path))


@all_paths
def test_soft_cap(folder, monkeypatch, path):
    requests = [(1, 31), (3, 1), (6, 40)]
    scene = Scene(folder, monkeypatch, requests, logits_soft_cap=0.5)
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
    scene = Scene(folder, monkeypatch, BATCHES["mixed"], 2, 16, comm_backend="a2a")
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
    scene = Scene(folder, monkeypatch, requests, 2, 16)
    scene.check(scene.run(path))
    first, second = (rank.group.num_collectives for rank in scene.ranks)
    assert first == second > 6


@kernel_paths
def test_padding(folder, monkeypatch, path):
    """Padded requests of a CUDA graph have no tokens on any rank."""
    scene = Scene(folder, monkeypatch, [(1, 31), (1, 2)])
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
    scene = Scene(folder, monkeypatch, [(query_len, context) for context in contexts])
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
    scene = Scene(folder, monkeypatch, [(1, 31), (3, 9)])
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
    scene = Scene(folder, monkeypatch, requests, 2, 16)
    # Renamed, because the check expects q in int8 from kernels named CUDA.
    scene.check(scene.run("triton", CudaKernels()._replace(name="Triton")))
    calls = ["decode", "merge", "merge", "extend", "merge", "merge"]
    assert sorted(launches) == sorted(2 * ["store", *calls])


def test_extends_have_room_for_all_ranks(folder, monkeypatch):
    """A step has fewer extends than without context parallelism, because the gathered
    queries of all ranks would take too much memory.
    """
    monkeypatch.setattr(layer_runner, "max_extend_len", lambda *_: 400)
    scene = Scene(folder, monkeypatch, [(400, 1)] * 7)
    runner = scene.ranks[0].impl.runner
    runner.kernels, runner.max_num_tokens = CudaKernels(), 4096
    built = scene.ranks[0].build()
    assert sum(span.num_tokens for span in built.extends) == 5 * 400
    assert built.prefill is not None
    of_decodes = runner.max_num_seqs * runner.max_query_len
    assert runner._largest_batch.num_tokens == of_decodes + 2048


def test_first_run(folder, monkeypatch):
    """Kernels run before the first collective, because a driver may refuse a launch.

    Then ranks exchange as much as any step may, so that the profile run counts it.
    """

    class Forgetful(set):
        """A set that stays empty: on GPUs each rank has a process of its own."""

        def add(self, key: object) -> None:
            pass

    monkeypatch.setattr(warm_up, "_warm", Forgetful())
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
    scene = Scene(folder, monkeypatch, [(1, 31)])
    counts = []
    run_kernels = warm_up._run_kernels

    def count_collectives(runner: TurboRunner, device: torch.device) -> None:
        run_kernels(runner, device)
        counts.append(runner.context_parallel.group.num_collectives)

    monkeypatch.setattr(warm_up, "_run_kernels", count_collectives)
    for rank in scene.ranks:
        set_path(rank.impl, "triton")
    runners = [rank.impl.runner for rank in scene.ranks]
    scene.others.run(lambda index: warm_up.warm_up(runners[index], DEVICE))
    assert counts == [0, 0]
    runner, _ = runners
    assert sizes == {(runner.max_num_tokens, runner._max_shared_slots)}
    # One for queries; LSE and output, two each for prefills and decodes.
    assert [rank.group.num_collectives for rank in scene.ranks] == [5, 5]


@pytest.mark.parametrize("does_nothing", ["all_gather", "reduce_scatter"])
def test_collectives_that_do_nothing(folder, monkeypatch, does_nothing):
    """Without NCCL's library collectives do nothing, which the check reports."""
    scene = Scene(folder, monkeypatch, [(1, 31)])
    runners = [rank.impl.runner for rank in scene.ranks]
    shared = [runner.context_parallel for runner in runners]

    def leave_it(_: RankGroup, x: torch.Tensor, dim: int) -> torch.Tensor:
        size = list(x.shape)
        size[dim] = size[dim] * 2 if does_nothing == "all_gather" else size[dim] // 2
        return x.new_zeros(size)

    monkeypatch.setattr(RankGroup, does_nothing, leave_it)
    with pytest.raises(RuntimeError, match="VLLM_NCCL_SO_PATH"):
        scene.others.run(lambda i: shared[i].check(2, 3, runners[i].shape, DEVICE))
