# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The store takes an offset off K, and attention adds its part of the scores again."""

import json
import math

import pytest
import torch
from torch import nn

from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.ops.turbo import interface, reference
from vllm.v1.attention.ops.turbo.choose import TurboSource, choose_kernels
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.keys.offset import (
    digest,
    find_rotary,
    mean_rotary,
    mean_rotated,
)
from vllm.v1.attention.ops.turbo.planning.tokens import CachedPiece, SeqLens

from ..backend_utils import (
    HEAD_SIZE,
    KERNELS,
    NUM_KV_HEADS,
    all_paths,
    kernel_paths,
    make_impl,
    make_vllm_config,
    prefill_modes,
    set_scratch,
    with_drafts,
)
from ..batch_utils import BATCHES, Batch
from ..formats.test_golden import FILE as GOLDEN
from ..formats.test_golden import digest as digest_of_bytes
from ..formats.test_golden import stored_with_offset
from ..sequences import ints
from ..utils import (
    BF16,
    DEVICE,
    FP16,
    ON_GPU,
    SEGMENT,
    all_presets,
    fill_cache,
    gaussian,
    model_dtypes,
    new_cache,
    requires_triton,
)

pytestmark = pytest.mark.usefixtures("short_segments")


def long_offset() -> torch.Tensor:
    """Offsets of all segments, (G, H, D) fp32.

    A head's offset has a norm of about 400 in few coordinates, which differ by head.
    Each segment adds a vector of norm 20, and the first token one of norm 40.
    """
    offset = torch.zeros(NUM_KV_HEADS, HEAD_SIZE)
    for head in range(NUM_KV_HEADS):
        own = offset[head, 5 + head :: 17]
        own.copy_(torch.tensor([200.3, -150.7, 250.1, 199.9])[: len(own)])
    own = 20 / math.sqrt(HEAD_SIZE) * gaussian(10, NUM_KV_HEADS, HEAD_SIZE, seed=5)
    own[0] *= 2
    return offset.to(DEVICE) + own


def batch_with_offset(impl, requests: list[tuple[int, int]]) -> Batch:
    """A batch whose new keys have the layer's offset; cached keys lack it."""
    batch = Batch.make(impl, requests)
    places = [context + i for queries, context in requests for i in range(queries)]
    table = impl.runner.scoring.key_offset
    rows = interface.offset_rows(torch.tensor(places), table)
    batch.key[: len(places)] += table[rows].to(batch.key.dtype)
    return batch


# Requests at borders of segments, in all segments and beyond the table.
BORDERS = {
    "decodes at borders": [
        (1, SEGMENT - 1), (1, SEGMENT), (1, 10 * SEGMENT + 5), (1, 0), (1, 2 * SEGMENT)
    ],
    "prefills at borders": [
        (1, SEGMENT + 9), (40, SEGMENT - 20), (50, 0), (33, 2 * SEGMENT + 1)
    ],
    "first tokens": [(1, 1), (1, 2), (1, 40), (9, 1), (40, 2), (70, 33)],
    "a chunk of three segments": [(2, SEGMENT), (SEGMENT + 20, SEGMENT - 10)],
}  # fmt: skip
CASES = {name: BATCHES[name] for name in ("mixed", "prefix hits")} | BORDERS


@prefill_modes
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [BF16, FP16] if ON_GPU else [BF16])
@all_paths
def test_batches(folder, case, mode, dtype, path, monkeypatch):
    # Few splits, so that some have tokens of several segments.
    set_scratch(monkeypatch, partials=4, piece_tokens=2 * SEGMENT)
    config = make_vllm_config(folder, "turbo4", dtype, mode)
    impl = make_impl(config, key_offset=long_offset(), path=path)
    batch = batch_with_offset(impl, CASES[case])
    batch.serve(impl, batch.build(config, impl))


@pytest.mark.parametrize("mode, window", [("raw", 128), ("stored", 17)])
@all_paths
def test_sliding_windows(folder, mode, window, path, monkeypatch):
    """Segments begin within windows, and within a prefill's own tokens."""
    set_scratch(monkeypatch, piece_tokens=140, least_tokens=12)
    config = make_vllm_config(folder, "turbo4", BF16, mode, max_num_batched_tokens=512)
    impl = make_impl(config, sliding_window=window, key_offset=long_offset(), path=path)
    requests = [(1, 63), (1, 64), (1, 70), (1, 700), (40, 50), (150, 31), (5, 640)]
    batch = batch_with_offset(impl, requests)
    batch.free_hidden_blocks(window)
    batch.serve(impl, batch.build(config, impl))


@prefill_modes
@all_paths
def test_drafts(folder, mode, path):
    """Drafts of mixed lengths at borders of segments, and one without context."""
    config = with_drafts(make_vllm_config(folder, "turbo4", BF16, mode), 2)
    impl = make_impl(config, key_offset=long_offset(), path=path)
    requests = [(3, 31), (1, 2 * SEGMENT - 1), (2, 95), (3, SEGMENT - 1), (3, 0)]
    batch = batch_with_offset(impl, requests)
    batch.serve(impl, batch.build(config, impl))


@kernel_paths
@model_dtypes
def test_paths_store_the_same_bytes(folder, dtype, path):
    """Paths store the same bytes; golden bytes test the other presets."""
    config = make_vllm_config(folder, "turbo4", dtype)
    impl = make_impl(config, key_offset=long_offset(), path=path)
    caches = []
    for each in ("torch", path):
        batch = batch_with_offset(impl, BORDERS["prefills at borders"])
        batch.run(impl, batch.build(config, impl), each)
        caches.append(batch.cache)
    assert torch.equal(caches[0], caches[1])


@requires_triton
def test_a_cache_that_is_updated_alone_has_the_same_bytes(folder):
    """An update beside the forward pass knows the places of the step's tokens alone."""
    config = make_vllm_config(folder, "turbo4")
    impl = make_impl(config, key_offset=long_offset(), path=KERNELS[0])
    direction = gaussian(3, NUM_KV_HEADS, HEAD_SIZE, dtype=FP16, seed=6)
    impl.runner.query_direction = direction.to(DEVICE)
    requests = BORDERS["prefills at borders"]
    batch, updated = (batch_with_offset(impl, requests) for _ in range(2))
    metadata = batch.build(config, impl)
    batch.run(impl, metadata, KERNELS[0])
    layer = config.compilation_config.static_forward_context["layers.0.attn"]

    def update(slot_mapping: torch.Tensor) -> None:
        with set_forward_context({layer.layer_name: metadata}, config):
            impl.do_kv_cache_update(
                layer, updated.key, updated.value, updated.cache, slot_mapping
            )

    with pytest.raises(NotImplementedError, match="beside the forward pass"):
        update(metadata.slot_mapping.clone())
    update(metadata.slot_mapping)
    assert torch.equal(updated.cache, batch.cache)
    impl.runner.query_direction = None
    update(metadata.slot_mapping)
    assert not torch.equal(updated.cache, batch.cache)


def test_each_token_has_the_offset_of_its_place():
    """Each token finds its row, beside empty requests and padding."""
    table = torch.arange(4.0).view(4, 1, 1)
    # Sequences 0, 2, 3 and 5 have tokens.
    starts = torch.tensor([0, 2, 2, 5, 6, 6, 9], dtype=torch.int32)
    ends = [SEGMENT + 1, 7, 3, 5 * SEGMENT, 1, 2 * SEGMENT + 1]
    offset = interface.KeyOffset(table, torch.tensor(ends, dtype=torch.int32), starts)
    found = reference.offsets_of(offset, 11).flatten()
    assert found.tolist()[:9] == [1, 2, 0, 1, 1, 3, 2, 2, 3]
    assert (
        reference.offsets_of(offset._replace(seq_lens=offset.seq_lens - 2), 11)[5] == 3
    )
    assert found.min() >= 0 and found.max() < 4


@all_presets
@kernel_paths
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_kernels_write_the_golden_bytes_with_an_offset(name, head_size, path):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    try:
        variant = interface.Variant(key_offset=True)
        kernels = choose_kernels(path, TurboSource(layout, 4, variant=variant))
    except ValueError as error:
        pytest.skip(str(error))
    found = stored_with_offset(layout, kernels.store, DEVICE)
    expected = json.loads(GOLDEN.read_text())[f"{name} {head_size}"]
    assert digest_of_bytes(found) == expected["page with K offset"]


PLAIN = {"rope_type": "default", "rope_theta": 1e6}
ROPES = {
    "plain": PLAIN,
    "partial": PLAIN | {"partial_rotary_factor": 0.5},
    "linear": PLAIN | {"rope_type": "linear", "factor": 4.0},
    "yarn": PLAIN
    | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    "mrope": PLAIN | {"mrope_section": [16, 8, 8]},
}


def make_rope(folder, name: str, dtype: torch.dtype = torch.float32):
    with set_current_vllm_config(make_vllm_config(folder)):
        return get_rope(
            HEAD_SIZE,
            max_position=32768,
            is_neox_style=True,
            rope_parameters=ROPES[name],
            dtype=dtype,
        )


def mean_of_keys(rope: nn.Module, bias: torch.Tensor, segment: int) -> torch.Tensor:
    """The mean of a segment's rotated bias, (H, D) fp32, by RoPE at each position.

    Segment -1 is the first token.
    """
    total = torch.zeros_like(bias, dtype=torch.float64)
    places = range(segment * SEGMENT, (segment + 1) * SEGMENT) if segment >= 0 else [0]
    for position in places:
        key = bias.flatten()[None].clone()
        positions = torch.tensor([position])
        total += rope.forward_native(positions, key.clone(), key)[1].view_as(bias)
    return (total / len(places)).float()


@pytest.mark.parametrize("name", ROPES)
def test_the_offset_is_the_mean_of_the_rotated_bias(folder, name):
    bias = 30 * gaussian(NUM_KV_HEADS, HEAD_SIZE, seed=3).cpu()
    rope = make_rope(folder, name)
    found = mean_rotated(bias, mean_rotary(rope))
    assert len(found) == -(-rope.cos_sin_cache.shape[0] // SEGMENT) + 1
    for segment in (-1, 0, 1, 7):
        expected = mean_of_keys(make_rope(folder, name), bias, segment)
        assert (found[segment + 1] - expected).abs().max() < 1e-4 * bias.abs().max()
    # Fast pairs turn several times, slow ones hardly move.
    assert not torch.allclose(found[1], bias, atol=1.0)
    assert not torch.allclose(found[1], found[8], atol=1.0)


@pytest.mark.parametrize("name", ROPES)
def test_the_offset_does_not_depend_on_the_dtype(folder, name):
    bias = gaussian(NUM_KV_HEADS, HEAD_SIZE, seed=3).bfloat16()
    ropes = [make_rope(folder, name, dtype) for dtype in (torch.float32, BF16)]
    tables = [rope.cos_sin_cache.clone() for rope in ropes]
    first, second = (mean_rotated(bias, mean_rotary(rope)) for rope in ropes)
    assert torch.equal(first, second)
    # The model's own tables have not changed.
    for rope, table in zip(ropes, tables):
        assert rope.cos_sin_cache.dtype == table.dtype
        assert torch.equal(rope.cos_sin_cache, table)


def test_without_a_rotation_the_offset_is_the_bias():
    bias = gaussian(NUM_KV_HEADS, HEAD_SIZE, seed=3).bfloat16()
    assert torch.equal(mean_rotated(bias, None), bias.float().cpu()[None])
    assert find_rotary(*[nn.Sequential(nn.Linear(2, 2))] * 2) is None


@requires_triton
@pytest.mark.parametrize("scale", [0.125, math.pi])
def test_scores_of_the_offset_join_the_lse(scale):
    """A request's scores are of the row of its last key."""
    from vllm.v1.attention.ops.turbo.triton.offset import add_offset_scores

    query = gaussian(2, 77, 6, HEAD_SIZE, dtype=BF16, seed=1)[1]
    table = 100 * gaussian(3, 3, HEAD_SIZE, seed=2)
    lse = gaussian(6, 77, seed=3)
    ends = ints([0, 37, 37, 40, 50, 60, 77])
    starts = [SEGMENT - 1, 0, 0, 0, SEGMENT - 1, 0]
    # The last request has no key.
    cu_lens = ints([0, 1, 2, 3, 5, SEGMENT + 5, SEGMENT + 5])
    rows = torch.tensor([1] * 37 + [0] * 3 + [1] * 10 + [2] * 10 + [0] * 17)
    expected = query.double() * table[rows].double().repeat_interleave(2, 1)
    expected = lse + scale * expected.sum(-1).T
    offset = interface.OffsetScores(query, table, scale)
    add_offset_scores(lse, offset, ends, 37, ints(starts), cu_lens)
    assert (lse - expected).abs().max() < 1e-5 * expected.abs().max()


@requires_triton
@pytest.mark.parametrize("num_offsets", [1, 2, 3, 4])
def test_gathered_keys_lack_the_offset_of_the_last_one(num_offsets):
    """Pieces begin with the first token, or anywhere; one is empty."""
    from vllm.v1.attention.ops.turbo.triton.prefill import (
        gather_context,
        rotated_offset,
    )

    layout = TurboFormat.from_cache_dtype("turbo4", HEAD_SIZE)
    pieces = [(0, 1), (0, SEGMENT + 9), (SEGMENT - 5, SEGMENT + 20), (3, 0), (0, 40)]
    starts, lens = zip(*pieces)
    cu_lens = torch.tensor([0, *lens]).cumsum(0).tolist()
    piece = CachedPiece(ints(starts), SeqLens(ints(cu_lens), max(lens), cu_lens[-1]))
    width = (2 * SEGMENT + 32) // 16
    block_table = ints(range(5 * width)).view(5, width)
    cache = new_cache(layout, 5 * width, NUM_KV_HEADS, 16)
    ends = [first + count for first, count in pieces]
    fill_cache(cache, block_table, ends, layout)
    table = 40 * gaussian(num_offsets, NUM_KV_HEADS, HEAD_SIZE, seed=2)
    places = [torch.arange(first, first + count) for first, count in pieces]
    rows = torch.cat([interface.offset_rows(x, table) for x in places])
    last_rows = torch.cat(
        [interface.offset_rows(x[-1:], table).expand(len(x)) for x in places]
    )
    # The reference's rotation rounds.
    matrix = rotation_matrix(HEAD_SIZE, table.device).double()
    shift = (table[rows] - table[last_rows]).double() @ matrix
    shift *= inverse_sqrt(HEAD_SIZE) / layout.key_codebook.gain
    found = []
    for offset in (None, rotated_offset(table, layout)):
        buffers = torch.zeros(2, cu_lens[-1], *table.shape[1:], device=DEVICE)
        gather_context(cache, block_table, piece, layout, *buffers, offset)
        found.append(buffers)
    assert torch.equal(found[0][1], found[1][1])
    assert (found[0][0] + shift - found[1][0]).abs().max() < 1e-4


def test_the_digest_tells_tables_and_layers_apart():
    table = long_offset()
    other = table.clone()
    other[0, 0] += 1e-3
    tables = [[table], [other], [table, None], [None, table], [table, table]]
    assert len({digest(each) for each in tables}) == len(tables)
    assert digest([table]) == digest([table.clone().cpu()])
