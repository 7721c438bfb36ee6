# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What scripts/env.py installs, and that it installs nothing else."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import env
import pytest
import trees

ROOT = Path(__file__).resolve().parents[2]
STUB = """#!/bin/sh
# A Python that notes how it is called, and what the requirements file holds.
echo "$*" >>"{log}"
for word; do
  case $word in *vllm.txt) cat "$word" >>"{log}"; echo >>"{log}" ;; esac
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
    return root


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run env.py on an environment whose Python is a stub; return what it was told."""
    folder = tmp_path / "venv"
    log = tmp_path / "calls"
    python = folder / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB.format(log=log, broken=tmp_path / "broken"))
    python.chmod(0o755)
    # The environment itself is there.
    (folder / env.STAMPS).write_text(json.dumps({"venv": env.interpreter_key()}))

    def run(*args: str, status: int = 0) -> list[str]:
        log.write_text("")
        argv = ["env.py", "--venv", str(folder), *args]
        monkeypatch.setattr(sys, "argv", argv)
        assert env.main() == status
        return log.read_text().splitlines()

    return run


def _pin() -> str:
    """The line that pins vLLM, read from the pin file by other means."""
    hashes = []
    for line in (ROOT / "UPSTREAM.toml").read_text().split("[wheel.", 1)[1].split("\n"):
        if line.startswith("sha256"):
            hashes.append(line.split('"')[1])
    version = (ROOT / "UPSTREAM.toml").read_text().split('version = "')[1].split('"')[0]
    assert len(hashes) == 2
    return f"vllm=={version} " + " ".join(f"--hash=sha256:{h}" for h in hashes)


def test_cpu(project: Path, calls: Callable[..., list[str]]) -> None:
    """The pins, the wheel without its dependencies and by its hashes, our stand-ins."""
    pins, wheel, pin, standins, tools = calls("--device", "cpu", "--tools", "test")
    assert f"install -r {project}/requirements/cpu.txt" in pins
    for option in ("--no-deps", "--only-binary=vllm", "--require-hashes"):
        assert option in wheel.split()
    assert pin == _pin()
    assert "--no-deps" in standins.split() and "cpu_standins" in standins
    assert f"install -r {project}/requirements/test.txt" in tools


def test_gpu(project: Path, calls: Callable[..., list[str]]) -> None:
    """The wheel by its hashes, and then what it asks for; nothing of ours."""
    wheel, pin, dependencies = calls("--device", "gpu")
    assert "--require-hashes" in wheel.split() and "--no-deps" in wheel.split()
    assert pin == _pin()
    assert f"install {pin.split()[0]}" in dependencies
    assert "--no-deps" not in dependencies.split()


def test_what_is_installed_stays(
    project: Path, calls: Callable[..., list[str]]
) -> None:
    """A second run does nothing; what has changed since is installed again."""
    args = ("--device", "cpu", "--tools", "lint")
    assert len(calls(*args)) == 5
    assert calls(*args) == []
    (project / "requirements/lint.txt").write_text("new==1\n")
    (call,) = calls(*args)
    assert call.endswith(" ".join(env.PIP_OPTIONS)) and "lint.txt" in call
    upstream = project / "UPSTREAM.toml"
    old = _pin().rsplit(":", 1)[1]
    upstream.write_text(upstream.read_text().replace(old, "0" * 64))
    _, pin = calls(*args)
    assert pin.endswith(f"sha256:{'0' * 64}")


def test_failure_is_told_and_tried_again(
    project: Path,
    calls: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken").touch()
    (call,) = calls("--device", "cpu", status=1)
    log = tmp_path / "venv/log/env.log"
    assert f"failed; read {log}" in capsys.readouterr().err
    assert call in log.read_text()
    (tmp_path / "broken").unlink()
    assert calls("--device", "cpu")[0] == call


def test_wheel_of_another_hash_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pip itself, in an environment that is made for it."""
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
