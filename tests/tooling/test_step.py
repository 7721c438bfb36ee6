# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stepping a small series to other releases of the small vLLM."""

import os
import shutil
from pathlib import Path

import pytest
import trees
from turbo_series import cli, sdist
from turbo_series.lint import lint
from turbo_series.model import load_series
from turbo_series.operate import apply
from turbo_series.pins import find_pins
from turbo_series.target import open_target
from turbo_series.upstream import Pin, Upstream, load_upstream, to_toml
from turbo_series.verify import verify

OLD, NEW = "0.33.0", "0.34.0"
OFFSET = (".buildkite/steps.yaml", "steps:", "env: {}\nsteps:")
NEIGHBOUR = ("vllm/config/cache.py", "'auto'", "'automatic'")
RESOLVED = "# CI\n\nsteps:\n  - one\n  - 2\n  - turbo\n"
SAME_LINE = (".buildkite/steps.yaml", "  - two\n", "  - 2\n")
DELETED = ("vllm/platforms/cuda.py", "", "")


def _release(folder: Path, version: str, *changes: trees.Change) -> Pin:
    """Make the sdist of a release and pin it."""
    archive = trees.make_release(folder, version, *changes)
    return Pin(archive.name, sdist.sha256_of(archive))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's downloads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = sdist.cache_folder()
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def project(project: Path, cache: Path) -> Path:
    """The project, its series for the small vLLM's first release."""
    old = Upstream("vllm", OLD, _release(cache, OLD), {"x86_64": Pin("w", "0" * 64)})
    (project / "UPSTREAM.toml").write_text(to_toml(old))
    assert cli.main(project, ["index"]) == 0
    return project


class Step:
    """A step of the project to a release with some changes, whose pins are known.

    Attributes:
        project: The project's folder.
        work: The checkout that the step works in.

    """

    def __init__(self, project: Path, cache: Path, patch: pytest.MonkeyPatch) -> None:
        self.project, self.work = project, project / "build/step"
        self.cache, self.patch = cache, patch

    def start(self, *changes: trees.Change) -> int:
        new = Upstream("vllm", NEW, _release(self.cache, NEW, *changes), {})
        self.patch.setattr(cli.pins, "find_pins", lambda old, version: new)
        return self.run(NEW)

    def run(self, *args: str) -> int:
        return cli.main(self.project, ["step", *args])

    def git(self, *args: str) -> str:
        return trees.git(self.work, *args)

    def files(self) -> dict[str, bytes]:
        """The project's files, without those of the step's checkout."""
        return _files(self.project)

    def assert_applies(self, folder: Path) -> None:
        """Check that the whole series applies to the new release."""
        upstream = load_upstream(self.project)
        assert upstream.version == NEW
        sdist.unpack(sdist.download(upstream), folder, git=False)
        target = open_target(str(folder))
        series = load_series(self.project)
        apply(series, target)
        assert verify(series, target) == []
        assert cli.main(self.project, ["index", "--check"]) == 0


@pytest.fixture
def step(project: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    return Step(project, cache, monkeypatch)


def _files(project: Path) -> dict[str, bytes]:
    paths = (path for path in project.rglob("*") if path.is_file())
    found = {path.relative_to(project).as_posix(): path.read_bytes() for path in paths}
    return {path: data for path, data in found.items() if path[:6] != "build/"}


def _changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {path for path in before | after if before.get(path) != after.get(path)}


def _verdicts(said: str) -> dict[str, str]:
    lines = (line.split("  ", 1) for line in said.splitlines() if ".patch " in line)
    return {name: verdict.strip() for name, verdict in lines}


def test_without_conflict(
    step: Step, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = step.files()
    assert step.start(OFFSET, NEIGHBOUR) == 0
    assert _verdicts(capsys.readouterr().out) == {
        "cache-dtype.patch": "3-way",
        "backend.patch": "clean",
        "docs.patch": "clean",
        "ci-step.patch": "clean",
    }
    after = step.files()
    assert _changed(before, after) == {
        "UPSTREAM.toml",
        "patches/README.md",
        "patches/cache-dtype.patch",
        "patches/backend.patch",
        "patches/ci-step.patch",
    }
    step.assert_applies(tmp_path / "tree")
    assert cli.main(step.project, ["export", str(step.work), "--check"]) == 0
    step.git("switch", "-q", "--detach", "refs/turbo-step/new")
    rules = {finding.rule for finding in lint(step.project, step.work)}
    assert not rules & {"round-trip", "overlay-new"}


def test_conflict(
    step: Step, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written before all is resolved, and half a resolution is refused."""
    before = step.files()
    assert step.start(NEIGHBOUR, SAME_LINE) == 1
    said = capsys.readouterr().out
    assert _verdicts(said)["docs.patch"] == "clean"
    assert _verdicts(said)["ci-step.patch"] == "conflict, to be resolved"
    assert f"In {step.work} resolve and `git add` .buildkite/steps.yaml" in said

    def refused(reason: str) -> None:
        assert step.run("--continue") == 1
        assert reason in capsys.readouterr().err
        assert step.files() == before

    refused("resolve and `git add` .buildkite/steps.yaml")
    step.git("add", "-A")
    refused(".buildkite/steps.yaml:5: leftover conflict marker")
    path = step.work / ".buildkite/steps.yaml"
    path.write_text(RESOLVED)
    refused("resolve and `git add` .buildkite/steps.yaml")
    step.git("add", "-A")
    assert step.run("--continue") == 0
    said = capsys.readouterr().out
    conflict = "conflict in .buildkite/steps.yaml"
    assert list(_verdicts(said).values()) == ["3-way", "clean", "clean", conflict]
    work = said.partition(f"To look at, for vllm {NEW}:")[2]
    assert "  cache-dtype.patch: 3-way\n" in work
    assert f"  ci-step.patch: {conflict}\n" in work
    assert f"the series is for vllm {NEW} now" in said
    step.assert_applies(tmp_path / "tree")


def test_deleted_upstream(
    step: Step, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that the release lacks is named at once, and cannot be brought back."""
    assert step.start(DELETED, SAME_LINE) == 1
    said = capsys.readouterr().out
    path = DELETED[0]
    assert f"deleted upstream: {path}; `git rm` it" in said
    assert f"In {step.work} `git rm` {path}, or" in said
    step.git("add", path)
    for _ in range(2):
        assert step.run("--continue") == 1
        error = f"deleted upstream: {path}; `git rm` it"
        assert error in capsys.readouterr().err
    step.git("rm", "-q", "-f", path)
    assert step.run("--continue") == 1
    said = capsys.readouterr().out
    assert _verdicts(said)["backend.patch"] == f"deleted upstream: {path}"
    assert "conflict in .buildkite/steps.yaml\n" in said
    (step.work / ".buildkite/steps.yaml").write_text(RESOLVED)
    step.git("add", "-A")
    assert step.run("--continue") == 0
    assert f"  backend.patch: deleted upstream: {path}\n" in capsys.readouterr().out
    step.assert_applies(tmp_path / "tree")


@pytest.mark.parametrize("is_last", [True, False])
def test_brought_back_by_hand(
    step: Step, capsys: pytest.CaptureFixture[str], is_last: bool
) -> None:
    """Plain git may commit a file that the release lacks; the step then refuses it."""
    assert step.start(DELETED, *[SAME_LINE][is_last:]) == 1
    path = DELETED[0]
    step.git("add", path)
    git = ("-c", "core.editor=true")
    if is_last:
        step.git(*git, "rebase", "--continue")
    else:
        step.git("commit", "-q", "-C", "REBASE_HEAD")
    assert step.run("--continue") == 1
    said = capsys.readouterr().err
    assert f"deleted upstream: {path}, which '[Attention] Select the turbo" in said
    if is_last:
        todo = "sequence.editor=sed -i '2s/^pick/edit/'"
        step.git("-c", todo, "rebase", "-q", "-i", "refs/turbo-step/new", "turbo")
    step.git("rm", "-q", path)
    step.git("commit", "-q", "--amend", "--no-edit")
    assert step.run("--continue") == (0 if is_last else 1)
    assert "deleted upstream" not in capsys.readouterr().err


def test_list_of_a_step(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    """With --check it has all patches, behind conflicts as well; nothing is written."""
    path = "vllm/config/cache.py"
    changes = (path, "'fp8'", "'fp16'"), (path, "SIZE = 1", "SIZE = 3"), DELETED
    new = Upstream("vllm", NEW, _release(step.cache, NEW, *changes), {})
    asked = []
    step.patch.setattr(cli.pins, "find_pins", lambda *args: asked.append(args) or new)
    before = step.files()
    assert step.run(NEW, "--check") == 0
    ((old, version),) = asked
    assert (old.wheels, version) == ({}, NEW)
    said = capsys.readouterr().out
    assert "- patches that do not apply as they are: 2\n" in said
    assert f"  cache-dtype.patch: conflict in {path}\n" in said
    deleted = f"deleted upstream: {DELETED[0]}"
    assert f"  backend.patch: conflict in {path}; {deleted}\n" in said
    assert "gone: 0\n" in said
    assert step.files() == before and not step.work.exists()
    assert step.run("--continue", "--check") == 1
    assert "--check is for a VERSION" in capsys.readouterr().err


def test_names_that_the_overlay_uses(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lost one is said at the first stop, and in the end if it is still lost."""
    path = "vllm/turbo/format.py"
    text = trees.SPDX + "from vllm.platforms.cuda import backend\nBACKEND = backend()\n"
    (step.project / "vllm_overlay" / path).write_text(text)
    lost = f"vllm_overlay/{path}:3 imports vllm.platforms.cuda.backend, which is gone"
    assert step.start(DELETED) == 1
    assert f"  {lost}\n" in capsys.readouterr().out
    step.git("rebase", "--skip")
    assert step.run("--continue") == 0
    work = capsys.readouterr().out.partition("To look at")[2]
    assert f"  {lost}\n" in work
    assert "  backend.patch: dropped\n" in work


def test_continued_by_hand(step: Step, tmp_path: Path) -> None:
    """Plain git may end the rebase as well."""
    assert step.start(SAME_LINE) == 1
    (step.work / ".buildkite/steps.yaml").write_text(RESOLVED)
    step.git("add", "-A")
    step.git("-c", "core.editor=true", "rebase", "--continue")
    (step.work / "setup.py").write_text("mine\n")
    assert step.run("--continue") == 1
    step.git("checkout", "-q", "setup.py")
    assert step.run("--continue") == 0
    step.assert_applies(tmp_path / "tree")


def test_dropped_patch(
    step: Step, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step.start(SAME_LINE) == 1
    step.git("rebase", "--skip")
    assert step.run("--continue") == 0
    assert _verdicts(capsys.readouterr().out)["ci-step.patch"] == "dropped"
    assert "ci-step" not in (step.project / "patches/series").read_text()
    assert not (step.project / "patches/ci-step.patch").exists()
    assert not (step.project / "vllm_overlay/tests").exists()
    step.assert_applies(tmp_path / "tree")


def test_abort(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is as it was, and the series' branch as well."""
    before = step.files()
    assert step.start(SAME_LINE) == 1
    assert step.run("--abort") == 0
    assert step.files() == before
    assert step.git("status", "--porcelain") == ""
    assert step.git("branch", "--show-current") == "turbo\n"
    assert cli.main(step.project, ["export", str(step.work), "--check"]) == 0
    for word in ("--continue", "--abort"):
        assert step.run(word) == 1
        assert f"no step is under way in {step.work}" in capsys.readouterr().err
    assert step.start() == 1
    assert "exists and is not empty" in capsys.readouterr().err
    shutil.rmtree(step.work)
    assert step.start() == 0


def test_changes_of_the_project_meanwhile(step: Step, tmp_path: Path) -> None:
    """The step does not write over them."""
    assert step.start(SAME_LINE) == 1
    step.git("rebase", "--skip")
    overlay = step.project / "vllm_overlay/vllm/turbo"
    changes: list[tuple[Path, bytes | None]] = [
        (overlay / "format.py", b"mine\n"),
        (overlay / "new.py", b"mine\n"),
        (overlay / "format.py", None),
        (step.project / "patches/backend.patch", b"mine\n"),
        (step.project / "UPSTREAM.toml", None),
    ]
    for path, data in changes:
        before = path.read_bytes() if path.exists() else None
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        changed = step.files()
        assert step.run("--continue") == 1
        assert step.files() == changed
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
    assert step.run("--continue") == 0


def test_interrupted_write(step: Step, tmp_path: Path) -> None:
    """A write that was interrupted is made again as a whole."""
    assert step.start(SAME_LINE, NEIGHBOUR, OFFSET) == 1
    step.git("rebase", "--skip")
    copy = Path(shutil.copytree(step.project, tmp_path / "copy"))
    assert step.run("--continue") == 0
    whole = step.files()
    old = _files(copy)
    changed = sorted(_changed(old, whole))
    for path in changed[::2]:
        if path in whole:
            (copy / path).write_bytes(whole[path])
        else:
            (copy / path).unlink()
    assert cli.main(copy, ["step", "--continue"]) == 0
    assert _files(copy) == whole


@pytest.mark.parametrize(
    "args", [[], [NEW, "--continue"], ["--continue", "--abort"], [NEW, NEW]]
)
def test_arguments(step: Step, args: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        step.run(*args)


def test_without_a_name_of_ones_own(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's configuration does not matter, nor that there is none."""
    for name in list(os.environ):
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    config = step.project.parent / "gitconfig"
    config.write_text("[core]\nautocrlf = true\n[rebase]\nautosquash = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    assert step.start(OFFSET) == 0


def test_pins(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pins are of the sdist and of each machine's wheel, whatever its glibc."""
    dists = tmp_path / "dists"
    pyproject = (
        "[build-system]\nrequires = []\nbuild-backend = 'setuptools.build_meta'\n"
    )
    change = ("pyproject.toml", "[project]\nname = 'vllm'\n", pyproject)
    source = _release(dists, NEW, change)
    wheels = {}
    for arch, glibc in (("x86_64", "2_28"), ("aarch64", "2_35")):
        path = trees.make_wheel(dists, NEW)
        name = f"vllm-{NEW}-cp38-abi3-manylinux_{glibc}_{arch}.whl"
        path.rename(dists / name)
        wheels[arch] = Pin(name, sdist.sha256_of(dists / name))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(dists))
    old = Upstream("vllm", OLD, Pin("", ""), {arch: Pin("", "") for arch in wheels})
    assert find_pins(old, NEW) == Upstream("vllm", NEW, source, wheels)
    assert sdist.sha256_of(cache / source.file) == source.sha256
