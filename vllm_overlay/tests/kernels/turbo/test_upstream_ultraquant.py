# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Defects of vLLM's TurboQuant that its successor ``ultraquant_4bit`` shares, and that
the series mends.
"""

import pytest
import torch

from vllm.v1.attention.backends import ultraquant_attn
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

from .backend_utils import make_vllm_config, with_drafts
from .flash_utils import flash_attn_stand_in
from .scene import BLOCK_SIZE, ULTRAQUANT, Scene
from .utils import FP16, requires_triton

pytestmark = requires_triton


def load(slots: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
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
        key, value = load(kv_cache[blocks, positions % BLOCK_SIZE], query.shape[2])
        rotated = query[tokens].float() @ PiT
        output[tokens] = reference.attention(rotated, key, value, scale)[0]
    return output


def attend(impl, q, k, v, **arguments) -> torch.Tensor:
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


@pytest.fixture(autouse=True)
def attention_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ultraquant_attn, "ultraquant_unified_attention", attend_to_pages
    )
    monkeypatch.setattr(ultraquant_attn, "_HAS_FLASH_ATTN", True)
    impl = ultraquant_attn.UltraQuantAttentionImpl
    monkeypatch.setattr(impl, "_flash_attn_varlen", attend)


@pytest.mark.parametrize(
    "requests",
    [[(34, 0), (2, 32)], [(1, 9), (34, 0), (2, 32)]],
    ids=["prefills", "mixed"],
)
def test_prefix_beside_a_long_first_chunk(tmp_path, requests):
    """The longest query is as long as the longest sequence, but another request of the
    batch has a prefix in the cache.
    """
    scene = Scene(make_vllm_config(tmp_path, ULTRAQUANT, FP16), requests)
    scene.store_contexts()
    scene.check(scene.run(scene.make_builder().build(0, scene.metadata())))


def test_drafts_by_lengths_of_the_device(tmp_path):
    """The host does not know how many drafts of the last step were rejected."""
    config = with_drafts(make_vllm_config(tmp_path, ULTRAQUANT, FP16))
    scene = Scene(config, [(1, 64), (2, 31), (3, 14)])
    scene.store_contexts()
    metadata = scene.make_builder().build(0, scene.metadata(surplus=7))
    scene.check(scene.run(metadata))
