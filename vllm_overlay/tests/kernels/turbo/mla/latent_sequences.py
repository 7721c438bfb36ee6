# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode kernels of MLA under test, sequences in a cache of latents, and attention
over them in fp32.

CUDA's kernel is tested with each of its plans. The emulated GPU has the instructions of
all plans. A GPU runs its own plans and those of earlier GPUs, so that a GPU of compute
capability 9.0 runs all.
"""

import math
from functools import partial

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import latent_decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda.latent_decode import LATENT_DECODE
from vllm.v1.attention.ops.turbo.cuda.latent_plans import (
    COPYING_SLICES,
    LISTED,
    ROWS,
    SLICES,
    WARPGROUPS,
    Plan,
)
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials
from vllm.v1.attention.ops.turbo.latent.format import LATENT_PRESETS, LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import LatentCall
from vllm.v1.attention.ops.turbo.reference import latent as latent_reference
from vllm.v1.attention.ops.turbo.triton import latent_decode as triton_decode

from ..attention_utils import assert_within
from ..kernel_under_test import Kernel, rounded_to_fp16
from ..sequences import layout_id
from ..utils import (
    BF16,
    CUDA_IS_EMULATED,
    DEVICE,
    ON_NVIDIA,
    gaussian,
    make_block_table,
    num_blocks_for,
    requires_triton,
    slots_of,
)
from .latent_utils import fill_latent_cache, latent_cache

FP32 = torch.float32
SCALE = 192**-0.5
PLANS = (*WARPGROUPS, *ROWS, *SLICES, *COPYING_SLICES)


# CUDA's kernel of the plan that serves. Queries are rounded to fp16 relative to a power
# of two.
CUDA = Kernel(
    "cuda", cuda_decode.decode_attention, rounded_to_fp16, refusal=LATENT_DECODE.refusal
)
TRITON = Kernel(
    "triton", triton_decode.decode_attention, None, marks=(requires_triton,)
)


def is_cuda(kernel: Kernel) -> bool:
    return kernel.rounded is not None


def by_plan(plan: Plan) -> Kernel:
    """CUDA's kernel of a plan, which is skipped on GPUs without its instructions."""
    kind = "rows" if plan.by_rows else "listed" if plan.is_listed else "warpgroups"
    if plan.teams:
        kind = "slices" if plan.is_bulk else "copying-slices"
    name = f"{plan.columns}-{kind}"
    runs = CUDA_IS_EMULATED
    if ON_NVIDIA:
        capability = current_platform.get_device_capability()
        runs = capability is not None and plan.runs_on(capability.to_int())
    lacks = pytest.mark.skipif(not runs, reason=f"no GPU for {name}")
    attend = partial(CUDA.attend, plans=[plan])
    return CUDA._replace(name=name, attend=attend, marks=(lacks,))


# Plans that attend to lists of tokens.
LISTED_PLANS = [by_plan(plan) for plan in LISTED]
ALL_PLANS = {plan: by_plan(plan) for plan in PLANS}
# A plan of few columns of each kind.
SOME_PLANS = [kernel for plan, kernel in ALL_PLANS.items() if plan.columns == 16]
COLUMNS = {kernel.name: plan.columns for plan, kernel in ALL_PLANS.items()}
kernels = pytest.mark.parametrize("kernel", [x.case() for x in (TRITON, *SOME_PLANS)])


def kernels_and_layouts(*sizes: int) -> pytest.MarkDecorator:
    """Parametrise a test by ``kernel, layout``."""
    cases = [
        kernel.case(layout, name=layout_id(layout))
        for kernel in (TRITON, *SOME_PLANS)
        for layout in (
            LatentFormat.from_cache_dtype(name, size)
            for name in LATENT_PRESETS
            for size in sizes
        )
        if not kernel.refusal(layout)
    ]
    return pytest.mark.parametrize("kernel, layout", cases)


class Latents:
    """Sequences in a cache of latents, and queries of their last tokens.

    Args:
        layout: The cache's format.
        seq_lens: Lengths of the sequences.
        query_lens: Query tokens of each sequence; None: one, without a list of starts.
        num_heads: Query heads.
        dtype: The model's dtype.
        block_size: Tokens of a block.

    Attributes:
        query: (T, Hq, L), a view with gaps between heads.
        query_rope: (T, Hq, R), such a view; None if the layout has no rotary keys.
        rotated_mean: (L,) fp32, added to outputs; None at first.
        is_sparse: Whether ``table`` has slots of tokens.

    """

    def __init__(
        self,
        layout: LatentFormat,
        seq_lens: list[int],
        query_lens: list[int] | None = None,
        num_heads: int = 4,
        dtype: torch.dtype = BF16,
        block_size: int = 32,
    ) -> None:
        self.layout, self.seq_lens, self.block_size = layout, seq_lens, block_size
        self.is_uniform = query_lens is None
        query_lens = query_lens or [1] * len(seq_lens)
        self.query_len = max(query_lens)
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
        self.table = make_block_table(seq_lens, block_size)
        num_blocks = num_blocks_for(seq_lens, block_size)
        self.cache = latent_cache(layout, num_blocks, block_size)
        fill_latent_cache(self.cache, self.table, seq_lens, layout, dtype)
        shape = (num_heads, self.starts[-1], layout.rank + 8)
        query = gaussian(*shape, dtype=dtype, seed=7)
        self.query = query.transpose(0, 1)[..., : layout.rank]
        self.query_rope: torch.Tensor | None = None
        if layout.rope:
            rope = gaussian(self.starts[-1], num_heads, 192, dtype=dtype, seed=8)
            self.query_rope = rope[..., -layout.rope :]
        self.rotated_mean: torch.Tensor | None = None
        self.is_sparse = False

    def choose(self, counts: list[int]) -> None:
        """Attend to that many tokens of each sequence, in any order, some of them
        twice. Places past a count have slots that no cache has.
        """
        table = torch.full((len(counts), max(counts) + 5), -1, dtype=torch.int32)
        generator = torch.Generator().manual_seed(9)
        for row, (count, length) in enumerate(zip(counts, self.seq_lens)):
            own = torch.randint(max(length, 1), (count,), generator=generator)
            slots = slots_of(self.table[row], 0, length, self.block_size)
            table[row, :count] = slots.cpu()[own]
        self.table, self.seq_lens = table.to(DEVICE), counts
        self.is_sparse = True

    def call(self, dtype: torch.dtype, scale: float = SCALE) -> LatentCall:
        """A call with NaN in the outputs."""
        lens, starts = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE)
            for x in (self.seq_lens, self.starts)
        )
        start_loc = None if self.is_uniform else starts
        batch = DecodeBatch(len(lens), self.table, lens, self.query_len, start_loc)
        output = torch.full_like(self.query, math.nan, dtype=dtype)
        lse = torch.full(self.query.shape[:2], math.nan, device=DEVICE)
        pages = self.cache, self.layout, batch
        query = self.query, self.query_rope
        return LatentCall(
            *pages, scale, output, lse, *query, self.rotated_mean, self.is_sparse
        )

    def attend(
        self,
        kernel: Kernel,
        num_splits: int = 2,
        dtype: torch.dtype | None = None,
        scale: float = SCALE,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (T, Hq, L) and LSE (T, Hq), with scratch of NaN. Outputs are in the
        model's dtype with Triton and in fp32 with CUDA.
        """
        count = len(self.seq_lens) * num_splits * self.query_len
        partial = torch.full((count, *self.query.shape[1:]), math.nan, device=DEVICE)
        call = self.call(
            dtype or (FP32 if is_cuda(kernel) else self.query.dtype), scale
        )
        kernel.attend(call, Partials(partial, partial[..., 0].clone()))
        return call.output, call.lse

    def load(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A sequence's latents, (S, L), and whole keys, (S, L + R)."""
        length = self.seq_lens[row]
        slots = self.table[row, :length]
        if not self.is_sparse:
            slots = slots_of(self.table[row], 0, length, self.block_size)
        latent, rope = latent_reference.load(self.cache, slots, self.layout)
        return latent, torch.cat([latent, rope], -1)

    def whole_query(self) -> torch.Tensor:
        parts = (
            [self.query] if self.query_rope is None else [self.query, self.query_rope]
        )
        return torch.cat(parts, -1)

    def check(self, kernel: Kernel, num_splits: int = 2) -> tuple[torch.Tensor, ...]:
        """Compare outputs and LSEs to attention in fp32: Triton's by the 2x rule of
        ``utils.assert_by_2x_rule``, CUDA's by the norm, and two of its runs bit for
        bit.
        """
        output, lse = self.attend(kernel, num_splits)
        call = self.call(FP32)
        latent_reference.decode_attention(call)
        expected = call.output
        # Scores have operands that are rounded to fp16.
        torch.testing.assert_close(lse, call.lse, rtol=1e-3, atol=2e-3)
        if is_cuda(kernel):
            for one, other in zip((output, lse), self.attend(kernel, num_splits)):
                assert torch.equal(one, other)  # nothing races
            # Weights, queries and coordinates are rounded to fp16.
            assert (output - expected).norm() / expected.norm() <= 2**-9
            return output, lse
        query, dtype = self.whole_query(), self.query.dtype
        for row, length in enumerate(self.seq_lens):
            start, end = self.starts[row : row + 2]
            part = slice(max(start, end - length), end)
            assert (output[start : part.start] == 0).all()
            if part.start == end:
                continue
            latent, keys = (x.to(dtype)[:, None] for x in self.load(row))
            plain, _ = reference.attention(query[part], keys, latent, SCALE)
            allowed = 2 * (plain.float() - expected[part]).abs().max().item()
            allowed += 2**-11 * expected[part].abs().max().item()
            name = "(query, head, coordinate)"
            assert_within(output[part], expected[part], allowed, name)
        return output, lse
