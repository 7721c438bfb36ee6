# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""benchmarks/turbo_start.py: the times that a log gives, and the start of servers."""

import json
import os
import sys
from pathlib import Path

import pytest
import turbo_start
from turbo_start import (
    CACHES,
    build_parser,
    cache_variables,
    medians,
    phases,
    places,
    reported,
    rows_alike,
    serve_command,
)

LOG = """\
INFO core.py:138] Initializing a V1 LLM engine (v0) with config: model='m'
INFO model_runner.py:411] Starting to load model m...
INFO module_builds.py:1] Turbo KV cache: CUDA kernels: 7 of 9 modules were built in \
41.5 s, beside the rest of the start, which waited for 12.5 s. The next start finds \
them built.
INFO model_runner.py:429] Model loading took 14.99 GiB memory and 3.250000 seconds
INFO monitor.py:60] torch.compile took 20.50 s in total
INFO monitor.py:92] Initial profiling/warmup run took 1.25 s
INFO gpu_worker.py:774] Available KV cache memory: 50.0 GiB
INFO kv_cache_utils.py:1] GPU KV cache size: 1 tokens
INFO model_runner.py:1164] Graph capturing finished in 4 secs, took 0.60 GiB
INFO core.py:413] init engine (profile, create kv cache, warmup model) took 33.5 s
INFO:     Application startup complete.
""".splitlines()
# A server that writes a cache, and prints its lines one after the other.
SERVER = """
import http.server, os, pathlib, sys, time
lines, fails, port = sys.argv[2].splitlines(), sys.argv[3], sys.argv[-1]
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
print("built before" if folder.exists() else "nothing built", flush=True)
if fails == "True":
    sys.exit("ValueError: no such dtype")
folder.mkdir(parents=True, exist_ok=True)
for line in lines:
    time.sleep(0.05)
    print(line, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def test_phases_add_up() -> None:
    lines = [(1.0 + number, line) for number, line in enumerate(LOG)]
    found = phases(lines, 20.0)
    assert list(found) == [*turbo_start.PHASES, turbo_start.READY]
    assert sum(found.values()) == 20.0
    # The kernels' line ends no phase.
    assert found["import"] == 1.0 and found["load"] == 2.0 and found["serve"] == 1.0
    without = [pair for pair in lines if "torch.compile" not in pair[1]]
    assert "compile" not in phases(without, 20.0)
    assert phases(without, 20.0)["profile"] == found["compile"] + found["profile"]
    assert phases([], 20.0) == {turbo_start.READY: 20.0}
    # A second engine's line ends no phase of the first.
    assert phases([*lines, (19.0, LOG[0])], 20.0) == found


def test_seconds_that_the_log_gives() -> None:
    assert reported(LOG) == {
        "model_loading": 3.25,
        "torch_compile": 20.5,
        "profile_run": 1.25,
        "graph_capture": 4.0,
        "init_engine": 33.5,
        "cuda_kernels": 41.5,
        "waited_for_kernels": 12.5,
    }
    # A drafter's compilation adds to the model's.
    assert reported([*LOG, LOG[4]])["torch_compile"] == 41.0
    assert reported([]) == {}


def test_no_cache_is_shared(tmp_path: Path) -> None:
    found = cache_variables(tmp_path)
    assert set(found) == set(CACHES) and len(set(found.values())) == len(CACHES)
    assert all(Path(path).parent == tmp_path for path in found.values())


def test_commands(tmp_path: Path) -> None:
    args = build_parser().parse_args(["--", "--enforce-eager"])
    command = serve_command(args, "turbo4:triton", tmp_path)
    assert command[1:3] == ["-m", "vllm.entrypoints.cli.main"]
    for option, value in (
        ("--kv-cache-dtype", "turbo4"),
        ("--attention-config.turbo_kernel", "triton"),
        ("--load-format", "dummy"),
    ):
        assert command[command.index(option) + 1] == value
    assert command[-1] == "--enforce-eager"
    assert "--attention-config.turbo_kernel" not in serve_command(args, "fp8", tmp_path)


def test_medians_of_starts() -> None:
    def start(arm: str, state: str, seconds: float) -> dict:
        found = {"load": seconds - 1.0, "ready": 1.0}
        return {
            "part": "start",
            "arm": arm,
            "caches": state,
            "seconds": seconds,
            "phases": found,
        }

    rows = [start("fp8", "empty", s) for s in (70.0, 90.0, 71.0)]
    rows += [start("turbo4", "empty", s) for s in (85.0, 80.0)]
    rows += [start("turbo4", "full", 30.0)]
    rows += [{"part": "start", "arm": "fp8", "caches": "full", "error": "no"}]
    fp8, turbo4, full = medians(rows)
    assert (fp8["arm"], fp8["caches"], fp8["starts"]) == ("fp8", "empty", 3)
    assert fp8["seconds"] == 71.0 and fp8["all_seconds"] == [70.0, 71.0, 90.0]
    assert fp8["phases"] == {"load": 70.0, "ready": 1.0}
    assert turbo4["seconds"] == 82.5 and turbo4["beyond_fp8_s"] == 11.5
    assert full["caches"] == "full" and "beyond_fp8_s" not in full


def _run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str, fails: str = ""
) -> tuple[int, list[dict]]:
    """Run the benchmark with a stand-in for the server."""

    def command(_args: object, arm: str, _model: Path) -> list[str]:
        words = [arm, "\n".join(LOG), str(arm == fails)]
        return [sys.executable, "-c", SERVER, *words]

    output = folder / "rows.jsonl"
    monkeypatch.setattr(turbo_start, "serve_command", command)
    monkeypatch.setattr(turbo_start, "read_packages", lambda: 0)
    monkeypatch.setattr(
        sys,
        "argv",
        ["turbo_start.py", "--output", str(output), "--logs", str(folder / "logs")]
        + ["--folder", str(folder / "caches"), *options],
    )
    status = turbo_start.main()
    return status, [json.loads(line) for line in output.read_text().splitlines()]


def test_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Arms take turns to be first; a second start finds the caches of the first."""
    monkeypatch.setenv("COMMIT", "0123abc")
    arms = ["--arms", "fp8", "turbo4"]
    status, rows = _run(monkeypatch, tmp_path, *arms)
    assert status == 0
    starts = [(row["arm"], row["caches"]) for row in rows if row["part"] == "start"]
    pairs = [(arm, state) for arm in arms[1:] for state in ("empty", "full")]
    assert starts == pairs
    for arm, state in starts:
        log = (tmp_path / "logs" / f"{arm}-0-{state}.log").read_text()
        assert log.startswith("nothing built" if state == "empty" else "built before")
    first = rows[0]
    assert first["commit"] == "0123abc" and first["model"] == "llama-8b"
    assert first["reported"] == reported(LOG)
    assert abs(sum(first["phases"].values()) - first["seconds"]) < 1e-3
    assert set(first["phases"]) == {*turbo_start.PHASES, turbo_start.READY}
    assert not os.listdir(tmp_path / "caches")

    status, rows = _run(monkeypatch, tmp_path, *arms, "--first-round", "1")
    assert status == 0
    second = [row for row in rows if row.get("round") == 1]
    assert [row["arm"] for row in second] == ["turbo4", "turbo4", "fp8", "fp8"]
    last = rows[-4:]
    assert [row["part"] for row in last] == ["median"] * 4
    assert [row["starts"] for row in last] == [2] * 4


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers side by side have no GPU and no core in common."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(10)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    assert places(1) == [(None, tuple(range(10)))]
    assert places(2) == [("3", (0, 1, 2, 3, 4)), ("1", (5, 6, 7, 8, 9))]
    with pytest.raises(ValueError, match="--at-once 4: .* there are 3 and 10"):
        places(4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(turbo_start, "count_gpus", lambda: 2)
    assert [place.gpu for place in places(2)] == ["0", "1"]


def test_rounds_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each arm of a round has a GPU of its own, and all rounds count."""
    core = min(os.sched_getaffinity(0))
    where = [turbo_start.Place(gpu, (core,)) for gpu in ("5", "7")]
    monkeypatch.setattr(turbo_start, "places", lambda _count: where)
    log_gpu = "print(f\"GPU {os.environ['CUDA_VISIBLE_DEVICES']}\", flush=True)\n"
    server = SERVER.replace("folder.mkdir", f"{log_gpu}folder.mkdir")
    monkeypatch.setattr(sys.modules[__name__], "SERVER", server)
    status, rows = _run(
        monkeypatch, tmp_path, "--arms", "fp8", "--rounds", "3", "--at-once", "2"
    )
    assert status == 0
    assert [row["starts"] for row in rows if row["part"] == "median"] == [3, 3]
    gpus = set()
    for number in range(3):
        lines = (tmp_path / "logs" / f"fp8-{number}-empty.log").read_text().splitlines()
        gpus.add(lines[1])
    assert gpus == {"GPU 5", "GPU 7"}


def test_more_starts_with_all_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Further starts use one folder of caches, and each counts."""
    status, rows = _run(monkeypatch, tmp_path, "--arms", "fp8", "--full-starts", "3")
    assert status == 0
    starts = [row["caches"] for row in rows if row["part"] == "start"]
    assert starts == ["empty", "full", "full", "full"]
    medians = {row["caches"]: row for row in rows if row["part"] == "median"}
    assert (medians["empty"]["starts"], medians["full"]["starts"]) == (1, 3)
    logs = {path.name for path in (tmp_path / "logs").iterdir()}
    assert logs == {f"fp8-0-{s}.log" for s in ("empty", "full", "full-2", "full-3")}


def test_a_start_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is reported; the arm starts no second time, and other arms are measured."""
    arms = ["--arms", "turbo9", "fp8"]
    status, rows = _run(monkeypatch, tmp_path, *arms, fails="turbo9")
    assert status == 1
    wrong, empty, full, *rest = rows
    assert wrong["arm"] == "turbo9" and "no such dtype" in wrong["error"]
    assert (empty["caches"], full["caches"]) == ("empty", "full")
    assert [row["part"] for row in rest] == ["median"] * 2


def test_rows_of_other_runs(tmp_path: Path) -> None:
    facts = {"gpu": "g", "commit": "c", "command": "one"}
    rows = [facts | {"command": "two", "phases": {}}, facts | {"gpu": "h"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rows_alike(path, facts) == rows[:1]
