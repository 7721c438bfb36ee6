# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab's parts agree with independent computations."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import upstream
from attention import STORED, Reading, two_source_attention
from blockcodes import (
    codebook_round_trip,
    random_levels,
    trellis_codebook,
    trellis_round_trip,
    two_codebook_round_trip,
    vector_round_trip,
)
from measure import Comparison, kl_divergence, paired, percentile
from rotations import ROTATIONS, rotation
from scalar import ScaleRule, fitted, gaussian_vectors, relative_error
from turboquant import lloyd_max
from variants import preset, scale_rules

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import KEY_CODEBOOKS, VALUE_CODEBOOKS
from vllm.v1.attention.ops.turbo.reference import codec as reference_codec

LAB = Path(__file__).parent / "lab"
WRITE_MODEL = Path(__file__).resolve().parents[2] / "scripts/turbo_seeded/model.py"
CPU = torch.device("cpu")
# Ends a programme that hangs.
TIMEOUT_S = 1800


@pytest.mark.parametrize("kind", ROTATIONS)
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_rotations_are_orthogonal(kind, head_size):
    matrix = rotation(kind, head_size, CPU)
    identity = torch.eye(head_size)
    assert torch.allclose(matrix @ matrix.T, identity, atol=1e-6)
    assert (matrix == identity).all() == (kind == "none")


def test_rotations_mix_what_they_claim():
    """One coordinate reaches as many coordinates of the rotated vector as it should."""
    widths = {"none": 1, "rotor3": 3, "quaternion4": 4}
    for kind in ROTATIONS:
        reached = (rotation(kind, 128, CPU)[17].abs() > 1e-9).sum().item()
        assert reached == widths.get(kind, 128), kind


def test_the_formats_rotation():
    x = gaussian_vectors(10, 128)
    rotated = x @ rotation("randomised", 128, CPU)
    # The format rounds x to 1/2048 of its largest magnitude first.
    assert torch.allclose(rotated, reference.rotate(x), atol=4e-3)


@pytest.mark.parametrize("bits", [3, 4])
def test_fit_finds_the_papers_levels(bits):
    """With the vector's norm as its scale, the fitted levels are Lloyd and Max's."""
    levels = lloyd_max(bits, 128)[0][1 << bits >> 1 :] * math.sqrt(128)
    quantizer = fitted(bits, ScaleRule(128, "norm32"))
    assert quantizer.magnitudes == pytest.approx(levels.tolist(), rel=0.03)
    x = gaussian_vectors(500, 128, seed=3)
    error = relative_error(quantizer.round_trip(x), x)
    assert error == pytest.approx(lloyd_max(bits, 128)[1], rel=0.02)


def test_fit_is_as_good_as_four_bits_of_the_format():
    """The format's levels, which are constrained, lose little to free ones."""
    x = gaussian_vectors(500, 128, seed=4)
    free = relative_error(fitted(4, ScaleRule(16, "delta")).round_trip(x), x)
    for codebook in (KEY_CODEBOOKS[4], VALUE_CODEBOOKS[4]):
        error = relative_error(codebook_round_trip(x, codebook), x)
        assert 0.98 * free < error < 1.03 * free


def test_three_bits_of_the_format_beat_scalar_codes():
    """Their error is 15 % below the best scalar code's; free levels win little more."""
    x = gaussian_vectors(500, 128, seed=4)
    rules = [rule for rule in scale_rules(128).values() if rule.num_bytes(128) <= 4]
    scalar = min(relative_error(fitted(3, r).round_trip(x), x) for r in rules)
    free = relative_error(codebook_round_trip(x, trellis_codebook(3)), x)
    # Two half-precision instructions compute a value's level, which costs some error.
    for codebook, limit in ((KEY_CODEBOOKS[3], 1.03), (VALUE_CODEBOOKS[3], 1.04)):
        error = relative_error(codebook_round_trip(x, codebook), x)
        assert error < 0.85 * scalar
        assert 0.98 * free < error < limit * free


def test_wider_trellis_is_better_than_scalar_codes():
    """The format has no trellis of 32 levels, because it is slower to decode."""
    x = gaussian_vectors(500, 128, seed=4)
    codebook = trellis_codebook(4)
    assert len(codebook.levels) == 32
    error = relative_error(codebook_round_trip(x, codebook), x)
    format_error = relative_error(codebook_round_trip(x, VALUE_CODEBOOKS[4]), x)
    assert error < 0.9 * format_error


def test_steps_below_a_shared_scale():
    """Each group has one of the eight E5M3 numbers that end at the largest."""
    quantizer = fitted(4, ScaleRule(16, "delta"))
    x = gaussian_vectors(200, 128, seed=5)
    x[:, :16] *= 50
    scales = quantizer.scales(x.unflatten(-1, (-1, 16)).abs())
    codes = reference_codec.scale_floor(scales)
    assert torch.equal(reference_codec.scale_values(codes.to(torch.uint8)), scales)
    assert (codes.amax(-2) - codes.amin(-2)).max() == 7
    assert (codes.argmax(-2) == 0).all()


def test_trellis_finds_the_best_path():
    """Viterbi's path is the best of all, where all can be counted."""
    bits, length, levels = 2, 4, random_levels(4)
    y = gaussian_vectors(50, length, seed=6)
    decoded = trellis_round_trip(y, bits, levels)
    paths = torch.cartesian_prod(
        torch.arange(16), *[torch.arange(1 << bits)] * (length - 1)
    )
    states = [paths[:, 0]]
    for shifted_in in paths[:, 1:].unbind(-1):
        states.append((states[-1] << bits | shifted_in) & 15)
    scale = y.square().mean(-1, keepdim=True).sqrt().half().float()
    codewords = levels[torch.stack(states, -1)] * (1 - 1 / 16) ** 0.5
    best = (codewords * scale[:, None] - y[:, None]).square().sum(-1).amin(-1)
    assert torch.allclose((decoded - y).square().sum(-1), best, rtol=1e-4)


def test_codes_of_more_freedom_have_less_error():
    """Points in the plane hold the scalar grid, and two codebooks hold one."""
    x = gaussian_vectors(300, 128, seed=7)
    scalar = relative_error(fitted(3, ScaleRule(32)).round_trip(x), x)
    assert relative_error(vector_round_trip(x, 3, 2), x) < 0.97 * scalar
    assert relative_error(two_codebook_round_trip(x, 3), x) < 1.01 * scalar


def test_bytes_of_scales():
    sizes = [rule.num_bytes(128) for rule in scale_rules(128).values()]
    assert sizes == [4, 2, 4, 2, 4, 8, 4]
    assert [preset(name, 128).num_bytes for name in ("turbo4", "turbo3")] == [136, 104]


def test_upstream_is_vllms_kernels(tmp_path):
    """The values are those of vLLM's store and dequantisation.

    V is the same to the last bit, and K up to the order of a norm's summation.
    """
    key = gaussian_vectors(40, 128, seed=5).view(20, 2, 128)
    value = gaussian_vectors(40, 128, seed=6).view(20, 2, 128)
    key[3] *= 100
    key[4] = value[4] = 0
    value[5] = 2.5
    key[6, :, 10] = 40
    # In the interpreter a cast to fp8 does not carry into the exponent, so that keys
    # must need no rounding.
    key = key.to(torch.float8_e4m3fn).float()
    torch.save([key, value], tmp_path / "vectors.pt")
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
    program = str(LAB / "upstream_kernels.py")
    command = [sys.executable, program, "vectors.pt", "read.pt"]
    subprocess.run(
        command, env=environment, cwd=tmp_path, check=True, timeout=TIMEOUT_S
    )
    read = torch.load(tmp_path / "read.pt")
    assert set(read) == set(upstream.PRESETS)
    for name, (read_key, read_value) in read.items():
        if not upstream.config(name, 128).key_fp8:
            matrix = upstream.tables(name, 128, CPU)[0]
            read_key = read_key.float() @ matrix
        mine = upstream.key_round_trip(key, name)
        scale = mine.abs().amax(-1, keepdim=True).clamp(min=1e-6)
        assert ((read_key.float() - mine).abs() <= 2e-3 * scale).all(), name
        assert torch.equal(read_value, upstream.value_round_trip(value, name).half())


def naive_attention(query, raw, stored, reading, scale, sliding_window, sinks):
    """Attention, one query and head at a time."""
    output = torch.empty_like(query)
    batch, num_heads, length, _ = query.shape
    group = num_heads // raw[0].shape[1]
    for b in range(batch):
        for head in range(num_heads):
            for i in range(length):
                seen = [x[b, head // group, : i + 1].clone() for x in stored]
                if i < reading.prompt and reading.chunk:
                    first = i - i % reading.chunk
                    for mine, exact in zip(seen, raw):
                        mine[first:] = exact[b, head // group, first : i + 1]
                newest = max(i + 1 - reading.window, 0)
                for mine, exact in zip(seen, raw):
                    mine[newest:] = exact[b, head // group, newest : i + 1]
                seen = [x[-(sliding_window or 0) :] for x in seen]
                scores = seen[0] @ query[b, head, i] * scale
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                weights = torch.softmax(scores, -1)[: len(seen[1])]
                output[b, head, i] = weights @ seen[1]
    return output


@pytest.mark.parametrize(
    "reading",
    [
        *(STORED, Reading(40, 40), Reading(20, 8), Reading(40, 1), Reading(40, 16)),
        *(Reading(window=1), Reading(window=15), Reading(20, 8, window=3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("sliding_window, has_sinks", [(None, False), (11, True)])
def test_two_source_attention(reading, sliding_window, has_sinks, monkeypatch):
    """Chunks may be longer or shorter than the blocks of queries."""
    monkeypatch.setattr("attention.QUERY_BLOCK", 12)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 40, 16, generator=generator)
    raw = torch.randn(2, 2, 2, 40, 16, generator=generator)
    stored = raw + 0.5 * torch.randn(raw.shape, generator=generator)
    raw, stored = tuple(raw), tuple(stored)
    sinks = torch.randn(4, generator=generator) if has_sinks else None
    given = (query, raw, stored, reading, 0.25, sliding_window, sinks)
    expected, result = naive_attention(*given), two_source_attention(*given)
    assert torch.allclose(result, expected, atol=1e-5)


def test_kl_divergence():
    exact = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log()
    expected = 0.25 * math.log(2)
    assert kl_divergence(exact, other).tolist() == pytest.approx([expected, 0])


def test_figures_of_a_comparison():
    """Two texts of three tokens: in the second the model is sure of another token."""
    sure = torch.tensor([0.98, 0.01, 0.01]).log().expand(2, 3, 3)
    unsure = sure.clone()
    unsure[1] = torch.tensor([0.01, 0.98, 0.01]).log()
    comparison = Comparison()
    comparison.add(sure, unsure, torch.zeros(2, 3, dtype=torch.long))
    figures = comparison.figures(slice(0, None))
    one = 0.97 * math.log(98)
    assert figures["kl"] == pytest.approx(one / 2)
    assert figures["kl_p99"] == pytest.approx(one)
    assert figures["agreement"] == 0.5
    assert figures["perplexity"] == pytest.approx(math.sqrt(98) - 1, rel=1e-4)
    assert percentile(torch.arange(1.0, 101), 0.99) == 99


def test_differences_are_of_the_same_texts():
    """Texts differ by far more than two caches do, which only pairs show."""
    near, far = Comparison(), Comparison()
    near.divergences.append(torch.tensor([[1.0, 9], [5, 9]]))
    far.divergences.append(torch.tensor([[1.5, 9], [5.7, 9]]))
    found = paired(far, near, slice(0, 1))
    assert found["kl"] == pytest.approx(0.6)
    assert found["kl_error"] == pytest.approx(0.1)


def test_choices_on_a_small_model(tmp_path):
    """The whole programme runs on few tokens.

    More bits diverge less, and K and V that are not quantised do not diverge.
    """
    model, output = tmp_path / "model", tmp_path / "output"
    subprocess.run([sys.executable, WRITE_MODEL, model], check=True)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 12)
    command = [sys.executable, LAB / "choices.py", "--model", model, "--text", text]
    command += ["--output", output, "--length", "256", "--chunks", "2", "--batch", "2"]
    command += ["--questions", "Formats", "Prefill", "turbo3 with turbo4 in"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    results = json.loads((output / "choices.json").read_text())
    kl = {(row["question"], row["arm"]): row["all"]["kl"] for row in results["rows"]}
    formats = {name: value for (group, name), value in kl.items() if group == "Formats"}
    assert 0 < formats["bf16"] < formats["fp8"] < formats["turbo4"]
    assert formats["turbo4"] < formats["k4v3"] < formats["turbo3"]
    mixed = {name: value for (group, name), value in kl.items() if "with" in group}
    assert mixed["no layer"] == formats["turbo3"]
    assert mixed["every layer"] == formats["turbo4"]
    prompt = next(
        row["prompt"]["kl"]
        for row in results["rows"]
        if row["arm"] == "turbo4, raw, prompt in chunks of 128"
    )
    # All tokens are raw; only rounding is left.
    assert abs(prompt) < 1e-3 * formats["turbo4"]
    table = (output / "choices.md").read_text()
    assert table.count("\n|") == len(results["rows"]) + 2 * 3
