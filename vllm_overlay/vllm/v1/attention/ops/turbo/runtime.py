# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which kernels serve which of a batch's tokens, in scratch memory of bounded size."""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import MAX_KV_SPLITS, NewestToken
from vllm.v1.attention.ops.turbo.kernel_choice import (
    ChosenKernels,
    TurboKernels,
    max_extend_len,
    share_kernels,
)
from vllm.v1.attention.ops.turbo.metadata import (
    MAX_CALL_TOKENS,
    MAX_EXTEND_TOKENS,
    ExtendBatch,
    TurboMetadata,
    max_layer_query_len,
)
from vllm.v1.attention.ops.turbo.planning.decode import (
    AttentionCall,
    ShortPlan,
    plan_calls,
)
from vllm.v1.attention.ops.turbo.planning.prefill import prefill_limits
from vllm.v1.attention.ops.turbo.planning.scratch import Parts, Workspace
from vllm.v1.attention.ops.turbo.prefill import (
    PrefillBuffers,
    get_flash_attn,
    prefill_attention,
)
from vllm.v1.attention.ops.turbo.reference.attention import (
    prefill_attention as torch_prefill_attention,
)
from vllm.v1.attention.ops.turbo.warm_up import warm_up
from vllm.v1.worker.workspace import is_workspace_manager_initialized

# Partial outputs of one call of decode or extend attention.
PARTIAL_BYTES = 64 * 2**20


class KernelDispatch:
    """Attention of a layer by kernels.

    Attributes:
        kernel_choice: ``attention_config.turbo_kernel``.
        stored: Whether query tokens, too, are read from the cache.
        num_sms: Multiprocessors of the GPU.
        cache_config: vLLM's; its block size may be set after the layers are made.
        prefill_limits: What bounds the scratch of a prefill.
        workspace: Scratch memory.
        flash_attn: FlashAttention's varlen function, or what serves as it; None if
            there is none.

    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        layout: TurboFormat,
        vllm_config: VllmConfig,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.layout = layout
        assert isinstance(vllm_config.model_config.dtype, torch.dtype)
        self.dtype = vllm_config.model_config.dtype
        self.stored = vllm_config.attention_config.turbo_prefill == "stored"
        self.kernel_choice = vllm_config.attention_config.turbo_kernel
        scheduler_config = vllm_config.scheduler_config
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_tokens = scheduler_config.max_num_batched_tokens
        self.max_decode_query_len = max_layer_query_len(vllm_config)
        self.num_sms = (
            1
            if current_platform.is_cpu()
            else num_compute_units(torch.accelerator.current_device_index())
        )
        self.max_partials = max(
            1, PARTIAL_BYTES // (num_heads * head_size * torch.float32.itemsize)
        )
        self.cache_config = vllm_config.cache_config
        self.prefill_limits = limits = prefill_limits(
            num_heads, num_kv_heads, head_size, self.dtype, self.stored
        )
        self.max_slice_tokens = min(limits.slice_tokens, self.max_num_tokens)
        self.workspace = Workspace(
            num_heads, num_kv_heads, head_size, self.dtype, limits.piece_tokens
        )
        self.flash_attn = get_flash_attn(head_size)

    @cached_property
    def chosen_kernels(self) -> ChosenKernels:
        """What stores and attends on a GPU, shared with layers alike."""
        group = self.num_heads // self.num_kv_heads
        return share_kernels(
            self.kernel_choice, self.layout, group, self.max_decode_query_len
        )

    @property
    def kernels(self) -> TurboKernels:
        return self.chosen_kernels.kernels

    @kernels.setter
    def kernels(self, kernels: TurboKernels) -> None:
        """Have these serve this layer alone."""
        self.chosen_kernels = ChosenKernels(kernels)

    @property
    def kernels_used(self) -> str:
        """What stores and decodes, and why, for users."""
        if current_platform.is_cpu():
            return "PyTorch's operators, because this is a CPU"
        return f"{self.kernels.name} kernels, because {self.kernels.reason}"

    def _forward_kernels(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TurboMetadata,
        output: torch.Tensor,
    ) -> None:
        """Store, then attend: decodes, extends and prefills one after the other.

        A prefill begins when what it takes the scratch of has ended: none of its
        kernels begins before the one before it has, and that, a merge, has waited for
        those whose results it reads.
        """
        self._store_and_attend(query, key, value, kv_cache, metadata, output)
        prefill = metadata.prefill
        if prefill is None:
            return
        if self.flash_attn is None:
            torch_prefill_attention(
                query,
                key,
                value,
                kv_cache,
                metadata,
                self.scale,
                self.layout,
                self.stored,
                output,
            )
            return
        parts = self.workspace.prefill_parts(prefill.max_buffered_tokens)
        tensors = self.workspace.take(parts, query.device)
        rows = slice(metadata.num_short_tokens, query.shape[0])
        prefill_attention(
            query[rows],
            key[rows],
            value[rows],
            kv_cache,
            prefill,
            self.scale,
            self.layout,
            PrefillBuffers(*tensors) if tensors else None,
            output[rows],
            self.flash_attn,
        )

    def _store_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TurboMetadata,
        output: torch.Tensor,
    ) -> None:
        """Store all tokens, and attend from those of decodes and extends."""
        plan = metadata.short_plans.get(self.workspace)
        if plan is None:
            plan = self._plan_short(metadata, query.shape[0], query.device)
            metadata.short_plans[self.workspace] = plan
        num_tokens = metadata.num_short_tokens
        # A call writes the output of its own tokens alone, when it has read their
        # queries: these need no room beside it.
        rotated_query = output[:num_tokens].view(torch.float16)
        self.kernels.store(
            kv_cache,
            plan.slot_mapping,
            key,
            value,
            self.layout,
            query[:num_tokens],
            rotated_query,
            plan.query_scale,
            self.scale,
        )
        for call in plan.calls:
            tokens = call.tokens
            newest = None
            if not self.stored:
                newest = NewestToken(
                    query[tokens], key[tokens], value[tokens], self.scale
                )
            call.attention(
                rotated_query[tokens],
                plan.query_scale[tokens],
                kv_cache,
                call.block_table,
                call.seq_lens,
                self.layout,
                plan.partial[: call.num_partials],
                plan.partial_lse[: call.num_partials],
                output[tokens],
                newest,
                call.query_len,
                call.start_loc,
            )

    def _plan_short(
        self, metadata: TurboMetadata, num_tokens: int, device: torch.device
    ) -> ShortPlan:
        """What a batch's decodes and extends take, of a batch of so many tokens."""
        decodes = ExtendBatch(
            0,
            metadata.num_decodes,
            0,
            metadata.num_decode_tokens,
            metadata.decode_query_len,
            metadata.decode_start_loc,
        )
        kernels = self.kernels
        calls = list(
            self._cut(
                metadata, decodes, kernels.decode_attention, self._num_decode_splits
            )
        )
        for extends in metadata.extends:
            assert kernels.extend_attention is not None
            calls += self._cut(
                metadata, extends, kernels.extend_attention, self._num_extend_splits
            )
        num_partials = max((call.num_partials for call in calls), default=0)
        parts = self.workspace.short_parts(metadata.num_short_tokens, num_partials)
        scratch = self.workspace.take(parts, device)
        return ShortPlan(metadata.slot_mapping[:num_tokens], calls, *scratch)

    def _cut(
        self,
        metadata: TurboMetadata,
        batch: ExtendBatch,
        attention: Callable[..., None],
        num_splits: Callable[[int, int], int],
    ) -> Iterator[AttentionCall]:
        query_len, start_loc = batch.query_len, batch.query_start_loc
        begin = batch.first_token
        wanted = num_splits(batch.num_requests, query_len)
        for first, last in plan_calls(
            batch.num_requests, query_len, wanted, self.max_partials
        ):
            if start_loc is None:
                tokens = slice(begin + first * query_len, begin + last * query_len)
            else:
                tokens = slice(begin, begin + batch.num_tokens)
            request = batch.first_request + first
            yield AttentionCall(
                attention,
                tokens,
                metadata.block_table[request:],
                metadata.seq_lens[request:],
                self._num_partials(num_splits, last - first, query_len),
                query_len,
                None if start_loc is None else start_loc[first : last + 1],
            )

    def _num_decode_splits(self, num_seqs: int, query_len: int) -> int:
        return self.kernels.num_kv_splits(
            num_seqs, self.num_kv_heads, self.num_sms, query_len
        )

    def _num_extend_splits(self, num_seqs: int, query_len: int) -> int:
        assert self.kernels.num_extend_splits is not None
        return self.kernels.num_extend_splits(
            num_seqs, self.num_kv_heads, self.num_sms, query_len
        )

    def _num_partials(
        self, num_splits: Callable[[int, int], int], num_seqs: int, query_len: int
    ) -> int:
        """Partial results of one call."""
        rows = num_seqs * query_len
        room = max(1, self.max_partials // rows)
        return rows * min(num_splits(num_seqs, query_len), room)

    def _largest_batch(self) -> list[Parts]:
        """Of all batches, the most that each request to the workspace asks for.

        A call has as many partial results as ``max_partials``, more if one request
        alone has, and at most ``MAX_KV_SPLITS`` a query token.
        """
        query_len = self.max_decode_query_len
        num_short_tokens = num_call_tokens = self.max_num_seqs * query_len
        if self.kernels.extend_attention is not None:
            extend_len = max_extend_len(self.num_heads // self.num_kv_heads)
            query_len = max(query_len, extend_len)
            num_tokens = self.max_num_seqs * extend_len
            num_call_tokens = max(num_call_tokens, min(num_tokens, MAX_CALL_TOKENS))
            num_short_tokens += min(num_tokens, self.max_num_tokens, MAX_EXTEND_TOKENS)
        num_partials = min(
            max(self.max_partials, query_len), num_call_tokens * MAX_KV_SPLITS
        )
        slice_tokens = None if self.flash_attn is None else self.max_slice_tokens
        return [
            self.workspace.short_parts(num_short_tokens, num_partials),
            self.workspace.prefill_parts(slice_tokens),
        ]

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that the profile run reserves."""
        if current_platform.is_cpu():
            return 0
        return max(self.workspace.num_bytes(parts) for parts in self._largest_batch())

    def _reserve_workspace(self, device: torch.device) -> None:
        """Take all memory of the largest batch, and of kernels, in the profile run."""
        if not is_workspace_manager_initialized():
            return
        for parts in self._largest_batch():
            self.workspace.take(parts, device)
        # Kept for good by a cache: not to be made in a CUDA graph's pool.
        self.kernels.make_matrices(self.head_size, device)
        warm_up(self, device)
