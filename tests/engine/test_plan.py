# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""scripts/plan.py, held to the memory and the times of engines on an H200."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SCRIPTS
from plan import build_parser as plan_parser
from turbo_plan.cure import smallest_parallel
from turbo_plan.estimate import Experts, LayerCache, Model, Weights
from turbo_plan.gpus import (
    ATTENTION,
    GIB,
    GPUS,
    LATENT_US,
    WEIGHTS,
    latent_seconds,
    parse_gpu,
)
from turbo_plan.report import refusals, table, user_counts

RESULTS = ROOT / "benchmarks/results/h200"
# The longest context of a file's engines, unless their commands say another one.
LONGEST = {"engine": 65536, "engine_window": 65536, "models": 32768}
STEPS = 64
# Relative errors of the capacity, and of times that are mostly weights and attention.
TOKENS, TPOT = 0.001, 0.12
H200 = GPUS["H200"]


@dataclass
class Run:
    """The settings of an engine, and its measurements.

    Attributes:
        model: The configuration's name.
        arm: The benchmark's arm.
        layers: The number of first layers, if not all.
        context: `max_model_len`.
        prefix_caching: Whether there was a prefix cache.
        utilization: `gpu_memory_utilization`.
        cache_bytes: Bytes of the cache, if they were given.
        tokens: Tokens that the cache held.
        tpots: Milliseconds per output token, by shape.

    """

    model: str
    arm: str
    layers: int | None
    context: int
    prefix_caching: bool
    utilization: float
    cache_bytes: int | None
    tokens: int
    tpots: dict[str, float] = field(default_factory=dict)


def runs_of(name: str) -> list[Run]:
    """The runs of a file that measured decode steps, the last of each kind."""
    found: dict[tuple, Run] = {}
    for line in (RESULTS / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        words = shlex.split(row["command"])
        kind = row["arm"], row.get("model"), row.get("layers")
        if row["arm"].partition(":")[0] not in ATTENTION or "--throughput" in words:
            continue
        if row.get("part") == "startup":
            after = (
                words.index("--kv-cache-memory-bytes") + 1 if "models" in name else 0
            )
            size = row.get("kv_cache_memory_bytes") or (after and int(words[after]))
            longest = 30720 if "16x30720" in words else LONGEST[name]
            found[kind] = Run(
                row.get("model", "llama-8b"),
                row["arm"],
                row.get("layers"),
                longest + STEPS + 1,
                name != "models",
                row["gpu_memory_utilization"],
                size or None,
                row["kv_cache_tokens"],
            )
        elif row.get("part") == "decode":
            found[kind].tpots[row["shape"]] = row["tpot_ms"]
    return list(found.values())


RUNS = [run for name in LONGEST for run in runs_of(name)]


@pytest.fixture(scope="module")
def planned() -> list[dict[str, Any]]:
    child = Path(__file__).with_name("plan_child.py")
    runs = json.dumps([asdict(run) for run in RUNS])
    result = subprocess.run(
        [sys.executable, child],
        input=runs,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_rows_are_of_every_kind():
    assert {run.model for run in RUNS} > {"llama-8b", "qwen3.6-35b-a3b", "gemma-4-31b"}
    assert {run.arm for run in RUNS} == {*ATTENTION, "turbo4:window"}
    assert sum(run.model == "llama-8b" for run in RUNS) == 8


def test_as_many_tokens_fit(planned: list[dict[str, Any]]):
    """Models have states and windows, and the cache's bytes are estimated or given."""
    wrong = {
        (run.model, run.layers, run.arm): (row, run.tokens)
        for run, row in zip(RUNS, planned, strict=True)
        if row.get("tokens") != pytest.approx(run.tokens, rel=TOKENS)
    }
    assert not wrong


def test_steps_take_as_long(planned: list[dict[str, Any]]):
    """The model had all its weights and layers, and was alone on its GPU."""
    wrong, compared = {}, 0
    for run, row in zip(RUNS, planned, strict=True):
        if run.model == "llama-8b":
            for shape, tpot in run.tpots.items():
                compared += 1
                if row["tpots"][shape] != pytest.approx(tpot, rel=TPOT):
                    wrong[run.arm, shape] = (row["tpots"][shape], tpot)
    assert compared == 50 and not wrong


def test_dtypes_rank_as_measured_with_latents(planned: list[dict[str, Any]]):
    """The rows are of 24 layers with MLA, where attention was most of a step."""
    for shape in ("16x32768", "64x4096"):
        found = {
            run.arm: (row["tpots"][shape], run.tpots[shape])
            for run, row in zip(RUNS, planned, strict=True)
            if run.model == "glm-4.7-flash-dense"
        }
        for column in (0, 1):
            ranked = sorted(found, key=lambda arm: found[arm][column])
            assert ranked == ["fp8", "turbo4", "auto"], shape
        for estimate, measured in found.values():
            assert estimate == pytest.approx(measured, rel=0.2)


def test_weights_that_are_read(planned: list[dict[str, Any]]):
    """A Llama reads all weights but the rows of its embedding. Experts are apart."""
    rows = {run.model: row for run, row in zip(RUNS, planned, strict=True)}
    hidden, inner, kv_size, vocab = 4096, 14336, 1024, 128256
    layer = 2 * hidden * (hidden + kv_size) + 3 * hidden * inner + 2 * hidden
    assert rows["llama-8b"]["dense"] == 2 * (32 * layer + hidden + vocab * hidden)
    assert rows["llama-8b"]["experts"] == []
    experts = {"size": 2 * 256 * 3 * 2048 * 512, "count": 256, "chosen": 8}
    assert rows["qwen3.6-35b-a3b"]["experts"] == [experts] * 8


def test_efficiencies_are_the_measured_ones():
    """They are measured by decode attention alone, without an engine."""
    names = {"bf16" if name == "auto" else name: name for name in ATTENTION}
    shapes = {"32x65536x32x8x128": 0, "32x32768x16x2x256": 1}
    measured = {}
    for line in (RESULTS / "decode.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("part") != "attention" or row["arm"] not in names:
            continue
        if row["shape"] in shapes:
            share = row["gb_per_s"] * 1e9 / H200.bandwidth
            measured[names[row["arm"]], shapes[row["shape"]]] = share
    assert len(measured) == 2 * len(ATTENTION)
    for (name, index), share in measured.items():
        assert ATTENTION[name][index] == pytest.approx(share, abs=0.001), name


def test_what_a_step_reads():
    experts = Experts(size=800, count=8, chosen=2)
    assert experts.read(1) == 200
    assert experts.read(2) == 350
    assert experts.read(100) == pytest.approx(800)
    full, window = LayerCache(token=4, head_size=128), LayerCache(4, 0, 16, 128)
    state = LayerCache(state=1000)
    model = Model(Weights(size=1, dense=0, layers=0), [full, window, state])
    assert model.token_bytes == 4
    assert model.state_bytes == 1000
    assert model.user_bytes(100) == 4 * 100 + 4 * 16 + 1000
    assert model.user_bytes(10) == 2 * 4 * 10 + 1000

    def tpot(cache: LayerCache, dtype: str, context: int) -> float:
        alone = Model(Weights(size=1, dense=0, layers=0), [cache])
        return alone.tpot(H200, dtype, 1, context)

    fixed = tpot(full, "turbo4", 0)
    read = tpot(full, "turbo4", 10**6) - fixed
    assert read == pytest.approx(4e6 / ATTENTION["turbo4"][0] / H200.bandwidth)
    assert tpot(window, "turbo4", 10**6) == tpot(window, "turbo4", 16)
    twice = LayerCache(token=4, head_size=128, readings=2)
    assert tpot(twice, "turbo4", 10**6) - fixed == pytest.approx(2 * read)
    own = LayerCache(token=4, head_size=128, dtype="auto")
    assert tpot(own, "turbo4", 10**6) == tpot(full, "auto", 10**6)
    # A state is read and written, whatever the context.
    of_state = 2 * 1000 / WEIGHTS / H200.bandwidth
    assert tpot(state, "turbo4", 10**6) == pytest.approx(fixed + of_state, rel=1e-9)
    weights = Model(Weights(size=1, dense=900, layers=2, experts=[experts]), [])
    one, two = (weights.tpot(H200, "auto", users, 1) for users in (1, 2))
    assert two - one == pytest.approx(150 / WEIGHTS / H200.bandwidth + 9e-6)
    assert one == pytest.approx(1100 / WEIGHTS / H200.bandwidth + 2 * 42e-6 + 9e-6)


def test_times_of_latents_are_the_measured_ones():
    """They are measured by attention to MLA's latents alone, without an engine."""
    arms = {"bf16": "auto", "fp8": "fp8", "turbo4": "turbo4"}
    measured: dict[str, dict[int, float]] = {name: {} for name in arms.values()}
    for line in (RESULTS / "mla.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("part") != "attention" or row["arm"] not in arms:
            continue
        sequences, context, heads, queries = map(int, row["shape"].split("x"))
        if (sequences, context, queries) == (32, 32768, 1):
            measured[arms[row["arm"]]][heads] = row["median_us"]
    for dtype, times in LATENT_US.items():
        assert times == pytest.approx(measured[dtype], abs=0.06), dtype


# Microseconds of `ci/gpu.py mla`'s benchmark on an H100 80GB: 32 x 32768 tokens.
H100_LATENTS = {
    ("auto", 16): 418, ("fp8", 16): 230, ("turbo4", 16): 201,
    ("auto", 64): 432, ("fp8", 64): 240, ("turbo4", 64): 382,
}  # fmt: skip


@pytest.mark.parametrize(("arm", "measured"), H100_LATENTS.items())
def test_latents_on_another_hopper(arm: tuple[str, int], measured: float):
    """Its bandwidth is 0.7 of an H200's, and its arithmetic the same."""
    token = {"auto": 1152, "fp8": 576, "turbo4": 340}[arm[0]]
    seconds = latent_seconds(GPUS["H100"], *arm, token)
    assert seconds is not None
    assert 1e6 * 32 * 32768 * seconds == pytest.approx(measured, rel=0.1)


def test_what_was_not_measured_of_latents_has_no_time():
    assert latent_seconds(H200, "turbo3", 16, 276) is None
    assert latent_seconds(GPUS["A100"], "turbo4", 16, 340) is None
    assert latent_seconds(H200, "turbo4", 256, 340) is None
    latent = LayerCache(token=340, head_size=576, queries=16, is_latent=True)
    narrow = LayerCache(token=204, head_size=320, queries=16, is_latent=True)
    times = [
        Model(Weights(1, 0, 0), [cache]).tpot(H200, "turbo4", 32, 32768)
        for cache in (latent, narrow)
    ]
    assert times[1] is None
    assert times[0] == pytest.approx(202.3e-6 + 32 * 9e-6)


def test_gpus_by_number():
    gpu = parse_gpu("24:936.5:8.6")
    assert gpu.device.memory == 24 * GIB and gpu.bandwidth == 936.5e9
    assert gpu.device.capability == (8, 6) and not gpu.is_measured
    assert parse_gpu("141:4800").device.capability == (8, 0)
    for wrong in ("RTX-9999", "24", "24:0", "0:936", "24:936:8", "-1:936"):
        said = f"'{wrong}' is not in the list: H200, .*24:936:8.6"
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            parse_gpu(wrong)


@pytest.mark.parametrize(
    ("text", "name"),
    [("RTX-3090", "RTX-3090"), ("RTX 4090", "RTX-4090"), ("h200", "H200"),
     ("NVIDIA H200", "H200"), ("nvidia-rtx 5090", "RTX-5090"),
     ("a100 40gb", "A100-40GB"), ("NVIDIA A100", "A100"), ("NVIDIA RTX A6000", "A6000"),
     ("NVIDIA RTX PRO 6000 Blackwell", "RTX-PRO-6000")],
)  # fmt: skip
def test_gpus_by_name(text: str, name: str):
    """In any case, with spaces or hyphens, and as a plan's first line has them."""
    assert parse_gpu(text) is GPUS[name]


def test_the_fewest_gpus_that_fit():
    assert smallest_parallel(100, 60, heads=32, at_least=1) == 2
    assert smallest_parallel(100, 30, heads=32, at_least=1) == 4
    # The number of GPUs has to divide the heads.
    assert smallest_parallel(100, 30, heads=6, at_least=1) == 0
    assert smallest_parallel(100, 0.1, heads=64, at_least=1) == 0


def test_reasons_are_below_the_table():
    said = (
        "Reasons: {FLASH_ATTN: [kv_cache_dtype not supported], TURBO_MLA: [k4v3 of "
        "MLA], TURBOQUANT: [use_mla]}"
    )
    no_backend = "x. Reasons: {FLASH_ATTN: [kv_cache_dtype not supported]}"
    rows = [
        {"kv_cache_dtype": "k4v3", "refused": said},
        {"kv_cache_dtype": "turbo3", "refused": "too long"},
        {"kv_cache_dtype": "turbo4", "refused": "too long"},
        {"kv_cache_dtype": "nvfp4", "refused": no_backend},
        {"kv_cache_dtype": "auto", "weights_bytes": 0, "kv_cache_bytes": 0,
         "bytes_per_token": 4, "bytes_per_user": 2**20, "state_bytes_per_user": 0,
         "tokens": 1, "users": 1, "fits": True, "tpot_ms": None},
    ]  # fmt: skip
    below = [
        "k4v3: TURBO_MLA: k4v3 of MLA",
        "turbo3, turbo4: too long",
        "nvfp4: no attention backend on this GPU has this dtype",
        "Served instead: --kv-cache-dtype auto",
    ]
    assert refusals(rows) == below
    about = {"model": "m", "gpus": 1, "gpu": "g", "users": 1, "context": 1, "cure": ""}
    lines = table(about | {"rows": rows, "notes": []}).splitlines()
    assert [line.split() for line in lines[4:6]] == [
        ["k4v3", "refused"], ["turbo3", "refused"],
    ]  # fmt: skip
    assert lines[8].split() == ["auto", "4", "1.0", "1", "1", "-"]
    assert lines[-4:] == below


def test_what_does_not_fit_has_no_size_and_no_time():
    row = {
        "kv_cache_dtype": "auto", "weights_bytes": 30 * GIB,
        "kv_cache_bytes": int(-18.8 * GIB), "bytes_per_token": 4,
        "bytes_per_user": 2**20, "state_bytes_per_user": 0, "tokens": 0, "users": 0,
        "fits": False, "tpot_ms": None,
    }  # fmt: skip
    about = {"model": "m", "gpus": 1, "gpu": "g", "users": 9, "context": 1, "notes": []}
    said = table(about | {"rows": [row], "cure": "The weights do not fit."})
    assert "30.0 GiB of weights, nothing for the cache (18.8 GiB short)\n" in said
    assert said.splitlines()[-1].split() == ["auto", "4", "1.0", "0", "0", "-"]
    row |= {"kv_cache_bytes": GIB, "tokens": 8, "users": 8}
    said = table(about | {"rows": [row], "cure": ""})
    assert "30.0 GiB of weights, 1.0 for the cache\n" in said
    assert said.splitlines()[-1] == "No time is given where 9 users do not fit: auto."


def test_users_that_are_drawn():
    assert user_counts(0.9) == []
    assert user_counts(1) == [1]
    assert user_counts(9.7) == [1, 2, 4, 8, 9]


def run_plan(*args: str | Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPTS / "plan.py", *args],
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )


def test_a_plan_for_two_gpus(tmp_path: Path):
    """The checkpoint has five layers of two KV heads of 64. Each GPU has one head."""
    model, picture = ROOT / "models/needle-llama", tmp_path / "plan.png"
    args = ["--gpu", "L4", "--tp", "2", "--context", "1024", "--json"]
    done = run_plan(model, *args, "--plot", picture)
    assert (done.returncode, done.stderr) == (0, f"{picture}\n")
    content = json.loads(done.stdout)
    rows = {row["kv_cache_dtype"]: row for row in content["rows"]}
    assert "misreads an NVFP4 KV cache at head_size 64" in rows.pop("nvfp4")["refused"]
    size = (model / "model.safetensors").stat().st_size
    assert rows["auto"]["weights_bytes"] == size // 2
    token = {name: row["bytes_per_token"] for name, row in rows.items()}
    assert token["auto"] == 5 * 2 * 64 * 2 and token["fp8"] == token["auto"] / 2
    packed = (token["turbo4"], token["k4v3"], token["turbo3"])
    assert packed == (5 * 68, 5 * 60, 5 * 52)
    assert {row["bytes_per_user"] // 1024 for row in rows.values()} == set(
        token.values()
    )
    for row in rows.values():
        assert row["users"] == row["tokens"] // 1024 and row["tpot_ms"] > 0
    assert content["is_estimate"] and content["gpus"] == 2
    notes = " ".join(content["notes"])
    assert "nothing was measured on NVIDIA L4" in notes and "GPUs exchange" in notes
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_that_is_too_large_says_what_is_not():
    config = ROOT / "benchmarks/configs/llama-8b"
    args = "--gpu", "12:360:8.6", "--kv-cache-dtype", "turbo4", "--context", "4096"
    done = run_plan(config, *args)
    assert "The weights do not fit: take --tp 2 or weights of 8 bits" in done.stdout


def test_a_server_has_as_many_tokens():
    """An engine of Llama 8B's shape on an H100 80GB had these tokens.

    It had `--gpu-memory-utilization 0.85`, and vLLM's default of requests at once.
    """
    args = "--gpu", "H100", "--gpu-memory-utilization", "0.85", "--json"
    dtypes = "--kv-cache-dtype", "auto", "fp8", "turbo4"
    done = run_plan(ROOT / "benchmarks/configs/llama-8b", *args, *dtypes)
    tokens = [row["tokens"] for row in json.loads(done.stdout)["rows"]]
    assert tokens == pytest.approx([411_552, 823_184, 1_544_768], rel=TOKENS)


def test_what_does_not_go_says_why(tmp_path: Path):
    done = run_plan(ROOT / "models/needle-qwen3", "--context", "9000")
    said = "--context 9000: this model has 8192 tokens at most"
    assert done.returncode == 2 and said in done.stderr
    for missing in (tmp_path / "nothing", ROOT / "models"):
        done = run_plan(missing)
        said = f"no model in {missing}: there is no config.json"
        assert done.returncode == 2 and said in done.stderr


def test_a_context_is_the_models_at_most():
    """Without --context it is 32768 tokens, or the model's own if that is less."""
    args = "--gpu", "4090", "--kv-cache-dtype", "turbo4", "--json"
    done = run_plan(ROOT / "models/needle-qwen3", *args)
    content = json.loads(done.stdout)
    assert content["context"] == 8192 and content["gpu"] == "NVIDIA RTX 4090"
    assert "refused" not in content["rows"][0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"tensor_parallel_size": 2}', "tensor_parallel_size is --tp here"),
        ('{"max_model_len": 2}', "max_model_len is --context here"),
        ('{"quantization": "fp8"}', "of a quantised checkpoint's config.json"),
        ('{"pipeline_parallel_size": 2}', "is not planned: a plan is for one group"),
        ("[1]", "no JSON object"),
        ("{", "no JSON"),
    ],
)
def test_arguments_that_a_plan_would_ignore(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
):
    """Each is refused: the plan would be of another server."""
    with pytest.raises(SystemExit, match="2"):
        plan_parser().parse_args(["model", "--engine-args", text])
    assert said in capsys.readouterr().err


def test_an_argument_that_vllm_does_not_have():
    model = ROOT / "models/needle-qwen3"
    done = run_plan(model, "--engine-args", '{"foo": 1, "max_num_seqs": 4}')
    assert done.returncode == 2 and "--engine-args: vLLM has no foo" in done.stderr


def test_an_encoder_keeps_no_cache(tmp_path: Path):
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128,
        "vocab_size": 512, "max_position_embeddings": 128, "type_vocab_size": 2,
        "pad_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run_plan(tmp_path, "--kv-cache-dtype", "auto", "turbo4")
    assert done.returncode == 1
    assert "this model keeps no KV cache" in done.stdout
    cells = [line.split() for line in done.stdout.splitlines()]
    assert ["auto", "no", "cache"] in cells and ["turbo4", "refused"] in cells


def test_a_name_that_the_hub_does_not_have():
    done = run_plan("no-such--name", HF_ENDPOINT="http://127.0.0.1:9")
    said = "a folder with its config.json will do"
    assert done.returncode == 2 and said in done.stderr


def test_arguments_are_not_abbreviated():
    done = run_plan(ROOT / "models/needle-llama", "--user", "3")
    assert done.returncode == 2 and "unrecognized arguments: --user" in done.stderr
    said = " ".join(run_plan("--help").stdout.split())
    for default in ("(default: 1).", "(default: 32768, or", "(default: 64)."):
        assert default in said


@pytest.mark.parametrize("script", ["plan.py", "check_model.py"])
@pytest.mark.parametrize("packages", [(), ("torch", "vllm")])
def test_a_python_without_the_series(
    packages: tuple[str, ...], script: str, tmp_path: Path
):
    """One Python has no packages, and one a vLLM without the series."""
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    # Without site-packages, so that the packages above are the only ones.
    command = [sys.executable, "-S", SCRIPTS / script, "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{script}: this Python has no vLLM with the series applied: run "
        "scripts/apply.sh, or activate the environment that has it "
        "(. .venv/bin/activate)\n"
    )
