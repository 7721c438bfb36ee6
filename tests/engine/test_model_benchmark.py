# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""benchmarks/turbo_models.py: a hybrid's prefix hits, a refused arm, AWQ weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

from families import FAMILIES, common_config
from harness import BASE_ARGS, ROOT, child_variables, run_python
from model_config import cut_layers, with_awq
from transformers import AutoConfig

UNIT = 16
CHATS, FIRST, TURNS, ANSWER = 2, 300, (20, 50), 4
# A dtype that the CPU's attention lacks.
REFUSED = "int4_per_token_head"


def test_rows_of_chats(tmp_path: Path) -> None:
    """Hits end where the last prompt did, in whole units: an answer has no state."""
    family = FAMILIES["lfm2"]
    changes = common_config(512) | family.changes
    config = AutoConfig.for_model(family.model_type, **changes).to_dict()
    config["architectures"] = ["Lfm2ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine_args = BASE_ARGS | {"block_size": 128, "enable_chunked_prefill": True}
    for ours in ("enable_prefix_caching", "max_model_len", "disable_log_stats"):
        del engine_args[ours]
    output = tmp_path / "rows.jsonl"
    command = [ROOT / "benchmarks" / "turbo_models.py"]
    command += ["--model", tmp_path, "--parts", "prefix", "--repeats", "1"]
    command += ["--shapes", f"{CHATS}x{FIRST}", "--turns", *map(str, TURNS)]
    command += ["--steps", str(ANSWER), "--prefix-match-unit", str(UNIT)]
    command += ["--arms", REFUSED, "turbo4", "--arm-timeout", "900"]
    command += ["--engine-args", json.dumps(engine_args)]
    command += ["--output", output, "--logs", tmp_path / "logs"]
    variables = child_variables("v1") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    result = run_python(*command, env=os.environ | variables)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert result.returncode == 1, result.stderr

    refused, startup, *turns = rows
    assert refused["arm"] == REFUSED and startup["arm"] == "turbo4"
    assert f"ValueError: --kv-cache-dtype {REFUSED} is not supp" in refused["error"]
    for row in rows:
        assert row["model"] == tmp_path.name and row["of_layers"] == 4
    assert startup["part"] == "startup" and startup["kv_cache_tokens"] > 0
    assert startup["block_size"] == 128 and startup["prefix_match_unit"] == UNIT

    before = FIRST
    for tokens, row in zip(TURNS, turns, strict=True):
        assert row["part"] == "follow_up" and row["shape"] == f"{CHATS}x{FIRST}"
        assert row["turn_tokens"] == tokens
        assert row["computed_tokens"] == CHATS * (before + ANSWER - 1)
        assert row["reused_tokens"] == CHATS * (before // UNIT * UNIT)
        before += ANSWER + tokens
        assert row["prompt_tokens"] == CHATS * before
        assert row["seconds"] > 0 and row["all_seconds"] == [row["seconds"]]


def test_quantised_weights_are_marlins(tmp_path: Path) -> None:
    """Attention, delta nets and experts have them; routers and small layers do not."""
    path = ROOT / "benchmarks" / "configs/qwen3.6-35b-a3b/config.json"
    config = with_awq(cut_layers(json.loads(path.read_text()), 4))
    (tmp_path / "config.json").write_text(json.dumps(config))
    child = Path(__file__).with_name("weights_child.py")
    result = subprocess.run(
        [sys.executable, child, tmp_path], check=True, stdout=subprocess.PIPE
    )
    methods = json.loads(result.stdout.splitlines()[-1])
    unquantised = methods.pop("UnquantizedLinearMethod")
    assert {"conv1d", "gate", "shared_expert_gate"} < set(unquantised)
    assert methods == {
        "AutoAWQMarlinLinearMethod": [
            "down_proj",
            "gate_up_proj",
            "in_proj_qkvz",
            "o_proj",
            "out_proj",
            "qkv_proj",
        ],
        "AutoAWQMoEMethod": ["routed_experts"],
        "UnquantizedEmbeddingMethod": ["embed_tokens", "lm_head"],
    }
