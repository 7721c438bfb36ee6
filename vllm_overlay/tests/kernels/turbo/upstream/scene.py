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
from vllm.v1.attention.backends import ultraquant_attn
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.attention.backends.ultraquant_attn import UltraQuantAttentionBackend
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.ultraquant.format import (
    k_codes_offset,
    k_scales_offset,
    slot_size,
    v_codes_offset,
    v_scales_offset,
)
from vllm.v1.attention.ops.ultraquant.reference import (
    UltraQuantEncoded,
    ultraquant_dequant,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..backend_utils import register
from ..batch_utils import make_common
from ..flash_utils import flash_attn_stand_in
from ..utils import DEVICE, FP16, gaussian, slots_of

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
all_packed = pytest.mark.parametrize("name", BACKENDS)


def fails_upstream(raises: type[BaseException], reason: str = "a defect of vLLM's"):
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

    def new_slots(self) -> torch.Tensor:
        ends = zip(self.block_table, self.contexts.tolist(), self.seq_lens.tolist())
        return torch.cat([slots_of(*sequence, BLOCK_SIZE) for sequence in ends])

    def metadata(self, surplus: int = 0) -> CommonAttentionMetadata:
        """The metadata as the model runner has it.

        Args:
            surplus: Tokens by which the host's lengths exceed the device's, for
                requests with a context.

        """
        lens = (self.query_lens.tolist(), self.seq_lens.tolist())
        common = make_common(*lens, self.block_table, self.new_slots())
        upper_bound = self.seq_lens + surplus * (self.contexts > 0).int()
        return common.replace(
            max_seq_len=int(upper_bound.max()), seq_lens_cpu_upper_bound=upper_bound
        )

    def store_contexts(self) -> None:
        for row, context in enumerate(self.contexts.tolist()):
            if context == 0:
                continue
            key, value = self.keys[row][:context], self.values[row][:context]
            slots = slots_of(self.block_table[row], 0, context, BLOCK_SIZE)
            self.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots)

    def serve(self, surplus: int = 0) -> None:
        """Store contexts, and check the output of a forward pass."""
        self.store_contexts()
        metadata = self.make_builder().build(0, self.metadata(surplus))
        self.check(self.run(metadata))

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


def load_ultraquant(
    slots: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated K, and V, both (T, H, D) fp32, from slots (T, H, C) uint8."""
    bounds = [
        k_codes_offset(size),
        k_scales_offset(size),
        v_codes_offset(size),
        v_scales_offset(size),
        slot_size(size),
    ]
    parts = [slots[..., a:b] for a, b in zip(bounds, bounds[1:])]
    key = ultraquant_dequant(UltraQuantEncoded(*parts[:2]), size)
    return key, ultraquant_dequant(UltraQuantEncoded(*parts[2:]), size)


def attend_to_pages(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    PiT: torch.Tensor,
    **arguments,
) -> torch.Tensor:
    """UltraQuant's unified attention in PyTorch. The kernel needs dot products of bf16,
    which Triton's interpreter lacks.
    """
    output = torch.empty_like(query)
    starts = query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        positions = torch.arange(length, device=query.device)
        blocks = block_table[row, positions // BLOCK_SIZE].long()
        key, value = load_ultraquant(
            kv_cache[blocks, positions % BLOCK_SIZE], query.shape[2]
        )
        rotated = query[tokens].float() @ PiT
        output[tokens] = reference.attention(rotated, key, value, scale)[0]
    return output


def flash_attn_of_ultraquant(impl, q, k, v, **arguments) -> torch.Tensor:
    """FlashAttention as UltraQuant calls it, in PyTorch."""
    out = torch.empty_like(q)
    return flash_attn_stand_in(
        q,
        k,
        v,
        out,
        softmax_scale=impl.scale,
        causal=True,
        return_softmax_lse=True,
        **arguments,
    )[0]


def set_ultraquant_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have UltraQuant attend in PyTorch."""
    monkeypatch.setattr(
        ultraquant_attn, "ultraquant_unified_attention", attend_to_pages
    )
    monkeypatch.setattr(ultraquant_attn, "_HAS_FLASH_ATTN", True)
    impl = ultraquant_attn.UltraQuantAttentionImpl
    monkeypatch.setattr(impl, "_flash_attn_varlen", flash_attn_of_ultraquant)
