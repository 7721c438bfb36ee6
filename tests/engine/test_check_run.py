# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The run of a check of a user's model: shares, progress, errors and its end."""

import logging
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import check_model
import numpy as np
import pytest
from harness import ROOT, SCRIPTS, run_python
from turbo_check import jobs as check_jobs
from turbo_check.args import build_parser, check_early, complete
from turbo_check.cures import with_cure
from turbo_check.progress import Heartbeat
from turbo_process.arm import run_arm
from turbo_process.runner import side_by_side

MODEL = ROOT / "models" / "needle-qwen3"
GIB = 1 << 30


@pytest.mark.parametrize("step", [None, 1])
def test_steps_without_logits_say_what_to_do(step: int | None, tmp_path: Path):
    from turbo_check.probe import Record

    record = Record(
        path=tmp_path / "text-3.npz", first=9, targets=[1, 2],
        ids=np.zeros((2, 4), dtype=np.int64),
        logprobs=np.zeros((2, 5), dtype=np.float32),
        target=np.zeros(2, dtype=np.float32), top=np.array([5, -1]),
        is_reference=True,
    )  # fmt: skip
    said = "1 of 2 decode steps of text-3 were not seen.*max_num_seqs"
    if step is not None:
        record.top[:] = 5
        record.logprobs[step] = np.nan
        said = "logits of 1 of 2 decode steps of text-3 are not numbers.*leave it out"
    with pytest.raises(RuntimeError, match=said):
        record.save()
    assert not record.path.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((str(MODEL), "--decode-steps", "512"), "512, and 256 at most"),
        (("/no/such",), "no model in /no/such: there is no config.json"),
        (("./missing",), "no model in ./missing: there is no config.json"),
        (("a/b/missing",), "no model in a/b/missing: there is no config.json"),
        (("missing/",), "no model in missing/: there is no config.json"),
        (("empty",), "no model in empty: there is no config.json"),
        (("mute",), "no tokenizer in mute: there is no tokenizer.json, tokenizer.mod"),
        ((str(MODEL), "--kv-cache-dtyp", "fp8"), "unrecognized arguments: --kv-cache"),
    ],
)
def test_arguments_are_judged_before_vllm_is_imported(
    words: tuple[str, ...], said: str, tmp_path: Path
):
    for name in ("empty", "mute"):
        (tmp_path / name).mkdir()
    (tmp_path / "mute" / "config.json").write_text("{}")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import check_model\n"
        "try: check_model.main(sys.argv[2:])\n"
        "finally: print('vllm' in sys.modules, 'torch' in sys.modules)"
    )
    done = run_python("-c", code, SCRIPTS, *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr
    assert done.stdout == "False False\n"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_names_are_left_to_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def ask(_: object) -> None:
        raise ValueError("asked")

    monkeypatch.setattr(check_model, "complete", ask)
    with pytest.raises(SystemExit):
        check_model.main([name])
    said = capsys.readouterr().err
    assert f"no folder {name} is here: vLLM asks the Hub for the model" in said
    assert said.endswith("error: asked\n")


@pytest.mark.parametrize("name", ["tokenizer.model.v3", "tekken.json", "vocab.json"])
def test_tokenizers_of_other_kinds(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("")
    check_early(build_parser("").parse_args([str(tmp_path)]))


def test_a_tokenizer_from_elsewhere(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    words = [str(tmp_path), "--engine-args", '{"tokenizer": "gpt2"}']
    check_early(build_parser("").parse_args(words))


@pytest.mark.parametrize(
    ("free", "weights", "wanted", "engines", "asked", "jobs"),
    [
        # A model of 135 M parameters on an H100, with 8 and with 3 engines; of 8 B; of
        # 70 B.
        (78, 0.25, 2.8, 8, None, 8),
        (78, 0.25, 2.8, 3, None, 3),
        (78, 15, 16, 8, None, 2),
        (78, 70, 20, 8, None, 1),
        (78, 15, 16, 8, 3, 3),
    ],
)  # fmt: skip
def test_engines_have_their_shares(
    free: float, weights: float, wanted: float, engines: int, asked: int, jobs: int
):
    sizes = [int(x * GIB) for x in (free, weights, wanted, wanted / 16)]
    found, cache = check_jobs.split(*sizes, engines, asked)
    assert found == jobs
    if jobs == 1:
        assert cache == 0
    else:
        assert cache >= sizes[3] and (asked or cache >= sizes[2])
        beside = sizes[1] + check_jobs.OTHER_BYTES
        assert jobs * (cache + beside) <= 0.95 * sizes[0] + 1


def test_too_many_engines_are_refused():
    sizes = [int(x * GIB) for x in (78, 15, 16, 1)]
    with pytest.raises(ValueError, match="--jobs 4 leaves 18.5 GiB.*--jobs 3 at most"):
        check_jobs.split(*sizes, 8, 4)


def test_a_share_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The GPU is pretended. A user's own numbers go first."""
    monkeypatch.setattr("turbo_check.args.has_gpu", lambda: True)
    monkeypatch.setattr(check_jobs, "free_memory", lambda: 78 * GIB)
    monkeypatch.setattr("os.cpu_count", lambda: 16)

    def options(*words: str) -> tuple[int, dict[str, Any]]:
        words = str(MODEL), "--output", str(tmp_path), *words
        args = build_parser("").parse_args(words)
        complete(args)
        return args.jobs, check_model.engine_args(check_model.arm_of("turbo4"), args)

    jobs, found = options()
    assert jobs == 5 and found["gpu_memory_utilization"] == 0.02
    assert jobs * (found["kv_cache_memory_bytes"] + 4 * GIB) < 0.95 * 78 * GIB
    jobs, found = options("--jobs", "1")
    assert (jobs, found["gpu_memory_utilization"]) == (1, 0.85)
    assert "kv_cache_memory_bytes" not in found
    jobs, found = options("--engine-args", '{"gpu_memory_utilization": 0.3}')
    assert (jobs, found["gpu_memory_utilization"]) == (1, 0.3)
    monkeypatch.setattr(check_jobs, "free_memory", lambda: None)
    assert options()[0] == 1
    with pytest.raises(ValueError, match="--jobs 2: the GPU's free memory is not know"):
        options("--jobs", "2")


def test_an_engine_waits_for_the_reference(tmp_path: Path):
    """It needs the records of the reference, which runs beside it."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from turbo_check import child\n"
        "check = object.__new__(child.Check)\n"
        "check.job = {'reference': sys.argv[2]}\n"
        "check.await_reference('decode')"
    )
    command = [sys.executable, "-c", code, str(SCRIPTS), str(tmp_path)]
    variables = os.environ | {"VLLM_TARGET_DEVICE": "cpu"}
    with subprocess.Popen(command, env=variables) as process:
        (tmp_path / "stages").write_text("start\nkeys\n")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        (tmp_path / "stages").write_text("start\nkeys\ndecode\n")
        assert process.wait(120) == 0


def test_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]):
    with Heartbeat("reading", 0.01) as beat:
        time.sleep(0.1)
        beat.status = lambda: "turbo4: decode"
        time.sleep(0.1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 s: reading" and lines[-1] == "0 s: turbo4: decode"
    time.sleep(0.05)
    assert not capsys.readouterr().out


def test_errors_say_what_to_do():
    memory = "ValueError: No available memory for the cache blocks. Try increasing"
    assert "--jobs 1" in with_cure(memory) and "log: x" in with_cure(memory, Path("x"))
    assert "--time-limit" in with_cure("no end after 30 s")
    assert with_cure("ValueError: no") == "ValueError: no"


@pytest.mark.parametrize("stopped", [KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("has_ended", [True, False])
def test_what_is_stopped_says_what_there_is(
    stopped: BaseException,
    has_ended: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(check_model, "markdown", lambda report: "the table")

    def check(_checks: Any, _arms: Any, keep: Any) -> None:
        if has_ended:
            keep({"arms": [{"arm": "auto"}, {"arm": "turbo4"}]})
        raise stopped

    monkeypatch.setattr(check_model, "check", check)
    arms = check_model.arms_of(["turbo4", "fp8"])
    with pytest.raises(type(stopped)):
        check_model.check_or_stop(None, arms, tmp_path)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    if has_ended:
        said = f"stopped when 2 of 3 engines had ended; {tmp_path / 'check.json'}"
        assert "the table" in out and said in out
        assert (tmp_path / "check.md").read_text() == "the table"
    else:
        assert "0 of 3 engines had ended: there is no report" in err


class Ended(check_model.Checks):
    """Engines that end in an order of their own, without a process."""

    def __init__(self, pool: Any, seconds: dict[str, float]) -> None:
        self.pool = pool
        self.seconds = seconds
        self.args = Namespace(gsm8k=None, layers=0)
        self.reference = check_model.Arm("auto", "auto")
        self.running, self.ended = {}, 0

    def run_arm(self, arm: check_model.Arm) -> str | None:
        time.sleep(self.seconds[arm.name])
        return "ValueError: no" if arm.name == "fp8" else None

    def stages(self, arm: check_model.Arm) -> int:
        return 0

    def measure(self, arm: check_model.Arm) -> dict[str, Any]:
        return {"kl_mean": 1.0}


def test_engines_beside_each_other_are_reported_in_order(
    monkeypatch: pytest.MonkeyPatch,
):
    """They are reported as they end, once the reference has ended.

    The report has them in the order in which they were named.
    """
    kept: list[list[str]] = []
    monkeypatch.setattr(check_model, "check_layers", lambda *_: None)
    monkeypatch.setattr(check_model, "report_of", lambda _checks, rows, *_: rows)
    arms = check_model.arms_of(["turbo4", "fp8", "turbo3"])
    seconds = {"auto": 0.8, "turbo4": 2.0, "fp8": 0.1, "turbo3": 0.4}
    with side_by_side(4) as pool:
        checks = Ended(pool, seconds)
        start = time.monotonic()
        rows = check_model.check(
            checks, arms, lambda rows: kept.append([row["arm"] for row in rows])
        )
        assert time.monotonic() - start < sum(seconds.values())
    assert [row["arm"] for row in rows] == ["auto", "turbo4", "fp8", "turbo3"]
    assert kept[0] == ["auto"] and "turbo4" not in kept[2]
    assert kept[2] == ["auto", "fp8", "turbo3"] and len(kept) == 4
    assert checks.ended == 4 and not checks.running


def test_a_time_that_is_up_is_named(tmp_path: Path):
    """The error of a log's earlier lines is not."""
    child = tmp_path / "child.py"
    child.write_text("import time\nprint('ValueError: no')\ntime.sleep(60)\n")
    error = run_arm(child, {}, tmp_path / "arm", {}, 1, is_forked=False)
    assert error == "no end after 1 s"
    assert with_cure(error) == "no end after 1 s (--time-limit SECONDS gives more)"


def test_long_texts_are_encoded_without_alarm(tmp_path: Path):
    """No warning says that a text is too long for the model: it will be cut."""
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addHandler(handler)
    args = build_parser("").parse_args([str(MODEL), "--output", str(tmp_path)])
    try:
        complete(args)
        args.tokenizer.model_max_length = 100
        assert len(args.tokenizer.encode("a word " * 1000)) > 100
    finally:
        logger.removeHandler(handler)
    assert not said
