# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The layer that keeps the tail of a turbo layer, one block for each request.

``vllm/v1/attention/ops/turbo/formats/tail.py`` has the layout of a block's rows, and
the rule by which a row is valid.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import MAX_ROWS, VERSION, TailFormat
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheSpec,
)

logger = init_logger(__name__)

# Tokens of a block, unless the user asks for a size. Smaller blocks hold few rows.
PREFERRED_BLOCK_SIZE = 64
# With a sliding window of up to this many tokens, a tail is not worth a block.
FEW_TOKENS = 16


@dataclass
class TurboTailMetadata(AttentionMetadata):
    """The tails of a step's R requests.

    Attributes:
        blocks: (R,) int32, contiguous, each request's block; zero for none.
        packed_lens: (R,) int32, scratch of the running layer: see ``Tail``.

    """

    blocks: torch.Tensor
    packed_lens: torch.Tensor


class TurboTailMetadataBuilder(AttentionMetadataBuilder[TurboTailMetadata]):
    """Builds ``TurboTailMetadata`` from tensors whose addresses do not change."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.packed_lens = torch.zeros(
            vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TurboTailMetadata:
        # The block table has one column.
        blocks = common_attn_metadata.block_table_tensor[:, 0]
        assert blocks.is_contiguous()
        return TurboTailMetadata(blocks, self.packed_lens[: len(blocks)])


class TurboTailBackend(AttentionBackend):
    """The backend of layers that keep tails and do not attend."""

    @staticmethod
    def get_name() -> str:
        return "TURBO_WINDOW"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        raise NotImplementedError("the attention layer attends to its tail")

    @staticmethod
    def get_builder_cls() -> type[TurboTailMetadataBuilder]:
        return TurboTailMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        # A block is one page, even if other layers' blocks are cut into several.
        if kv_cache_spec is not None:
            return [kv_cache_spec.block_size]
        return [MultipleOf(PREFERRED_BLOCK_SIZE)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether the user asked for a tail, or a block has room for a useful one."""
        config = get_current_vllm_config_or_none()
        asked_for = config is None or config.cache_config.user_specified_block_size
        return asked_for or block_size is None or block_size >= PREFERRED_BLOCK_SIZE


def tail_choice(
    vllm_config: VllmConfig,
    sliding_window: int | None = None,
    states_per_token: int = 1,
) -> int:
    """The most tokens that a tail should have; zero for no tail.

    Args:
        vllm_config: The engine's configuration.
        sliding_window: The most tokens that a query token of the layer sees, itself
            included; None for all before it.
        states_per_token: Tokens that the layer stores for each token of a request.

    Raises:
        ValueError: If the user asks for a number of tokens, and the engine can have no
            tail.

    """
    choice: int | Literal["auto"] = vllm_config.attention_config.turbo_window
    if choice == 0:
        return 0
    if sliding_window is not None and sliding_window <= FEW_TOKENS:
        logger.info_once(
            "Turbo KV cache: no recent window for layers whose sliding window has only "
            "%d tokens.",
            sliding_window,
        )
        return 0
    if states_per_token > 1:
        # A block belongs to a request, and its positions are those of request tokens.
        logger.info_once(
            "Turbo KV cache: no recent window for layers that store %d tokens for each "
            "token of a request.",
            states_per_token,
        )
        return 0
    features = refusals.TAIL_FEATURES.items()
    reason = next((reason for reason, found in features if found(vllm_config)), None)
    if reason is None:
        return MAX_ROWS if choice == "auto" else choice
    if choice != "auto":
        raise ValueError(refusals.tail_refusal(choice, reason))
    logger.info_once("Turbo KV cache: no recent window, because %s.", reason)
    return 0


class TurboTail(AttentionLayerBase):
    """The tail of an attention layer.

    Attributes:
        layer_name: The name of this layer.
        num_tokens: The most tokens that decodes read from a block; zero until the spec
            is asked for, and if there is no tail.

    """

    def __init__(
        self,
        main_layer_name: str,
        layout: TurboFormat,
        wanted: int,
        query_len: int,
        sliding_window: int | None = None,
    ):
        """Make the tail of a layer.

        Args:
            main_layer_name: The attention layer's name.
            layout: The format of its cache.
            wanted: The most tokens of the tail.
            query_len: The most query tokens of a decode request. As many rows are
                written while others are read.
            sliding_window: The most tokens that a query token sees, itself included;
                None for all before it.

        """
        self.main_layer_name = main_layer_name
        self.layer_name = f"{main_layer_name}.recent_window"
        self.layout = layout
        self.wanted = wanted
        self.query_len = query_len
        self.sliding_window = sliding_window
        self.num_tokens = 0
        self.kv_cache = torch.tensor([])
        self.format: TailFormat | None = None

    def get_attn_backend(self) -> type[AttentionBackend]:
        return TurboTailBackend

    def _room(self, block_size: int, in_sight: bool = False) -> int:
        """Tokens that a block has room for in addition to a step's query tokens.

        With ``in_sight`` only those that all query tokens of the step see.
        """
        sliding_window = self.sliding_window if in_sight else None
        rows = TailFormat(self.layout, block_size, sliding_window).num_rows
        return max(rows - self.query_len, 0)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """The spec of the layer's pages, with one page a request; None for no tail.

        Under a short sliding window there may be fewer tokens than the user asks for.

        Raises:
            ValueError: If a block is too small for the tokens that the user asks for.

        """
        context = vllm_config.compilation_config.static_forward_context
        spec = context[self.main_layer_name].get_kv_cache_spec(vllm_config)
        # A drafter computes a step's keys again in the next step. A chunk of chunked
        # local attention is a request to its layer, and has no block of its own.
        if (
            self.is_draft_layer
            or not isinstance(spec, AttentionSpec)
            or isinstance(spec, ChunkedLocalAttentionSpec)
        ):
            return None
        room = self._room(spec.block_size)
        choice = vllm_config.attention_config.turbo_window
        reason = refusals.tail_room(room, spec.block_size, self.query_len)
        if choice != "auto" and choice > room:
            raise ValueError(refusals.tail_refusal(choice, reason))
        self.num_tokens = min(self.wanted, self._room(spec.block_size, in_sight=True))
        if self.num_tokens == 0 and room > 0:
            assert self.sliding_window is not None
            reason = refusals.tail_sight(self.sliding_window, self.query_len)
        if self.num_tokens == 0:
            logger.info_once("Turbo KV cache: no recent window, because %s.", reason)
            return None
        return CircularBufferSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            kv_quant_mode=spec.kv_quant_mode,
            page_size_padded=spec.page_size_padded,
            state_content_bytes=self.layout.slot_size,
            format_id=f"window{VERSION}",
        )

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache
        self.format = TailFormat(self.layout, kv_cache.shape[2], self.sliding_window)

    def of_step(self) -> Tail | None:
        """The tails of the forward pass's requests; None if there are none."""
        if self.kv_cache.numel() == 0:
            return None
        assert self.format is not None
        metadata: Any = get_forward_context().attn_metadata
        own = metadata[self.layer_name]
        assert isinstance(own, TurboTailMetadata)
        return Tail(
            self.kv_cache, own.blocks, own.packed_lens, self.format, self.num_tokens
        )
