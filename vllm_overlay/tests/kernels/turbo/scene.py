# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An attention layer with one interface for three dtypes of about as many bits: vLLM's
``turboquant_4bit_nc`` and ``ultraquant_4bit``, and ``turbo4``.
"""

from dataclasses import dataclass, field

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.attention.backends.ultraquant_attn import UltraQuantAttentionBackend
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from .backend_utils import register
from .utils import DEVICE, FP16, gaussian

THEIRS, OURS, ULTRAQUANT = "turboquant_4bit_nc", "turbo4", "ultraquant_4bit"
BACKENDS = {
    THEIRS: TurboQuantAttentionBackend,
    OURS: TurboAttentionBackend,
    ULTRAQUANT: UltraQuantAttentionBackend,
}
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 2, 1, 64, 32
# A fraction of an output's norm: four bits cost up to 0.14, wrong lengths 0.49 or more.
TOLERANCE = 0.25

both = pytest.mark.parametrize("name", [THEIRS, OURS])


def unmended(raises: type[BaseException], reason: str = "a defect of vLLM's"):
    """Both dtypes; the test of vLLM's is expected to raise an exception.

    Args:
        raises: The exception.
        reason: The address of an issue or a change upstream, if there is one.

    """
    mark = pytest.mark.xfail(strict=True, raises=raises, reason=reason)
    return pytest.mark.parametrize("name", [pytest.param(THEIRS, marks=mark), OURS])


def make_impl(config: VllmConfig, head_size: int = HEAD_SIZE, **arguments):
    name = config.cache_config.cache_dtype
    with set_current_vllm_config(config):
        return BACKENDS[name].get_impl_cls()(
            NUM_HEADS,
            head_size,
            head_size**-0.5,
            NUM_KV_HEADS,
            kv_cache_dtype=name,
            **arguments,
        )


@dataclass
class Scene:
    """A layer of one dtype, and requests whose contexts are in its cache.

    Attributes:
        config: The configuration of a model with one layer.
        requests: Query length and context length of each request, decodes first.

    """

    config: VllmConfig
    requests: list[tuple[int, int]]
    head_size: int = HEAD_SIZE
    layer: torch.nn.Module = field(default_factory=torch.nn.Module)

    def __post_init__(self) -> None:
        name = self.config.cache_config.cache_dtype
        self.backend = BACKENDS[name]
        self.impl = make_impl(self.config, head_size=self.head_size)
        self.impl.process_weights_after_loading(FP16)
        self.spec = self.backend.customize_spec(
            FullAttentionSpec(
                block_size=BLOCK_SIZE,
                num_kv_heads=NUM_KV_HEADS,
                head_size=self.head_size,
                dtype=torch.uint8,
                kv_quant_mode=get_kv_quant_mode(name),
            )
        )
        self.query_lens = torch.tensor([q for q, _ in self.requests])
        self.contexts = torch.tensor([context for _, context in self.requests])
        self.seq_lens = (self.query_lens + self.contexts).int()
        lengths = self.seq_lens.tolist()
        shape = (sum(lengths), NUM_KV_HEADS, self.head_size)
        self.keys = gaussian(*shape, dtype=FP16, seed=1).split(lengths)
        self.values = gaussian(*shape, dtype=FP16, seed=2).split(lengths)
        num_tokens = int(self.query_lens.sum())
        self.query = gaussian(num_tokens, NUM_HEADS, self.head_size, dtype=FP16, seed=3)
        width = -(-max(lengths) // BLOCK_SIZE)
        num_blocks = len(lengths) * width
        blocks = torch.arange(num_blocks, dtype=torch.int32).flip(0)
        self.block_table = blocks.view(-1, width).to(DEVICE)
        page = [NUM_KV_HEADS, BLOCK_SIZE]
        layouts = self.backend.supported_kv_cache_layouts()
        tokens_first = layouts is None or KVCacheLayout.LBNHC in layouts
        shape = (num_blocks, *(page[::-1] if tokens_first else page))
        self.cache = torch.zeros(
            *shape, self.spec.state_content_bytes, dtype=torch.uint8, device=DEVICE
        )
        if tokens_first:
            self.cache = self.cache.transpose(1, 2)

    def make_builder(self):
        if self.backend is TurboAttentionBackend:
            register(self.config, self.impl)
        return self.backend.get_builder_cls()(
            self.spec, ["layers.0.attn"], self.config, DEVICE
        )

    def slots(self, row: int, first: int, last: int) -> torch.Tensor:
        positions = torch.arange(first, last, device=DEVICE)
        blocks = self.block_table[row, positions // BLOCK_SIZE].long()
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE

    def new_slots(self) -> torch.Tensor:
        ends = zip(self.contexts.tolist(), self.seq_lens.tolist())
        return torch.cat([self.slots(row, *span) for row, span in enumerate(ends)])

    def metadata(self, surplus: int = 0) -> CommonAttentionMetadata:
        """The metadata as the model runner has it.

        Args:
            surplus: Tokens by which the host's lengths exceed the device's, for
                requests with a context.

        """
        upper_bound = self.seq_lens + surplus * (self.contexts > 0).int()
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.query_lens])
        starts = starts.cumsum(0).int()
        return CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens.to(DEVICE, copy=True),
            num_reqs=len(self.requests),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(self.query_lens.max()),
            max_seq_len=int(upper_bound.max()),
            block_table_tensor=self.block_table,
            slot_mapping=self.new_slots(),
            seq_lens_cpu_upper_bound=upper_bound,
        )

    def store_contexts(self) -> None:
        for row, context in enumerate(self.contexts.tolist()):
            if context == 0:
                continue
            key, value = self.keys[row][:context], self.values[row][:context]
            slots = self.slots(row, 0, context)
            self.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots)

    def run(self, metadata) -> torch.Tensor:
        """Store the new tokens and attend, as the layer does."""
        ends = self.contexts.tolist()
        key = torch.cat([x[end:] for x, end in zip(self.keys, ends)])
        value = torch.cat([x[end:] for x, end in zip(self.values, ends)])
        if not self.backend.forward_includes_kv_cache_update:
            self.impl.do_kv_cache_update(
                self.layer, key, value, self.cache, metadata.slot_mapping
            )
        output = torch.zeros_like(self.query)
        return self.impl.forward(
            self.layer, self.query, key, value, self.cache, metadata, output
        )

    def check(self, output: torch.Tensor) -> None:
        """Compare to attention over the unquantised K and V of each request."""
        lengths = self.query_lens.tolist()
        parts = zip(self.query.split(lengths), self.keys, self.values)
        expected = [
            reference.attention(
                query.float(), key.float(), value.float(), self.head_size**-0.5
            )[0]
            for query, key, value in parts
        ]
        for row, (found, wanted) in enumerate(zip(output.split(lengths), expected)):
            error = ((found - wanted).norm() / wanted.norm()).item()
            assert error <= TOLERANCE, f"request {row}: error {error:.2f}"
