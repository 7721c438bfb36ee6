# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab of latents rounds MLA's cache as the formats do, and sees faults."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from indexer import LISTED_ATTENTION, DeepseekV32ForCausalLM, attend_to_all
from latent_formats import (
    LatentVariant,
    as_e2m1,
    as_nvfp4,
    as_scaled_fp8,
    in_parts,
    latent_variants,
    rope_variants,
)
from latents import LatentLab, bars, compare_all, join_pairs, split_pairs
from needle_model import needle_config, new_model, save_model
from scalar import gaussian_vectors, relative_error
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave,
)

from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    ref_nvfp4_quant,
)
from vllm.v1.attention.ops.turbo.latent.format import LATENT_SIZES, LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall
from vllm.v1.attention.ops.turbo.reference import inverse_rotate, rotate
from vllm.v1.attention.ops.turbo.reference import latent as reference

LAB = Path(__file__).parent / "lab"
RANK, ROPE = 256, 64
FORMATS = latent_variants(RANK, ROPE)
ALL_FORMATS = FORMATS | rope_variants(RANK, ROPE)
TEXT = b"Line %d says that %d and %d differ.\n"
TIMEOUT_S = 1800


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, sharper than usual, so that attention counts."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = needle_config("deepseek_v3", **shape, initializer_range=0.2)
    model = new_model(config, 0)
    # Channels of a trained model's latents are not alike.
    for layer in model.model.layers:
        gamma = layer.self_attn.kv_a_layernorm.weight
        gamma.data *= torch.randn(RANK, generator=torch.manual_seed(2)).exp()
    save_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def lab(folder: Path) -> LatentLab:
    return LatentLab(folder, "cpu")


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    text = b"".join(TEXT % (i, i, i + 1) for i in range(24))
    return [list(text[:320]), list(text[-320:])]


def vectors(count: int, size: int, seed: int) -> torch.Tensor:
    return gaussian_vectors(count, size, seed).bfloat16().float()


@pytest.mark.parametrize("name", ["turbo4", "turbo3"])
@pytest.mark.parametrize("sizes", LATENT_SIZES.values(), ids=str)
def test_ours_is_what_pages_hold(name: str, sizes: tuple[int, int]):
    """They are the same bit for bit, for tokens that pages store and give back."""
    rank, rope = sizes
    latent = vectors(40, rank, 1)
    k_pe = vectors(40, rope, 2) * 3
    layout = LatentFormat.from_cache_dtype(name, rank + rope)
    pages = torch.full((3, 16, layout.slot_size), 0xFF, dtype=torch.uint8)
    slots = torch.arange(40)
    reference.store(LatentStoreCall(pages, slots, latent, k_pe, layout))
    loaded, loaded_rope = reference.load(pages, slots, layout)
    variant = latent_variants(rank, rope)[name]
    assert torch.equal(variant.latent(latent), inverse_rotate(loaded))
    assert torch.equal(variant.rope(k_pe), loaded_rope)
    assert variant.num_bytes == layout.slot_size


def test_bytes():
    sizes = {name: each.num_bytes for name, each in latent_variants(512, 64).items()}
    assert sizes == {
        "bf16": 1152,
        "fp8": 576,
        "fp8_ds_mla": 656,
        "turbo4": 340,
        "turbo3": 276,
        "nvfp4_ds_mla": 352,
        "nvfp4_ds_mla, rotated": 352,
        "turboquant_4bit_nc, rope in bf16": 386,
    }
    # The same scales and codes at half the rank, beside rotary keys of the same size.
    assert FORMATS["nvfp4_ds_mla"].num_bytes == 64 + (352 - 64) / 2
    made = rope_variants(RANK, ROPE)
    assert made["latent turbo4, rope bf16"].num_bytes == 136 + 128
    assert made["latent turbo4, rope 4 bits, rotated"].num_bytes == 136 + 34


def test_e2m1_has_ties_to_even():
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.equal(as_e2m1(levels), levels)
    ties = (levels[1:] + levels[:-1]) / 2
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(as_e2m1(ties), even)
    assert torch.equal(as_e2m1(-ties), -even)
    assert as_e2m1(torch.tensor([-9.0])).item() == -6


def test_nvfp4_is_vllms():
    """The values are those of vLLM's emulation, without a scale of the tensor.

    The emulation has no smallest scale.
    """
    x = vectors(200, RANK, 3) * torch.logspace(-0.5, 2.9, 200)[:, None]
    codes, scales = ref_nvfp4_quant(x, torch.tensor(1.0), 16)
    assert 2**-6 < scales.min() < 0.1 and 300 < scales.max() < 448
    expected = codes.unflatten(-1, (-1, 16)) * scales[..., None]
    assert torch.equal(as_nvfp4(x), expected.flatten(-2))


def test_the_smallest_scale_of_nvfp4():
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([2.0**-9, 2.0**-12])
    assert torch.equal(as_nvfp4(x)[0, :3], torch.tensor([2.0**-9, 0, 0]))


def test_fp8_has_a_scale_a_group():
    x = vectors(50, RANK, 4)
    x[:, 128:] *= 1000
    error = (as_scaled_fp8(x) - x).square().unflatten(-1, (2, -1)).sum((0, 2))
    size = x.square().unflatten(-1, (2, -1)).sum((0, 2))
    assert (error / size < 1e-3).all()
    # A scale of one holds neither large nor small numbers so well.
    assert relative_error(FORMATS["fp8"].latent(x), x) > 0.1


def test_rotated_nvfp4_is_for_channels_that_are_not_alike():
    alike = vectors(400, RANK, 5)
    unlike = alike * torch.randn(RANK, generator=torch.manual_seed(6)).mul(1.5).exp()
    plain, rotated, turbo4 = (
        [relative_error(FORMATS[name].latent(x), x) for x in (alike, unlike)]
        for name in ("nvfp4_ds_mla", "nvfp4_ds_mla, rotated", "turbo4")
    )
    assert rotated == pytest.approx([0.0091] * 2, rel=0.05)
    assert plain[0] == pytest.approx(0.0091, rel=0.05)
    # At 256 coordinates turbo4 is within the error that the format is held to.
    assert max(turbo4) < 0.0054
    assert max(turbo4) < 0.62 * min(rotated)


def test_parts_make_the_whole(monkeypatch: pytest.MonkeyPatch):
    x = vectors(70, RANK, 7).view(2, 5, 7, RANK)
    monkeypatch.setattr("latent_formats.VECTORS", 16)
    assert torch.equal(in_parts(x, as_nvfp4), as_nvfp4(x))


def test_pairs_are_joined_as_the_weights_have_them():
    """Where RoPE turns nothing, only transformers' order of coordinates differs."""
    key = torch.arange(2.0 * ROPE).view(1, 1, 2, ROPE)
    cosine, sine = torch.ones(1, 2, ROPE), torch.zeros(1, 2, ROPE)
    _, theirs = apply_rotary_pos_emb_interleave(key, key, cosine, sine)
    assert not torch.equal(theirs, key)
    assert torch.equal(join_pairs(theirs), key)
    assert torch.equal(split_pairs(key), theirs)


class RoundedCache(DynamicCache):
    """Transformers' own cache, which keeps latents and rotary keys of a variant."""

    def __init__(self, variant: LatentVariant) -> None:
        super().__init__()
        self.variant = variant

    def update(self, latent, rope, *args, **kwargs):
        latent = self.variant.latent(latent.bfloat16().float())
        rope = split_pairs(self.variant.rope(join_pairs(rope.bfloat16().float())))
        return super().update(latent, rope, *args, **kwargs)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "name", ["bf16", "turbo4", "latent bf16, rope 4 bits, rotated"]
)
def test_the_lab_rounds_what_is_cached(
    folder: Path, rows: list[list[int]], name: str, layer: int
):
    """Layers are compared alone: the input of a second one depends on sums' order."""
    lab = LatentLab(folder, "cpu")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for each in (lab.model, model):
        each.model.layers = each.model.layers[layer : layer + 1]
        each.model.layers[0].self_attn.layer_idx = 0
    tokens = torch.tensor(rows)
    with torch.inference_mode():
        output = model(tokens, past_key_values=RoundedCache(ALL_FORMATS[name]))
    expected = torch.log_softmax(output.logits, -1)
    found = lab.log_probs(tokens, ALL_FORMATS[name])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_sparse_model_attends_to_listed_tokens(
    tmp_path: Path, rows: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "index_topk": 32}
    config = needle_config("deepseek_v32", **shape, initializer_range=0.2)
    save_model(new_model(config, 0), tmp_path)
    lab = LatentLab(tmp_path, "cpu")
    monkeypatch.setattr(lab, "_store", lambda part, x: x)
    model = DeepseekV32ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation=LISTED_ATTENTION
    )
    tokens = torch.tensor(rows)
    with torch.inference_mode():
        output = model(tokens, use_cache=False)
    expected = torch.log_softmax(output.logits, -1)
    found = lab.log_probs(tokens, FORMATS["bf16"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    attend_to_all(lab.model)
    dense = lab.log_probs(tokens, FORMATS["bf16"])
    assert (dense - expected).abs().max() > 0.1


@pytest.fixture(scope="module")
def figures(lab: LatentLab, rows: list[list[int]]) -> dict[str, float]:
    found = compare_all(lab, rows, ALL_FORMATS.values(), slice(64, None))
    return {name: figures["kl"] for name, figures in found.items()}


def test_formats_are_told_apart(figures: dict[str, float]):
    assert figures["bf16"] == 0
    kl = [figures[name] for name in ("bf16", "fp8", "turbo4", "turbo3")]
    assert kl == sorted(kl)
    others = ["nvfp4_ds_mla", "nvfp4_ds_mla, rotated"]
    assert figures["turbo4"] < min(figures[name] for name in others)
    assert len({figures[name] for name in FORMATS}) == len(FORMATS)


def test_rotary_keys_are_rounded_too(figures: dict[str, float]):
    """Beside exact latents int8 loses least, and 4 bits most."""
    exact = [figures[f"latent bf16, rope {x}"] for x in ("int8", "E4M3")]
    exact.append(figures["latent bf16, rope 4 bits, rotated"])
    assert 0 < exact[0] < 0.2 * exact[1] and exact[1] < exact[2]


def swapped(x: torch.Tensor) -> torch.Tensor:
    """Give each token its neighbour's vector."""
    return x.roll(1, -2)


def without_a_group(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(x[..., :16]), x[..., 16:]], -1)


FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "not rotated back": ("latent", rotate),
    "another token's latent": ("latent", swapped),
    "a group of the latent lost": ("latent", without_a_group),
    "another token's rotary key": ("rope", swapped),
    "a group of the rotary key lost": ("rope", without_a_group),
    "pairs in another order": ("rope", join_pairs),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    lab: LatentLab, rows: list[list[int]], figures: dict[str, float], fault: str
):
    part, damage = FAULTS[fault]
    right = getattr(FORMATS["turbo4"], part)
    changes = {part: lambda x: damage(right(x))}
    wrong = replace(FORMATS["turbo4"], name=fault, **changes)
    found = compare_all(lab, rows, [wrong], slice(64, None))[fault]["kl"]
    assert found > 1.2 * figures["turbo4"]


def test_bars_are_held_to_the_better_of_two():
    def row(name: str, kl: float, needle: float) -> dict:
        part = {"kl": kl, "kl_texts": [kl, kl]}
        tasks = {"needle": {"score": needle}}
        return {"cache": name, "text": part, "rivals": part, "tasks": tasks}

    rows = [row("bf16", 0, 0.9), row("turbo4", 6, 0.8), row("nvfp4_ds_mla", 10, 0.9)]
    assert bars(rows) == []
    found = bars([*rows, row("nvfp4_ds_mla, rotated", 8, 0.9)])
    assert [bar["ratio"] for bar in found] == pytest.approx([0.75, 0.75, 0.1 / 0.9])
    assert not any(bar["held"] for bar in found)
    assert "over nvfp4_ds_mla, rotated" in found[0]["bar"]
    rows[1] = row("turbo4", 5, 0.9)
    assert all(bar["held"] for bar in bars([*rows, row("nvfp4_ds_mla, rotated", 8, 1)]))


def test_the_programme(folder: Path, tmp_path: Path):
    names = ["turbo4", "nvfp4_ds_mla", "nvfp4_ds_mla, rotated"]
    command = [sys.executable, LAB / "latents.py", "--model", folder, "--quick"]
    command += ["--texts", "2", "--context", "256", "--rivals", "1", "--caches", *names]
    command += ["--output", tmp_path]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    results = json.loads((tmp_path / "latents.json").read_text())
    assert [row["cache"] for row in results["rows"]] == ["bf16", *names]
    exact, turbo4, *_ = results["rows"]
    assert exact["text"]["kl"] == 0 < turbo4["text"]["kl"]
    assert exact["rivals"]["kl"] == 0 < turbo4["rivals"]["kl"]
    assert exact["errors"] == {"latent": 0, "rope": 0}
    assert 0.004 < turbo4["errors"]["latent"] < 0.0054
    assert turbo4["errors"]["rope"] < 1e-4
    assert turbo4["bytes"] == 204 and turbo4["tasks"]["needle"]["cases"] == 3
    assert len(results["bars"]) == 3
    text = (tmp_path / "latents.md").read_text()
    assert text.count("\n|") == 2 + len(results["rows"]) + 2 + len(results["bars"])
