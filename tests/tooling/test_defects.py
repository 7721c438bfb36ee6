# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The defects that ci/ plants in the CUDA kernels still fit the sources."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cuda_defects
import pytest
import trees
from cuda_defects import (
    DEFECTS,
    ENDLESS,
    FAILED,
    NOT_PLANTED,
    PASSED,
    SANITIZER_DEFECTS,
    TESTS,
    Defect,
)

SOURCES = trees.ROOT / "vllm_overlay/vllm/v1/attention/ops/turbo/cuda/csrc"
# Without the sanitizer's defects that are in the inputs: these change no source.
PLANTED = {
    name: defect
    for name, defect in (DEFECTS | SANITIZER_DEFECTS).items()
    if defect is not None
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_defect_replaces_is_there(name: str) -> None:
    """It is there as often as the defect says. Otherwise planting fails, on a GPU."""
    defect: Defect = PLANTED[name]
    text = (SOURCES / defect.source).read_text()
    assert text.count(defect.old) == defect.times
    assert defect.new != defect.old
    if defect.shown_by is not None:
        change = defect.shown_by
        assert (SOURCES / change.source).read_text().count(change.old) == 1


@pytest.mark.parametrize("name", DEFECTS)
def test_its_test_is_there(name: str) -> None:
    path, _, function = DEFECTS[name].test.partition("::")
    assert f"def {function}(" in (TESTS / path).read_text()


def test_what_cannot_be_planted_is_not_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, defect = next(iter(DEFECTS.items()))
    source = tmp_path / defect.source
    source.parent.mkdir(parents=True)
    source.write_text("// another by now\n")
    kernels = SimpleNamespace(build=SimpleNamespace(SOURCE_DIR=tmp_path))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.turbo.cuda", kernels)
    monkeypatch.setattr(sys, "argv", ["cuda_defects.py", "--with", name])
    assert cuda_defects.main() == NOT_PLANTED
    assert defect.source in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("pass", PASSED),
        ("assert False", FAILED),
        ("raise RuntimeError('decode.cu was not compiled or linked. It')", NOT_PLANTED),
        (
            "class CannotBuildError(Exception): pass\n    raise CannotBuildError",
            NOT_PLANTED,
        ),
    ],
)
def test_what_is_not_built_is_not_caught(
    tmp_path: Path, body: str, status: int
) -> None:
    """A failed test catches a defect only if the kernels were built."""
    assert cuda_defects.NOT_BUILT in (SOURCES.parent / "build.py").read_text()
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    script = (
        "import sys, pathlib, cuda_defects as c\n"
        "c.TESTS = pathlib.Path(sys.argv[1])\n"
        "sys.exit(c.run_test(c.Defect('', '', '', 'test_it.py')))\n"
    )
    command = (sys.executable, "-c", script, tmp_path)
    found = trees.run(*command, cwd=trees.ROOT / "ci")
    assert found.returncode == status, found.stdout + found.stderr


def test_each_is_said_when_it_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A test of several defects runs once without any, and missed defects are named."""
    of_a_test: dict[tuple, list[str]] = {}
    for name, defect in DEFECTS.items():
        of_a_test.setdefault(defect[3:5] + defect[6:], []).append(name)
    names = next(alike for alike in of_a_test.values() if len(alike) > 1)
    missed = names[0]
    ran: list[tuple[str, str]] = []

    def run_apart(name: str, option: str) -> int:
        ran.append((name, option))
        return FAILED if option == "--with" and name != missed else PASSED

    monkeypatch.setattr(cuda_defects, "run_apart", run_apart)
    monkeypatch.setattr(sys, "argv", ["cuda_defects.py", *names])
    assert cuda_defects.main() == 1
    assert sorted(option for _, option in ran) == ["--with"] * len(names) + [
        "--without"
    ]
    said = set(capsys.readouterr().out.splitlines())
    assert said == {f"{name} is caught" for name in names[1:]} | {
        f"{missed} is not caught: statuses (0, 0)"
    }


@pytest.mark.parametrize("option", ["--with", "--without"])
def test_a_kernel_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """It shows a defect, if it ends without one."""

    def run(command: list[str], timeout: float) -> subprocess.CompletedProcess:
        if option in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, PASSED)

    name = next(iter(DEFECTS))
    monkeypatch.setattr(cuda_defects.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["cuda_defects.py", name])
    is_caught = option == "--with"
    assert cuda_defects.main() == (not is_caught)
    said = "is caught" if is_caught else f"is not caught: statuses ({ENDLESS}, 0)"
    assert capsys.readouterr().out == f"{name} {said}\n"


def test_a_defect_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before anything is built."""
    monkeypatch.setattr(cuda_defects, "run_apart", None)
    monkeypatch.setattr(sys, "argv", ["cuda_defects.py", "merge-sinks", "no-such"])
    with pytest.raises(SystemExit):
        cuda_defects.main()
    assert "no such defect: no-such;" in capsys.readouterr().err
