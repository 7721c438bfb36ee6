# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The directions of queries: a pass finds them, and layers store keys across them."""

from typing import Any

import pytest
import torch

from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.ops.turbo import interface, reference
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    KeyOffset,
    QueryDirection,
    Scoring,
    StoreCall,
    direction_rows,
)
from vllm.v1.attention.ops.turbo.keys.directions import (
    BUFFER,
    NEWEST_TOKENS,
    direction_segments,
    direction_table,
    query_directions,
)
from vllm.v1.attention.ops.turbo.keys.offset import (
    find_rotary,
    forward_of,
    inverse_rotary,
    mean_rotary,
    rotate_rows,
)
from vllm.v1.attention.ops.turbo.reference import codec

from ..utils import gaussian, new_cache
from .test_key_bias import HEAD_SIZE, HEADS, KV_HEADS, make_module, make_rotary
from .test_key_means import (
    MAX_MODEL_LEN,
    NUM_TEXT,
    config,
    keys_of,
    make_pass,
    means_of,
    run,
    set_tables,
    tensors_of,
)
from .test_key_rotation import MODELS, POSITIONS, ROPES, transformers_model

__all__ = ["config"]  # a fixture


def rope_of(name: str) -> Any:
    parameters = ROPES[name] | {"rope_type": name, "partial_rotary_factor": 0.5}
    return get_rope(
        HEAD_SIZE, POSITIONS, rope_parameters=parameters, dtype=torch.float32
    ).cpu()


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_turning_forth_again(config, name):
    """The copy is the inverse's transpose, as the power method needs it."""
    inverse = inverse_rotary(rope_of(name), NUM_TEXT)
    one, other = keys_of(), keys_of(seed=1)
    forth = rotate_rows(one, forward_of(inverse))
    assert not torch.allclose(forth, one, atol=0.1)
    found = (forth * other).sum(-1)
    expected = (one * rotate_rows(other, inverse)).sum(-1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_turning_forth_in_transformers(name):
    model = transformers_model(name, "default")
    inverse = inverse_rotary(find_rotary(model.attention, model), NUM_TEXT)
    keys = keys_of()
    found = rotate_rows(rotate_rows(keys, inverse), forward_of(inverse))
    torch.testing.assert_close(found, keys, atol=1e-4, rtol=0)


def principal(
    query: torch.Tensor, key: torch.Tensor, scoring: Scoring, inverse: Any
) -> torch.Tensor:
    """The directions, (H, D), query by query and key by key."""
    group = HEADS // KV_HEADS
    window = scoring.sliding_window or NUM_TEXT
    found = []
    for head in range(KV_HEADS):
        moment = torch.zeros(HEAD_SIZE, HEAD_SIZE)
        for own in range(group):
            for token in range(NUM_TEXT):
                row = query[token, head * group + own]
                first = max(0, token - window + 1)
                scores = scoring.scale * key[first : token + 1, head] @ row
                weights = scores.exp()
                total = weights.sum()
                if scoring.sinks is not None:
                    total = total + scoring.sinks[head * group + own].exp()
                rows = row.expand(NUM_TEXT, 1, -1).contiguous()
                turned = rows if inverse is None else rotate_rows(rows, inverse)
                for place in range(max(first, 1), token - NEWEST_TOKENS + 1):
                    one = turned[place, 0]
                    moment += weights[place - first] / total * one[:, None] * one
        found.append(torch.linalg.eigh(moment).eigenvectors[:, -1])
    return torch.stack(found)


def looking(seed: int = 1) -> list[torch.Tensor]:
    """Q, K and V, whose queries have a direction in common that RoPE turns slowly."""
    tensors = tensors_of(seed)
    tensors[0][:, :, HEAD_SIZE // 2 - 1] += 4
    tensors[0][:, :2, HEAD_SIZE - 1] += 4
    return tensors


@pytest.mark.parametrize("feature", ["plain", "rope", "window", "sinks"])
@pytest.mark.parametrize("step", [64, 16])
def test_a_pass_finds_the_principal_directions(config, feature, step):
    """In slices, they are those of the queries of the text's last slice."""
    module = make_module(config)
    runner = module.attn.impl.runner
    changes: dict[str, dict[str, Any]] = {
        "window": {"sliding_window": NEWEST_TOKENS + 6},
        "sinks": {"sinks": torch.linspace(-1, 6, HEADS)},
    }
    runner.scoring = runner.scoring._replace(**changes.get(feature, {}))
    inverse = (
        inverse_rotary(rope_of("default"), NUM_TEXT) if feature == "rope" else None
    )
    tensors = looking()
    text_pass, layers = make_pass(module, rotary=inverse)
    run(text_pass, layers, tensors, step)
    (means,) = text_pass.means.values()
    query, key, _ = (x[:NUM_TEXT].clone() for x in tensors)
    query[: (NUM_TEXT - 1) // step * step] = 0
    expected = principal(query, key, runner.scoring, inverse)
    found = (means.direction * expected).sum(-1).abs()
    torch.testing.assert_close(found, torch.ones(KV_HEADS), atol=2e-3, rtol=0)


def test_heads_that_see_no_key_that_counts_have_none():
    query, key, _ = (x[:NUM_TEXT] for x in tensors_of())
    seen = torch.ones(NUM_TEXT, NUM_TEXT).tril().bool()
    window = seen & ~seen.tril(-NEWEST_TOKENS)
    scoring = Scoring(HEAD_SIZE**-0.5)
    assert query_directions(query, key, seen, scoring, None).norm(dim=-1).min() > 0.99
    assert not query_directions(query, key, window, scoring, None).any()


def test_rows_turn_with_the_keys(config):
    """Each row is as long as sqrt(D), rotated as keys are, and of its positions."""
    rotary = make_rotary(config)
    direction = means_of().direction
    in_rows = direction_segments(MAX_MODEL_LEN)
    table = direction_table(direction, mean_rotary(rotary, in_rows))
    num_rows = -(-MAX_MODEL_LEN // interface.DIRECTION_SEGMENT)
    assert table.shape == (num_rows, KV_HEADS, HEAD_SIZE)
    assert table.dtype == torch.float16
    lengths = table.float().norm(dim=-1)
    torch.testing.assert_close(
        lengths, torch.full_like(lengths, HEAD_SIZE**0.5), atol=0.01, rtol=0
    )
    # Shorter sequences have the same rows, also of fewer positions than a segment.
    few = direction_table(direction, mean_rotary(rotary, direction_segments(100)))
    assert torch.equal(few, table[:1])
    # The middle of each row's positions is near the average.
    for row in range(num_rows):
        first = row * interface.DIRECTION_SEGMENT
        place = torch.tensor([first + interface.DIRECTION_SEGMENT // 2])
        flat = direction.flatten()[None]
        _, turned = rotary.float().cpu().forward_native(place, flat, flat.clone())
        expected = reference.rotate(turned.view(KV_HEADS, HEAD_SIZE).float())
        cosine = torch.cosine_similarity(table[row].float(), expected, dim=-1)
        assert cosine.min() > 0.8, (row, cosine)
    places = torch.tensor([0, 511, 512, 1023, 1024, 1 << 20])
    assert direction_rows(places, table).tolist() == [0, 0, 1, 1, 2, 2]
    assert not direction_table(torch.zeros_like(direction), None).any()
    assert direction_table(direction, None).shape[0] == 1


def test_layers_get_the_directions(config):
    module = make_module(config)
    runner = module.attn.impl.runner
    assert runner.query_direction is None
    assert not runner.source.variant.query_direction
    assert runner.expected_source.variant.query_direction
    set_tables(module)
    expected = direction_table(means_of().direction, None)
    assert torch.equal(runner.query_direction.cpu(), expected)
    assert runner.query_direction is getattr(module.attn, BUFFER)
    assert runner.source == runner.expected_source


def stored_errors(
    name: str, head_size: int, direction: torch.Tensor | None, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Errors of stored keys (rotated), the bytes of V, and keys less their offset."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    num_tokens = 200
    key, value = gaussian(2, num_tokens, 1, head_size, dtype=torch.float32).cpu()
    cache = new_cache(layout, num_tokens // 16 + 1, 1, 16).cpu()
    slots = torch.arange(num_tokens)
    # The second half of the tokens begins behind a segment.
    lens = torch.tensor([num_tokens // 2, 700], dtype=torch.int32)
    starts = torch.tensor([0, num_tokens // 2, num_tokens], dtype=torch.int32)
    own = None if direction is None else QueryDirection(direction, lens, starts)
    reference.store(
        StoreCall(
            cache,
            slots,
            key,
            value,
            layout,
            key_offset=KeyOffset(offset, lens, starts),
            query_direction=own,
        )
    )
    found, stored = reference.load(cache, slots, layout)
    plain = reference.rotate(key - offset[0])
    return found * layout.key_codebook.gain - plain, stored, plain


@pytest.mark.parametrize("name", ["turbo4", "k4v3", "turbo3"])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_errors_are_orthogonal_to_the_direction(name, head_size):
    """Each half of the tokens has its own row, and only K changes."""
    rows = torch.nn.functional.normalize(
        gaussian(2, 1, head_size, seed=3, dtype=torch.float32).cpu(), dim=-1
    )
    table = (rows * head_size**0.5).half()
    offset = gaussian(1, 1, head_size, seed=4, dtype=torch.float32).cpu()
    with_it, value, plain = stored_errors(name, head_size, table, offset)
    without, same, _ = stored_errors(name, head_size, None, offset)
    assert torch.equal(value, same)
    halves = torch.arange(200) >= 100
    cosines = []
    for errors in (without, with_it):
        own = torch.nn.functional.normalize(errors[:, 0], dim=-1)
        cosines.append((own * rows[halves.long(), 0]).sum(-1).square().mean().sqrt())
        wrong = (own * rows[1 - halves.long(), 0]).sum(-1).square().mean().sqrt()
        assert wrong > 0.5 * head_size**-0.5
    most = 0.75 if name == "turbo3" else 0.25
    assert cosines[1] < most * cosines[0], cosines
    longer = with_it.norm() / without.norm()
    assert longer < 1.04, longer
    # The error along the key itself stays small.
    along = (with_it * plain).sum(-1) / plain.square().sum(-1)
    assert along.square().mean().sqrt() < 0.012, along.square().mean().sqrt()


def test_a_direction_of_zeros_stands_for_none():
    """Codes move for the key's own sake alone."""
    codebook = TurboFormat.from_cache_dtype("turbo3", 64).key_codebook
    keys = reference.rotate(keys_of(20))
    found, scales = codec.quantize(keys, codebook, torch.zeros(64))
    expected, same = codec.quantize(keys, codebook)
    assert torch.equal(found, expected) and torch.equal(scales, same)
