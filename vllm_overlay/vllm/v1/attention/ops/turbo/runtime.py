# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A layer's kernels at work: what a forward pass launches, and in which scratch."""

from functools import cached_property

import torch

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    KernelSet,
    NewestTokens,
    OffsetScores,
    Partials,
    RecentWindow,
    RotatedQuery,
)
from vllm.v1.attention.ops.turbo.kernel_choice import ChosenKernels, share_kernels
from vllm.v1.attention.ops.turbo.planning.decode import (
    DecodePlanner,
    largest_batch,
    max_extend_len,
)
from vllm.v1.attention.ops.turbo.planning.prefill import prefill_limits
from vllm.v1.attention.ops.turbo.planning.scratch import (
    DecodeScratch,
    LayerShape,
    PrefillScratch,
    TensorSpecs,
    num_bytes,
)
from vllm.v1.attention.ops.turbo.planning.step import StepPlan
from vllm.v1.attention.ops.turbo.prefill import (
    get_flash_attn,
    prefill_attention,
    sliding_window_attention,
)
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    is_workspace_manager_initialized,
)


def num_draft_slots(vllm_config: VllmConfig) -> int:
    """Query tokens a request that a drafter's first pass has beyond those of the step
    before it, which it takes with all that were rejected.
    """
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else speculative.max_num_new_slots_for_drafting


def take_scratch(specs: TensorSpecs, device: torch.device) -> list[torch.Tensor]:
    """Scratch tensors of vLLM's workspace, which overlap those of requests before.

    So what reads earlier ones has to come before what writes these in the stream.

    Args:
        specs: Shapes and dtypes.
        device: Where, if vLLM's workspace is not initialised.

    """
    # A manager that was asked for nothing yet fails if that is asked for.
    if is_workspace_manager_initialized() and num_bytes(specs) > 0:
        return current_workspace_manager().get_simultaneous(*specs)
    return [torch.empty(s, dtype=dtype, device=device) for s, dtype in specs]


class TurboRunner:
    """Stores and attends for one layer by the kernels that were chosen for it.

    Attributes:
        shape: Heads, head size and dtype.
        scale: Softmax scale.
        layout: The cache's format.
        stored: Whether query tokens, too, are read from the cache.
        kernel_choice: ``attention_config.turbo_kernel``.
        max_query_len: Query tokens of a decode request, at most, drafters' too.
        num_sms: Multiprocessors of the GPU.
        cache_config: vLLM's; its block size may be set after the layers are made.
        prefill_limits: What bounds the scratch of a prefill.
        flash_attn: FlashAttention's varlen function, or what serves as it; None on a
            CPU.
        sliding_window: Tokens that a query token sees, at most, itself the last; None
            for all before it.
        sinks: (Hq,), of each query head a logit without a value, whose values weights
            that are loaded set; None for none.
        window_wanted: Tokens of a recent window, at most; zero for none.
        key_offset: (G, H, D) fp32, taken off K before it is stored, by segments of a
            sequence; None for nothing. It is set when weights have been loaded, once.

    """

    def __init__(
        self,
        shape: LayerShape,
        scale: float,
        layout: TurboFormat,
        vllm_config: VllmConfig,
        window_wanted: int = 0,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.scale = scale
        self.layout = layout
        self.stored = vllm_config.attention_config.turbo_prefill == "stored"
        self.kernel_choice = vllm_config.attention_config.turbo_kernel
        scheduler_config = vllm_config.scheduler_config
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_tokens = scheduler_config.max_num_batched_tokens
        self.max_query_len = max_decode_query_len(vllm_config) + num_draft_slots(
            vllm_config
        )
        self.cache_config = vllm_config.cache_config
        self.prefill_limits = prefill_limits(
            shape, self.stored, sliding_window=sliding_window
        )
        self.sliding_window = sliding_window
        self.sinks = sinks
        self.key_offset: torch.Tensor | None = None
        self.window_wanted = window_wanted
        self.num_sms = 1
        self.flash_attn = None
        if not current_platform.is_cpu():
            device = torch.accelerator.current_device_index()
            self.num_sms = num_compute_units(device)
            self.flash_attn = get_flash_attn(shape.head_size)

    @cached_property
    def chosen_kernels(self) -> ChosenKernels:
        """The kernels, shared with layers alike. They may be built here."""
        if current_platform.is_cpu():
            return ChosenKernels(None)
        return share_kernels(
            self.kernel_choice,
            self.layout,
            self.shape.num_queries_per_kv,
            self.max_query_len,
            self.key_offset is not None,
            self.window_wanted > 0,
        )

    @property
    def kernels(self) -> KernelSet | None:
        """What stores and attends; None where PyTorch does."""
        return self.chosen_kernels.kernels

    @kernels.setter
    def kernels(self, kernels: KernelSet | None) -> None:
        """Have these serve this layer alone."""
        self.chosen_kernels = ChosenKernels(kernels)

    @property
    def kernels_used(self) -> str:
        """What stores and decodes, and why, for users."""
        if self.kernels is None:
            return "PyTorch's operators, because this is a CPU"
        return f"{self.kernels.name} kernels, because {self.kernels.reason}"

    @property
    def max_extend_len(self) -> int:
        """Query tokens up to which prompts are extends; 0 if there are none."""
        if self.kernels is None or self.kernels.extend_attention is None:
            return 0
        return max_extend_len(self.shape.num_queries_per_kv)

    @property
    def planner(self) -> DecodePlanner | None:
        """What plans decodes and extends for the kernels; None if there are none."""
        if self.kernels is None:
            return None
        return DecodePlanner(
            self.shape,
            self.num_sms,
            self.kernels.num_decode_splits,
            self.kernels.num_extend_splits,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        step: StepPlan,
        output: torch.Tensor,
        window: RecentWindow | None = None,
    ) -> None:
        """Store, then attend: decodes, extends and prefills one after the other.

        A prefill begins when what it takes the scratch of has ended: none of its
        kernels begins before the one before it has, and that, a merge, has waited for
        those whose results it reads.

        Args:
            query: (T, Hq, D) bf16 or fp16.
            key: (T, H, D).
            value: (T, H, D).
            kv_cache: (num_blocks, H, N, C) uint8.
            step: The plan of the step, which has T query tokens.
            output: (>= T, Hq, D), of which T rows are written.
            window: Where the newest tokens are kept in 8 bits, too, for decodes and
                extends; None if nowhere.

        """
        self._store_and_decode(query, key, value, kv_cache, step, output, window)
        prefill = step.prefill
        if prefill is None:
            return
        assert self.flash_attn is not None
        specs = PrefillScratch.specs(
            self.shape,
            prefill.max_buffered_tokens(self.sliding_window),
            self.prefill_limits.piece_tokens,
        )
        scratch = take_scratch(specs, query.device)
        rows = slice(step.num_packed_tokens, query.shape[0])
        tokens = query[rows], key[rows], value[rows], kv_cache
        others = (
            self.scale,
            self.layout,
            PrefillScratch(*scratch) if scratch else None,
            output[rows],
            self.flash_attn,
            self.key_offset,
            self.sinks,
        )
        if self.sliding_window is None:
            prefill_attention(*tokens, prefill, *others)
        else:
            slices = prefill.window_slices[self.sliding_window]
            sliding_window_attention(*tokens, slices, self.sliding_window, *others)

    def _store_and_decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        step: StepPlan,
        output: torch.Tensor,
        window: RecentWindow | None,
    ) -> None:
        """Store all tokens, and attend from those of decodes and extends."""
        kernels, plan = self.kernels, step.decode_plans[self.shape]
        assert kernels is not None
        scratch = step.decode_scratch.get(self.shape)
        if scratch is None:
            specs = DecodeScratch.specs(self.shape, plan.num_tokens, plan.num_partials)
            scratch = DecodeScratch(*take_scratch(specs, query.device))
            step.decode_scratch[self.shape] = scratch
        # A call writes the output of its own tokens alone, when it has read their
        # queries: these need no room beside it.
        rotated = output[: plan.num_tokens].view(torch.float16)
        kernels.store(
            kv_cache,
            step.slot_mapping,
            key,
            value,
            self.layout,
            query[: plan.num_tokens],
            RotatedQuery(rotated, scratch.query_scale),
            self.scale,
            step.key_offset(self.key_offset),
            None if window is None else step.window_update(window),
        )
        for call in plan.calls:
            tokens, count = call.tokens, call.num_partials
            newest = offset = None
            if not self.stored:
                newest = NewestTokens(
                    query[tokens], key[tokens], value[tokens], self.scale
                )
            if self.key_offset is not None:
                offset = OffsetScores(query[tokens], self.key_offset, self.scale)
            attention = kernels.decode_attention
            if call.is_extend:
                assert kernels.extend_attention is not None
                attention = kernels.extend_attention
            attention(
                RotatedQuery(rotated[tokens], scratch.query_scale[tokens]),
                kv_cache,
                self.layout,
                call.batch,
                Partials(scratch.partial[:count], scratch.partial_lse[:count]),
                output[tokens],
                newest,
                offset,
                None if window is None else window.from_sequence(call.first_request),
                self.sliding_window,
                self.sinks,
            )

    def _largest_scratch(self) -> list[TensorSpecs]:
        """Of all steps, the most that each request to the workspace asks for."""
        num_tokens, num_partials = largest_batch(
            self.shape,
            self.max_num_seqs,
            self.max_num_tokens,
            self.max_query_len,
            self.max_extend_len > 0,
        )
        limits = self.prefill_limits
        slice_tokens = min(limits.slice_tokens, self.max_num_tokens)
        return [
            DecodeScratch.specs(self.shape, num_tokens, num_partials),
            PrefillScratch.specs(self.shape, slice_tokens, limits.piece_tokens),
        ]

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that the profile run reserves."""
        return (
            0 if self.kernels is None else max(map(num_bytes, self._largest_scratch()))
        )

    def reserve(self, device: torch.device) -> None:
        """Take all memory of the largest step, and what the kernels keep for good."""
        assert self.kernels is not None
        for specs in self._largest_scratch():
            take_scratch(specs, device)
        # Not to be made in a CUDA graph's pool.
        self.kernels.make_matrices(self.shape.head_size, device)
