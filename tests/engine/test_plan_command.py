# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""scripts/plan.py: its arguments, its report, and its errors."""

import argparse
import json
import os
import subprocess
from pathlib import Path

import pytest
from harness import ROOT, SCRIPTS, run_python
from plan import build_parser as plan_parser
from test_plan import TOKENS
from turbo_plan.cure import smallest_parallel
from turbo_plan.gpus import GIB, GPUS, parse_gpu
from turbo_plan.report import refusals, table, user_counts


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
    return run_python(SCRIPTS / "plan.py", *args, env=os.environ | variables)


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
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = run_python("-S", SCRIPTS / script, "--help", env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{script}: this Python has no vLLM with the series applied: run "
        "scripts/apply.sh, or activate the environment that has it "
        "(. .venv/bin/activate)\n"
    )
