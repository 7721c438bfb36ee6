# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A layer at work: its kernels, its scoring and the limits of its steps."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.choose import TurboSource, current_capability
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import Scoring, TensorSpecs
from vllm.v1.attention.ops.turbo.layer.base import Runner, decode_query_len
from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel
from vllm.v1.attention.ops.turbo.layer.flash import get_flash_attn
from vllm.v1.attention.ops.turbo.layer.kernels import KernelSet
from vllm.v1.attention.ops.turbo.layer.scratch import LayerScratch
from vllm.v1.attention.ops.turbo.planning.decode import (
    MAX_CALL_TOKENS,
    MAX_EXTEND_TOKENS,
    MAX_OUTPUT_CALL_TOKENS,
    MAX_SHARED_EXTEND_TOKENS,
    DecodePlanner,
)
from vllm.v1.attention.ops.turbo.planning.extend_limits import max_extend_len
from vllm.v1.attention.ops.turbo.planning.largest_batch import (
    LargestBatch,
    largest_batch,
)
from vllm.v1.attention.ops.turbo.planning.prefill import (
    FLASH_ATTN_MAX_HEAD_SIZE,
    PrefillLimits,
    prefill_limits,
)
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.keys.bias import KeyBias


class TurboRunner(Runner[KernelSet]):
    """One layer with K and V, whose kernels ``forward`` runs.

    Attributes:
        layout: The cache's format.
        scoring: How the layer scores keys; ``set_key_offset`` replaces the offset.
            Loading weights sets the sinks' numbers in place.
        all_stored: Whether layers that store also read query tokens from the cache.
        states_per_token: Tokens that the layer stores for each token of a request.
        max_query_len: The most query tokens of a decode request, also in drafters.
        has_spans: Whether tokens may see later ones, as an image's do.
        capability: The GPU's compute capability, such as 90; None for none.
        prefill_limits: The bounds of a prefill's scratch.
        flash_attn: The function that attends in prefills; None on a CPU.
        tail_wanted: The most tokens of a tail; zero for none.
        bias_was_sought: Whether the bias of K was sought while weights were loaded.
        key_bias: The bias that the offset depends on; None without a bias.
        means_problem: The reason why the means of K will not be an offset, when they
            are known; None if they will.
        key_offset_replicas: Consecutive tensor parallel ranks with the same heads.
        query_direction: The table of ``QueryDirection``; None for none.
        shares_cache: Whether the layer reads another layer's cache and does not store.
        context_parallel: The ranks that share the context; None if they do not.
        context_shape: The shape of attention to the context, with the query heads of
            all these ranks.

    """

    def __init__(
        self,
        shape: LayerShape,
        layout: TurboFormat,
        scoring: Scoring,
        vllm_config: VllmConfig,
        tail_wanted: int = 0,
        states_per_token: int = 1,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        super().__init__(shape, vllm_config)
        self.context_shape = shape
        self.context_parallel = context_parallel
        if context_parallel is not None:
            # All ranks have the same KV head, so their query heads are in order.
            assert shape.num_kv_heads == 1, shape
            num_heads = context_parallel.size * shape.num_heads
            self.context_shape = shape._replace(num_heads=num_heads)
        self.layout = layout
        self.all_stored = self.stored
        self.states_per_token = states_per_token
        self.max_num_tokens *= states_per_token
        self.max_query_len = states_per_token * decode_query_len(vllm_config)
        model_config = vllm_config.model_config
        self.has_spans = (
            model_config is not None
            and model_config.is_mm_prefix_lm
            # Gemma 4's larger heads see no spans.
            and shape.largest_head_size <= FLASH_ATTN_MAX_HEAD_SIZE
        )
        self.scoring = scoring
        self.prefill_limits = self._prefill_limits()
        self.bias_was_sought = False
        self.key_bias: KeyBias | None = None
        self.means_problem = refusals.means_problem(
            vllm_config, scoring.soft_cap, states_per_token
        )
        self.key_offset_replicas = 1
        self.query_direction: torch.Tensor | None = None
        self.tail_wanted = tail_wanted
        self.shares_cache = False
        self.capability = current_capability()
        self.flash_attn = None
        if not current_platform.is_cpu():
            self.flash_attn = get_flash_attn(shape.largest_head_size)

    def share_cache(self) -> None:
        """Make the layer read all tokens from another layer's cache."""
        if self.shares_cache:
            return
        self.shares_cache = self.stored = True
        self.tail_wanted = 0
        self.prefill_limits = self._prefill_limits()

    def _prefill_limits(self) -> PrefillLimits:
        window = self.scoring.sliding_window
        limits = prefill_limits(self.context_shape, self.stored, sliding_window=window)
        if not (self.stored and self.has_spans):
            return limits
        # A step has whole spans, and each is read from the cache at once.
        piece_tokens = max(limits.piece_tokens, self.max_num_tokens)
        return limits._replace(piece_tokens=piece_tokens)

    def set_key_offset(self, offset: torch.Tensor | None) -> None:
        """Take an offset off K before it is stored; None for none.

        Args:
            offset: See ``Scoring.key_offset``. It is set when weights have been loaded,
                before the kernels are chosen. Later weights change its numbers in
                place, because CUDA graphs read it at this address.

        """
        has_cap = self.scoring.soft_cap is not None
        assert offset is None or not has_cap, "capped scores with an offset"
        self.scoring = self.scoring._replace(key_offset=offset)

    @property
    def source(self) -> TurboSource:
        variant = self.scoring.variant(self.tail_wanted > 0)
        has_direction = self.query_direction is not None
        variant = variant._replace(query_direction=has_direction)
        group = self.context_shape.num_queries_per_kv
        return TurboSource(self.layout, group, self.max_query_len, variant)

    @property
    def expected_source(self) -> TurboSource:
        source = self.source
        if self.means_problem is not None:
            return source
        expected = source.variant._replace(key_offset=True, query_direction=True)
        return replace(source, variant=expected)

    @property
    def launch_key(self) -> tuple[object, ...]:
        return (
            self.shape,
            self.context_shape,
            self.layout,
            self.stored,
            self.shares_cache,
            self.has_spans,
            self.kernel_choice,
            *(value is not None for value in self.scoring),
            self.query_direction is not None,
            self.scoring.sliding_window,
            self.tail_wanted > 0,
            self.max_query_len,
        )

    @property
    def max_extend_len(self) -> int:
        """The most query tokens of an extend; 0 if there are no extends."""
        if self.kernels is None or self.kernels.extend_attention is None:
            return 0
        return max_extend_len(
            self.layout.head_size,
            self.context_shape.num_queries_per_kv,
            self.capability,
            self.extends_to_outputs,
        )

    @property
    def max_extend_tokens(self) -> int:
        """The most query tokens of a step's extends."""
        is_shared = self.context_parallel is not None
        return MAX_SHARED_EXTEND_TOKENS if is_shared else MAX_EXTEND_TOKENS

    @property
    def extends_to_outputs(self) -> bool:
        """Whether ``extend_outputs`` serves all but small extends.

        Such extends read a tail's tokens as codes, like prefills.
        """
        if self.kernels is None or self.kernels.extend_outputs is None:
            return False
        return self.context_parallel is None

    @property
    def max_call_tokens(self) -> int:
        """The most query slots of a call of extends: see ``find_extends``."""
        return MAX_OUTPUT_CALL_TOKENS if self.extends_to_outputs else MAX_CALL_TOKENS

    @property
    def max_merged_tokens(self) -> int | None:
        """The most query tokens of an extend that its merge attends to; None for any.

        Layers that share a plan agree, whether they store or not.
        """
        if self.kernels is None or self.all_stored:
            return None
        return self.kernels.max_merged_tokens

    @property
    def planner(self) -> DecodePlanner | None:
        """The planner of the kernels' decodes and extends; None without kernels."""
        if self.kernels is None:
            return None
        return DecodePlanner(
            self.context_shape,
            self.num_sms,
            self.kernels.num_decode_splits,
            self.kernels.num_extend_splits,
            self.max_merged_tokens,
            self.extends_to_outputs,
        )

    def alone(self) -> AbstractContextManager[None]:
        """A context in which kernels run without waiting for other ranks."""
        if self.context_parallel is None:
            return nullcontext()
        return self.context_parallel.alone()

    def run_collectives(self, device: torch.device) -> None:
        """Exchange as much data with other ranks as the largest step does.

        So the profile run measures its memory, and kernels are compiled.

        Raises:
            RuntimeError: If the received data differ from the sent data.

        """
        if self.context_parallel is None:
            return
        self.context_parallel.check(
            self.max_slice_tokens, self.largest_batch.num_slots, self.shape, device
        )

    @property
    def max_slice_tokens(self) -> int:
        """The most query tokens of a prefill's slice."""
        return min(self.prefill_limits.slice_tokens, self.max_num_tokens)

    @property
    def largest_batch(self) -> LargestBatch:
        """The batch whose decodes and extends take the most scratch of any step."""
        return largest_batch(
            self.context_shape,
            self.max_num_seqs,
            self.max_num_tokens,
            self.max_query_len,
            self.max_extend_len,
            self.max_extend_tokens,
            self.max_merged_tokens,
            self.extends_to_outputs,
        )

    @property
    def scratch(self) -> LayerScratch:
        """The sizes of the layer that its scratch follows from."""
        return LayerScratch(
            self.shape,
            self.context_shape,
            self.context_parallel is not None,
            self.prefill_limits.piece_tokens,
            partial(
                self.entry_points.output_scratch,
                self.layout,
                self.shape.num_kv_heads,
                self.num_sms,
            ),
        )

    def largest_scratch(self) -> list[TensorSpecs]:
        return self.scratch.largest(self.largest_batch, self.max_slice_tokens)
