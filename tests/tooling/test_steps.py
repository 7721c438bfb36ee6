# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The programs that scripts/test.sh and ci/gpu.py run, their order, and exit statuses.

Each program is a stub, which notes its arguments and ends as told.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trees import ROOT

# A stub notes some variables that it sees, its name and its arguments. It fails with
# status 7 if $FAIL is among these.
STUB = """#!/bin/sh
set -- {name} "$@"
for name in VLLM_TARGET_DEVICE TRITON_INTERPRET; do
  eval "value=\\${{$name:-}}"
  [ -z "$value" ] || set -- "$name=$value" "$@"
done
echo "$*" >>"$CALLS"
case "$*" in *"${{FAIL:-no such word}}"*) exit 7 ;; esac
"""
Run = Callable[..., tuple[int, list[str], str]]


def _stub(path: Path, name: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STUB.format(name=name))
    path.chmod(0o755)


def _runner(script: Path, root: Path, **variables: str) -> Run:
    """Run a script with stubs; return its status, the calls, and what it said."""
    log = root / "calls"
    (root / "tmp").mkdir()

    def run(*args: str, **more: str) -> tuple[int, list[str], str]:
        log.write_text("")
        hidden = ("VENV", "PYTHON", "OUT", "VLLM_TARGET_DEVICE", "TRITON_INTERPRET")
        kept = {name: os.environ[name] for name in os.environ if name not in hidden}
        own = {"CALLS": str(log), "TMPDIR": str(root / "tmp")}
        done = subprocess.run(
            [str(script), *args],
            env={**kept, **own, **variables, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, log.read_text().splitlines(), done.stdout

    return run


@pytest.fixture
def steps(tmp_path: Path) -> Run:
    """Runs test.sh in a project of stubs."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("test.sh", "find_python.sh"):
        shutil.copy(ROOT / "scripts" / name, scripts)
    for name in ("apply.sh", "verify.sh"):
        _stub(scripts / name, name)
    for name in ("env.py", "series.py"):
        shell = tmp_path / "stubs" / name
        _stub(shell, name)
        text = f"import os, sys\nos.execv({str(shell)!r}, sys.argv)\n"
        (scripts / name).write_text(text)
    for name in ("python", "pre-commit"):
        _stub(tmp_path / ".venv/bin" / name, name)
    _stub(tmp_path / "ci/first_turbo4.sh", "first_turbo4.sh")
    return _runner(scripts / "test.sh", tmp_path, PYTHON=sys.executable)


@pytest.fixture
def sections(tmp_path: Path) -> Run:
    """Runs gpu.py with stubs, and its results in a folder of the test's own."""
    for name in ("python", "ncu", "compute-sanitizer", "nvcc"):
        _stub(tmp_path / "bin" / name, name)
    return _runner(
        ROOT / "ci/gpu.py",
        tmp_path,
        PYTHON=str(tmp_path / "bin/python"),
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        OUT=str(tmp_path / "out"),
        COMMIT="0123abc",
    )


@pytest.mark.parametrize(
    ("runner", "known", "words"),
    [
        ("steps", "lint", "test.sh: no step"),
        ("sections", "bench", "gpu.py: no section"),
    ],
)
def test_unknown_name(
    request: pytest.FixtureRequest, runner: str, known: str, words: str
) -> None:
    """It is refused before anything runs, also behind a name that is known."""
    for args in (["speed"], [known, "speed"], [""]):
        status, calls, said = request.getfixturevalue(runner)(*args)
        assert status == 2
        assert calls == []
        assert said == f"{words} '{args[-1]}'\n"


def test_all_is_for_engine_and_kernels(steps: Run) -> None:
    """--all may stand anywhere; without it the matrix and many cases are left out."""
    for args in (["engine", "--all"], ["--all", "engine"], ["--all"]):
        status, calls, said = steps(*args)
        assert status == 0, said
        tested = [call for call in calls if "-m pytest" in call]
        assert [call for call in calls if "--all tests/engine" in call] == tested[-1:]
        assert not any("--all" in call.split() for call in tested[:-1])
    _, calls, _ = steps("engine")
    assert calls[-1].endswith("tests/engine") and "--all" not in calls[-1]
    for args, chooses in (["kernels"], True), (["kernels", "--all"], False):
        _, calls, _ = steps(*args)
        (run,) = [call for call in calls if "--dist worksteal --durations" in call]
        assert ("-p some_cases -p compiled" in run) == chooses
    status, calls, said = steps("lint", "--all")
    assert (status, calls) == (2, [])
    assert said == "test.sh: --all is for kernels and engine\n"


def test_every_step(steps: Run, tmp_path: Path) -> None:
    """Steps run from cheap to dear, in the environment that is made first."""
    status, calls, said = steps()
    assert status == 0, said
    assert calls[0] == f"env.py --venv {tmp_path}/.venv --tools test lint --lazy"
    assert calls[1] == "pre-commit run --all-files"
    tested = [call.split()[-1] for call in calls if "-m pytest" in call]
    assert tested[-6:] == [
        "tests/tooling",
        "vllm_overlay/tests/kernels/turbo",
        "vllm_overlay/tests/kernels/turbo",
        "tests/instances",
        "tests/quality",
        "tests/engine",
    ]
    assert calls[-1].endswith("python ci/native_kernels.py")
    assert said.splitlines()[-1] == "all passed"
    for number, step in enumerate(
        ("environment", "lint", "series", "tooling", "kernels", "quality", "engine"), 1
    ):
        assert f"[{number}/7] {step}\n" in said


def test_series_step(steps: Run) -> None:
    """Each check is made on the source that was fetched for it."""
    status, calls, _ = steps("series")
    assert status == 0
    verbs = [call.split()[1:] for call in calls if call.startswith("series.py")]
    assert [words[0] for words in verbs] == [
        "index",
        "sdist",
        "lint",
        "import",
        "export",
    ]
    source = verbs[1][-1]
    assert "--check" in verbs[0]
    assert verbs[2][1:] == ["--base", source]
    assert verbs[3][1:] == [source]
    assert verbs[4][1:] == ["--check", source]
    # It runs beside the others, once its source is there.
    step = calls.index(f"python ci/step.py {source}")
    assert any(" sdist " in call for call in calls[:step])
    del calls[step]
    assert calls[-3] == f"python ci/vllm_hooks.py {source}"
    assert calls[-2] == f"first_turbo4.sh {source}"
    assert calls[-1].startswith(f"python ci/entries.py {source} ")


@pytest.mark.parametrize(
    "broken",
    ["env.py", "pre-commit", "index", "sdist", "lint --base", "import", "export"]
    + [
        "ci/vllm_hooks.py",
        "first_turbo4.sh",
        "ci/step.py",
        "ci/entries.py",
        "tests/tooling",
        "verify.sh",
        "tests/quality",
        "tests/engine",
    ],
)
def test_first_failure_ends_the_run(steps: Run, tmp_path: Path, broken: str) -> None:
    """The run has its status, starts nothing more, and leaves nothing behind."""
    status, calls, said = steps(FAIL=broken)
    assert status == 7, said
    # This one runs beside others.
    step = "ci/step.py"
    in_turn = [call for call in calls if step not in call]
    last = "first_turbo4.sh" if broken == step else broken
    assert last in in_turn[-1]
    assert sum(broken in call for call in calls) == 1
    assert "all passed" not in said
    assert list((tmp_path / "tmp").iterdir()) == []


def test_interpreter_is_for_machines_without_gpu(steps: Run) -> None:
    """An environment without a GPU has the stand-ins.

    A step's variables do not reach the next one.
    """
    _, calls, _ = steps("kernels", "quality")
    kernels, emulated, read, quality = (call for call in calls if "-m pytest" in call)
    assert read.endswith(" tests/instances") and "TRITON_INTERPRET" in read
    assert "-p vllm_turbo_cpu_standins.cuda" in emulated
    assert "TRITON_INTERPRET=1" in kernels and "VLLM_TARGET_DEVICE=cpu" in kernels
    assert "-p vllm_turbo_cpu_standins.interpreter" in kernels
    assert "-p vllm_turbo_cpu_standins.inspection" in kernels
    assert "TRITON_INTERPRET" not in quality
    _, calls, said = steps("kernels", "engine", FAIL="import vllm_turbo_cpu_standins")
    (kernels,) = (call for call in calls if "-m pytest" in call)
    assert "TRITON_INTERPRET" not in kernels
    assert "vllm_turbo_cpu_standins" not in kernels
    assert "left out: these tests are for the CPU platform" in said


def test_series_must_be_applied(sections: Run) -> None:
    """The pictures need it not: they are drawn from results alone."""
    status, calls, said = sections("bench", FAIL="-c import vllm")
    assert status == 1
    assert len(calls) == 1
    assert "apply the series" in said
    status, (call,), _ = sections("pictures", FAIL="-c import vllm")
    assert status == 0
    assert call.startswith("python benchmarks/pictures.py")


SECTIONS = {
    "kernels": "vllm_overlay/tests/kernels/turbo",
    "architectures": "vllm_overlay/tests/kernels/turbo/builds/compile_kernels.py",
    "sanitizer": "ci/sanitize.py",
    "defects": "ci/cuda_defects.py",
    "bench": "vllm_overlay/benchmarks/kernels/benchmark_turbo_decode.py",
    "extend": "vllm_overlay/benchmarks/kernels/benchmark_turbo_extend.py",
    "mla": "vllm_overlay/benchmarks/kernels/benchmark_turbo_mla.py",
    "profile": "benchmarks/profile_table.py",
    "engine": "benchmarks/turbo_engine.py",
    "throughput": "benchmarks/turbo_engine.py",
    "models": "benchmarks/turbo_models.py",
    "offload": "benchmarks/turbo_offload.py",
    "pictures": "benchmarks/pictures.py",
    "serve": "benchmarks/turbo_serve.py",
    "start": "benchmarks/turbo_start.py",
    "quality": "benchmarks/quality.py",
    "lab": "tests/quality/lab/choices.py",
    "latents": "tests/quality/lab/latents.py",
    "equality": "benchmarks/equality.py",
    "checkpoints": "ci/checkpoints.py",
    "memory": "benchmarks/memory.py",
    "soak": "benchmarks/soak.py",
    "restarts": "benchmarks/soak_server.py",
    "image": "ci/image.py",
    "transfers": "benchmarks/turbo_transfers.py",
}
# Sections whose programs print, and get no file of $OUT.
PRINTED = ("kernels", "sanitizer", "defects")
# The tools that watch the kernels, side by side; racecheck in parts.
SANITIZERS = ["initcheck", "memcheck", *4 * ["racecheck"], "synccheck"]
# Small kernels without a race, and the kernels that are like them.
RACE_FREE = {"sets": "decode_wgmma", "ring": "extends"}


def test_every_section(sections: Run, tmp_path: Path) -> None:
    """Sections run in the given order. Each starts an existing script, told of $OUT."""
    status, calls, said = sections(*SECTIONS)
    assert status == 0, said
    assert calls.pop(0).startswith("python -c import vllm")
    for section, path in SECTIONS.items():
        assert (ROOT / path).exists()
        if section == "profile":
            assert calls.pop(0).startswith("ncu ")
        call = calls.pop(0)
        assert path in call.split()
        if section == "kernels":
            assert "native_kernels.json --passed" in calls.pop(0)
        assert section in PRINTED or str(tmp_path / "out") in call
        if section == "mla":
            assert "benchmark_turbo_latent_store.py" in calls.pop(0)
            assert "benchmark_turbo_mla_extend.py" in calls.pop(0)
        if section == "offload":
            assert "turbo4 turbo4_BLHNC turbo4_BHLNC" in calls.pop(0)
        if section == "sanitizer":
            for _ in RACE_FREE:
                assert calls.pop(0).startswith("nvcc ")
                assert calls.pop(0).split()[2] == "racecheck"
            assert calls.pop(0) == "python ci/sanitize.py --defects"
            # They begin in any order.
            more = sorted(calls.pop(0) for _ in SANITIZERS)
            assert [each.split()[2] for each in more] == SANITIZERS
            assert all(path in each.split() for each in more)
        assert f"[{section}] took" in said
    assert calls == []


@pytest.mark.parametrize("section", SECTIONS)
def test_arguments_of_a_section(sections: Run, section: str) -> None:
    """Arguments behind `--` reach the section's first command unchanged."""
    status, calls, _ = sections(section, "--", "--one", "two three")
    assert status == 0
    added = [call for call in calls if "--one two three" in call]
    # The program that builds the kernels gets them, and each tool.
    assert len(added) == (1 if section != "sanitizer" else 1 + len(SANITIZERS))


def test_arguments_are_for_one_section(sections: Run) -> None:
    for names in (["bench", "soak"], []):
        status, calls, said = sections(*names, "--", "--one")
        assert (status, calls) == (2, [])
        assert said == "gpu.py: arguments are for one section\n"


def test_sections_are_listed(sections: Run) -> None:
    """The list has each section's needs and programs.

    Sections for two GPUs run only if they are named.
    """
    status, calls, said = sections("--list")
    assert (status, calls) == (0, [])
    rows = [line for line in said.splitlines() if not line.startswith(" ")]
    needs = dict(row.split(": ") for row in rows)
    assert set(SECTIONS) <= set(needs)
    assert all(path in said for path in SECTIONS.values())
    status, calls, said = sections()
    assert status == 0
    run = [name for name in needs if f"[{name}] took" in said]
    assert run == [name for name in needs if not needs[name].startswith("two GPUs")]


def test_parts_of_the_kernels_tests(sections: Run, tmp_path: Path) -> None:
    """A part has a log of its own; a run that leaves tests out is not recorded."""
    status, calls, _ = sections("kernels", "--", "--shard", "2/3")
    assert status == 0
    assert (tmp_path / "out/kernels-2.txt").exists()
    assert "--shard 2/3 --passed --commit 0123abc" in calls[-1]
    for words in (["-k", "store"], ["-m", "slow"], ["--ignore=test_x.py"]):
        status, calls, _ = sections("kernels", "--", *words)
        assert status == 0
        assert not any("native_kernels.py" in call for call in calls)
    status, calls, _ = sections("kernels", FAMILIES="cuda/store triton/merge")
    assert status == 0
    assert calls[1].endswith("ci/native_kernels.py --tests cuda/store triton/merge")
    assert "--passed cuda/store triton/merge --commit 0123abc" in calls[-1]


@pytest.mark.parametrize("errs", [[], ["sets"], ["ring"], ["sets", "ring"]])
@pytest.mark.parametrize("found", [9, 0])
def test_sanitizer_finds_planted_defects(
    sections: Run, tmp_path: Path, found: int, errs: list[str]
) -> None:
    """A tool that misses a planted defect fails the section. A line has each status.

    If racecheck reports hazards in a right kernel, it watches no kernel like that, and
    is not to find defects there.
    """
    python, tool = tmp_path / "bin/python", tmp_path / "bin/compute-sanitizer"
    listed = tmp_path / "listed"
    python.write_text(
        '#!/bin/sh\n[ "$2" = --defects ] || exit 0\n'
        f'echo memcheck-past\necho "$*" >{listed}\n'
    )
    reported = "".join(f"*/{x}*) exit 9 ;;\n" for x in errs)
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *--defect*)\n  echo "==== ERROR SUMMARY: 1 error"\n'
        f"  exit {found} ;;\n{reported}esac\n"
    )
    status, _, said = sections("sanitizer")
    assert status == (found != 9)
    lines = (tmp_path / "out/sanitizer.txt").read_text().splitlines()
    assert all(x in said for x in lines)
    for x, line in zip(RACE_FREE, lines):
        verb = "reports hazards" if x in errs else "finds nothing"
        assert line.startswith(f"racecheck {verb} in ci/racecheck_{x}.cu")
    without = [RACE_FREE[x] for x in RACE_FREE if x in errs]
    option = f" --without {' '.join(without)}" if errs else ""
    assert listed.read_text() == f"ci/sanitize.py --defects{option}\n"
    planted = "memcheck --defect memcheck-past: ERROR SUMMARY: 1 error"
    assert f"{planted} (status {found}, to be 9)" in lines
    assert len(lines) == len(RACE_FREE) + 1 + len(SANITIZERS)
    parts = [f"racecheck{option} --part {i}/4" for i in (1, 2, 3, 4)]
    watched = [x.split(":")[0] for x in lines if x.endswith("(status 0, to be 0)")]
    others = [x for x in SANITIZERS if x != "racecheck"]
    assert sorted(watched) == sorted([*others, *parts])


def test_one_tool_of_the_sanitizer(sections: Run, tmp_path: Path) -> None:
    """Other tools do not run, and their defects are not planted."""
    python = tmp_path / "bin/python"
    python.write_text(
        '#!/bin/sh\n[ "$2" != --defects ] || echo memcheck-past initcheck-pages\n'
    )
    status, calls, _ = sections("sanitizer", "--", "memcheck", "--all", FAIL="past")
    assert status == 1
    watched = sorted(x.partition("--error-exitcode")[2] for x in calls)
    command = f"9 --print-limit 10 {python} ci/sanitize.py"
    assert watched == [f" {command} --all", f" {command} --defect memcheck-past"]
    assert all(x.startswith("compute-sanitizer --tool memcheck") for x in calls)


def test_ranks_that_share_a_context(sections: Run) -> None:
    """All engines run, whichever fails; arguments are shapes."""
    status, calls, said = sections("dcp", "--", "1x2", FAIL="a2a")
    assert status == 1 and said.endswith("failed: dcp\n")
    *engines, equality = calls[1:]
    assert len(engines) == 3 and all("--shapes 1x2 --engine" in x for x in engines)
    assert [x for x in engines if "decode_context_parallel_size" in x] == engines[1:]
    assert "dcp_prefix" in equality


@pytest.mark.parametrize("broken", SECTIONS)
def test_failed_sections_are_named(sections: Run, broken: str) -> None:
    """The others run all the same, and the status says that one failed."""
    path = SECTIONS[broken]
    status, calls, said = sections("soak", broken, "serve", "lab", FAIL=f" {path}")
    assert status == 1
    assert any("choices.py" in call for call in calls)
    assert {*said.splitlines()[-1].split()} == {"failed:", broken}
