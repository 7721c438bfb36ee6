# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""scripts/env.py installs the pinned packages, and nothing else."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import env
import pytest
import trees
from trees import ROOT

Calls = Callable[..., list[str]]
Pins = Callable[[], list[str]]
STUB = """#!/bin/sh
# A Python that notes how it is called, and what requirements files hold.
echo "$*" >>"{log}"
for word; do
  case $word in *.txt) cat "$word" >>"{pins}" ;; esac
done
[ ! -e "{broken}" ] || exit 3
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder of the test's own, that env.py takes for its own."""
    root = tmp_path / "project"
    root.mkdir()
    shutil.copy(ROOT / "UPSTREAM.toml", root)
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copytree(ROOT / "cpu_standins", root / "cpu_standins")
    monkeypatch.setattr(env, "ROOT", root)
    monkeypatch.setattr(env, "REQUIREMENTS", root / "requirements")
    monkeypatch.setattr(env, "STANDINS", root / "cpu_standins")
    monkeypatch.setattr(env.os, "cpu_count", lambda: 2)
    return root


@pytest.fixture
def calls(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Run env.py on an environment whose Python is a stub; return what it was told."""
    folder = tmp_path / "venv"
    log = tmp_path / "calls"
    python = folder / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        STUB.format(log=log, broken=tmp_path / "broken", pins=tmp_path / "pins")
    )
    python.chmod(0o755)
    # The environment itself is there.
    (folder / env.STAMPS).write_text(json.dumps({"venv": env.interpreter_key()}))

    def run(*args: str, status: int = 0) -> list[str]:
        log.write_text("")
        (tmp_path / "pins").write_text("")
        argv = ["env.py", "--venv", str(folder), *args]
        monkeypatch.setattr(sys, "argv", argv)
        assert env.main() == status
        # A call with code of several lines has as many in the log: its first counts.
        return [x for x in log.read_text().splitlines() if x.startswith(("-m", "-c"))]

    return run


@pytest.fixture
def pins(tmp_path: Path) -> Pins:
    """The lines of the last run's requirements files."""
    return lambda: sorted((tmp_path / "pins").read_text().splitlines())


def _listed(*names: str) -> list[str]:
    """The pins of our own requirements files."""
    texts = ((ROOT / f"requirements/{name}.txt").read_text() for name in names)
    lines = [line for text in texts for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _pin() -> str:
    """The line that pins vLLM, read from the pin file by other means."""
    hashes = []
    for line in (ROOT / "UPSTREAM.toml").read_text().split("[wheel.", 1)[1].split("\n"):
        if line.startswith("sha256"):
            hashes.append(line.split('"')[1])
    version = (ROOT / "UPSTREAM.toml").read_text().split('version = "')[1].split('"')[0]
    assert len(hashes) == 2
    return f"vllm=={version} " + " ".join(f"--hash=sha256:{h}" for h in hashes)


def test_cpu(calls: Calls, pins: Pins) -> None:
    """The pins are installed in two parts, the wheel by its hashes, then our stand-ins.

    All of it is compiled, as pip would do. Nothing else is installed.
    """
    *parts, wheel, standins, first, second, compiled = calls(
        "--device", "cpu", "--tools", "test"
    )
    assert sorted(part.split("/")[-1].split()[0] for part in parts) == [
        *("cpu-0.txt", "cpu-1.txt")
    ]
    for call in (*parts, wheel, standins, first, second):
        assert "--no-deps" in call.split() and "--no-compile" in call.split()
    for option in ("--only-binary=vllm", "--require-hashes"):
        assert option in wheel.split()
    assert "cpu_standins" in standins
    assert "test-" in first and "test-" in second
    assert compiled.startswith("-c")
    assert pins() == sorted([*_listed("cpu", "test"), _pin()])


def test_gpu(project: Path, calls: Calls, pins: Pins) -> None:
    """The wheel is installed by its hashes, then its dependencies and the tools."""
    wheel, dependencies, tools = calls("--device", "gpu", "--tools", "test")
    assert "--require-hashes" in wheel.split() and "--no-deps" in wheel.split()
    assert _pin() in pins()
    assert f"install {_pin().split()[0]}" in dependencies
    assert f"install -r {project}/requirements/test.txt" in tools
    for call in (dependencies, tools):
        assert "--no-deps" not in call.split()


def test_what_is_installed_stays(project: Path, calls: Calls, pins: Pins) -> None:
    """A second run does nothing; a requirement that has changed is installed again."""
    args = ("--device", "cpu", "--tools", "lint")
    assert len(calls(*args)) == 7
    assert calls(*args) == []
    # A run that asks for less does nothing either.
    assert calls("--device", "cpu") == []
    (project / "requirements/lint.txt").write_text("new==1\n")
    call, compiled = calls(*args)
    assert call.endswith(" ".join(env.PIP_OPTIONS)) and "lint-0.txt" in call
    assert compiled.startswith("-c") and pins() == ["new==1"]
    upstream = project / "UPSTREAM.toml"
    old = _pin().rsplit(":", 1)[1]
    upstream.write_text(upstream.read_text().replace(old, "0" * 64))
    assert len(calls(*args)) == 2
    (pin,) = pins()
    assert pin.endswith(f"sha256:{'0' * 64}")


def test_byte_code_is_left_to_its_first_use(project: Path, calls: Calls) -> None:
    """With --lazy nothing is compiled, nor by a later run that installs nothing."""
    args = ("--device", "cpu", "--tools", "lint")
    assert not any(call.startswith("-c") for call in calls(*args, "--lazy"))
    assert calls(*args) == []
    (project / "requirements/lint.txt").write_text("new==1\n")
    assert calls(*args)[-1].startswith("-c")


def test_failure_is_told_and_tried_again(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").touch()
    failed = calls("--device", "cpu", status=1)
    log = tmp_path / "venv/log/env.log"
    assert f"failed; read {log}" in capsys.readouterr().err
    assert len(failed) == 2 and all(call in log.read_text() for call in failed)
    (tmp_path / "broken").unlink()
    assert "cpu-0.txt" in "".join(calls("--device", "cpu")[:2])


def test_wheel_of_another_hash_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip refuses it, in an environment that is made for the test."""
    wheel = trees.make_wheel(tmp_path / "wheels")
    pinned = wheel.read_bytes()
    (project / "UPSTREAM.toml").write_text(
        '[project]\nname = "vllm"\nversion = "0.33.0"\n'
        '[sdist]\nfile = ""\nsha256 = ""\n'
        f'[wheel.any]\nfile = "{wheel.name}"\n'
        f'sha256 = "{hashlib.sha256(pinned).hexdigest()}"\n'
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    folder = tmp_path / "venv"
    argv = ["env.py", "--venv", str(folder), "--device", "gpu"]
    monkeypatch.setattr(sys, "argv", argv)

    def installed() -> list[str]:
        return [path.name for path in folder.glob("lib/python*/site-packages/vllm*")]

    wheel.write_bytes(pinned + b"\0")
    assert env.main() == 1
    assert "DO NOT MATCH" in (folder / "log/env.log").read_text()
    assert installed() == []
    wheel.write_bytes(pinned)
    assert env.main() == 0
    assert sorted(installed()) == ["vllm", "vllm-0.33.0.dist-info"]


@pytest.mark.parametrize(
    ("listing", "status", "found"),
    [
        ("GPU 0: NVIDIA", 0, True),
        ("No devices were found", 0, False),
        ("GPU", 9, False),
    ],
)
def test_gpu_is_looked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listing: str,
    status: int,
    found: bool,
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{listing}'\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert env.has_gpu() is found
    tool.unlink()
    assert not env.has_gpu()
