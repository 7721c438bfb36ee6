# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""benchmarks/turbo_models.py: configurations, profiles, and turns of the arms."""

import gzip
import json
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import follow_ups
import pytest
import trees
import turbo_models
from model_config import cut_layers, with_awq
from turbo_engine import started, turn
from turbo_models import attention_row, covered, is_attention, kernels_of, parse_args

CONFIGS = trees.ROOT / "benchmarks" / "configs"
PER_LAYER = {
    "gemma-3-27b": {"layer_types"},
    "gpt-oss-20b": {"layer_types"},
    "gpt-oss-120b": {"layer_types"},
    "llama-4-scout": {"layer_types", "no_rope_layers"},
    "nemotron-3-nano-30b": {"hybrid_override_pattern"},
    "qwen3.6-35b-a3b": {"layer_types"},
}


@pytest.mark.parametrize("name", PER_LAYER)
def test_first_layers(name: str) -> None:
    config = json.loads((CONFIGS / name / "config.json").read_text())
    cut = cut_layers(config, 8)
    assert cut["num_hidden_layers"] == 8
    for key in PER_LAYER[name]:
        assert cut[key] == config[key][:8]
        assert len(config[key]) == config["num_hidden_layers"]
    same = set(config) - {"num_hidden_layers", *PER_LAYER[name]}
    assert all(cut[key] == config[key] for key in same)
    assert cut_layers(config, None) == config
    with pytest.raises(ValueError, match="1000 layers of a model of"):
        cut_layers(config, 1000)


@pytest.mark.parametrize(
    "name, group", [("qwen3.6-35b-a3b", 128), ("nemotron-3-nano-30b", 64)]
)
def test_awq_has_groups_that_fit(name: str, group: int) -> None:
    """An expert of Nemotron has 1856 channels, 14.5 groups of 128."""
    config = json.loads((CONFIGS / name / "config.json").read_text())
    quantised = with_awq(config)
    written = quantised.pop("quantization_config")
    assert quantised == config
    assert written["quant_method"] == "awq" and written["bits"] == 4
    assert written["group_size"] == group
    # vLLM would look for weights.
    assert written["modules_to_not_convert"]
    with pytest.raises(ValueError, match="quantised already: awq"):
        with_awq(config | {"quantization_config": written})
    with pytest.raises(ValueError, match="no groups that divide .*2000"):
        with_awq(config | {"hidden_size": 2000})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--parts", "prefix", "decode"], "measure --parts prefix alone"),
        (["--layers", "63"], "63 layers of a model of 62"),
        (["--shapes"], "one of them at least"),
    ],
)
def test_what_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["turbo_models.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        parse_args()
    assert message in capsys.readouterr().err


def test_shapes_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def shapes(*arguments: str) -> tuple:
        monkeypatch.setattr(sys, "argv", ["turbo_models.py", *arguments])
        return tuple(parse_args().shapes)

    assert shapes() == shapes("--parts", "decode") == turbo_models.SHAPES
    assert shapes("--parts", "prefix") == follow_ups.SHAPES
    assert shapes("--parts", "prefix", "--shapes", "1x9") == ((1, 9),)


def test_covered_time() -> None:
    assert covered([]) == 0
    # A span within another, one that overlaps, and one apart.
    assert covered([(20, 30), (0, 10), (2, 4), (8, 12)]) == 22


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("void turbo::(anonymous)::decode_kernel<4>(turbo::AttentionParams)", True),
        ("_store_kernel", True),
        ("decode_kernel", True),
        ("merge_kernel", True),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", True),
        ("void vllm::reshape_and_cache_flash_kernel<...>", True),
        ("kernel_unified_attention", True),
        ("decode_latent_kernel", True),
        ("void turbo::latent_decode_kernel<...>(turbo::LatentParams)", True),
        ("void vllm::concat_and_cache_mla_kernel<...>", True),
        ("fused_recurrent_gated_delta_rule_packed_decode_kernel", False),
        ("_causal_conv1d_update_kernel", False),
        ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", False),
        ("fused_moe_kernel", False),
    ],
)
def test_kernels_of_attention(name: str, wanted: bool) -> None:
    assert is_attention(name) == wanted


def test_profile(tmp_path: Path) -> None:
    def kernel(name: str, ts: float, dur: float) -> dict:
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur}

    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy", "ts": 0, "dur": 100},
        kernel("_store_kernel", 0, 10),
        kernel("void turbo::decode_kernel<1>", 6, 24),
        kernel("gemm", 30, 50),
        kernel("_store_kernel", 80, 10),
    ]
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    row = attention_row([], kernels_of(trace), steps=2)
    assert row["attention_us"] == 20
    assert row["kernels_us"] == 45
    assert row["by_kernel_us"] == {
        "_store_kernel": 10,
        "void turbo::decode_kernel<1>": 12,
        "gemm": 25,
    }


def test_the_first_step_does_not_count() -> None:
    """Neither its own kernels count nor its share of those that all steps run."""
    first = [("fill", 0.0, 50.0), ("_store_kernel", 50.0, 54.0)]
    whole = first + [("_store_kernel", 100.0 + i, 102.0 + i) for i in (0, 10)]
    row = attention_row(first, whole, steps=2)
    assert row["attention_us"] == row["kernels_us"] == 2
    assert row["by_kernel_us"] == {"_store_kernel": 2, "fill": 0}


def test_arms_measure_in_turn(tmp_path: Path) -> None:
    """No arm measures before all have started, and one measures at a time."""
    args = Namespace(together=tmp_path, arms=["auto", "turbo4:window"])
    measuring = threading.Semaphore(0)
    seen: list[str] = []

    def measure(arm: str) -> None:
        with turn(args, arm):
            seen.append(arm)
            measuring.release()

    threads = [threading.Thread(target=measure, args=[arm]) for arm in args.arms]
    threads[0].start()
    while not started(args, "auto").exists():
        time.sleep(0.01)
    assert not measuring.acquire(timeout=0.3)
    assert not started(args, "turbo4:window").exists()
    with turn(Namespace(together=tmp_path, arms=["auto"]), "auto"):
        threads[1].start()
        assert not measuring.acquire(timeout=0.3)
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(args.arms)


def test_arms_wait_while_they_are_held(tmp_path: Path) -> None:
    args = Namespace(together=tmp_path, arms=["auto"])
    hold = tmp_path / "hold"
    hold.touch()
    measured = threading.Event()

    def measure() -> None:
        with turn(args, "auto"):
            measured.set()

    thread = threading.Thread(target=measure)
    thread.start()
    assert not measured.wait(timeout=0.3)
    hold.unlink()
    thread.join()
    assert measured.is_set()


def test_an_arm_alone_waits_for_none() -> None:
    with turn(Namespace(together=None, arms=["auto", "fp8"]), "auto"):
        pass
