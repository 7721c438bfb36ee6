# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each lint rule against a series that keeps it and one that breaks it.

A fixture `<rule>.pass` or `<rule>.fail`, or one of a case, as `<rule>.<case>.fail`, is
a series of one patch, or a `.tree`: the files of a series one after the other, each
below a line `==> path <==`.
"""

import re
import shutil
from pathlib import Path

import pytest
import trees
from turbo_series import cli, lint
from turbo_series.model import load_series

FIXTURES = Path(__file__).parent / "fixtures"
ALL_RULES = {*lint.RULES, *lint.BASE_RULES, *lint.READ_RULES}
GUARD = "def test_it():\n    pass\n"
STATUS = "Upstream-Status: Pending"


def _unpack(text: str) -> dict[str, str]:
    parts = re.split(r"^==> (.+) <==\n", text, flags=re.MULTILINE)
    assert parts[0] == ""
    return dict(zip(parts[1::2], parts[2::2]))


def _project(root: Path, files: dict[str, str]) -> Path:
    trees.write_tree(root, {"tests/test_guard.py": GUARD, **files})
    shutil.copy(trees.ROOT / "UPSTREAM.toml", root)
    return root


def _of_patch(text: str) -> dict[str, str]:
    name = "cache-dtype.patch"
    return {"patches/series": f"{name}\n", f"patches/{name}": text}


def _edited(fixture: str, *edits: tuple[str, str]) -> dict[str, str]:
    """The series of a patch that passes, with the first text of each pattern edited."""
    text = (FIXTURES / f"{fixture}.pass.patch").read_text()
    for pattern, new in edits:
        text = re.sub(pattern, new, text, count=1, flags=re.MULTILINE)
    return _of_patch(text)


def _fixture(rule: str, verdict: str) -> dict[str, str]:
    (path,) = FIXTURES.glob(f"{rule}.{verdict}.*")
    return _files(path)


def _files(path: Path) -> dict[str, str]:
    text = path.read_bytes().decode()
    return _unpack(text) if path.suffix == ".tree" else _of_patch(text)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    root = trees.make_checkout(tmp_path / "base")
    (root / "docs").mkdir()
    (root / "docs/base.md").write_text("# Base\n")
    return root


def test_every_rule_has_fixtures() -> None:
    """A rule has a fixture that passes and one that fails, and each fixture a rule."""
    names = [path.name.split(".") for path in FIXTURES.iterdir()]
    plain = {(rule, verdict) for rule, verdict, _ in (n for n in names if len(n) == 3)}
    assert plain == {
        (rule, verdict) for rule in ALL_RULES for verdict in ("fail", "pass")
    }
    assert {(name[0], name[-2]) for name in names} == plain


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_rule(name: str, tmp_path: Path, base: Path) -> None:
    """A series that passes has no finding; one that fails has findings of its rule."""
    rule, *_, verdict, _ = name.split(".")
    tree = base if rule in lint.BASE_RULES else None
    found = lint.lint(_project(tmp_path / "p", _files(FIXTURES / name)), tree)
    assert {finding.rule for finding in found} == (
        {rule} if verdict == "fail" else set()
    )


def _lines(tmp_path: Path, files: dict[str, str]) -> list[str]:
    return [str(finding) for finding in lint.lint(_project(tmp_path / "p", files))]


def _findings(tmp_path: Path, files: dict[str, str]) -> set[str]:
    return {line.partition(":")[0] for line in _lines(tmp_path, files)}


def test_findings_are_printed_and_counted(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status says whether there are any, with a base and without."""
    good = _project(tmp_path / "good", _fixture("round-trip", "pass"))
    bad = _project(tmp_path / "bad", _fixture("round-trip", "fail"))
    worse = _project(tmp_path / "worse", _fixture("size", "fail"))
    against = ["lint", "--base", str(base)]
    for root, args, status in (
        (good, ["lint"], 0),
        (good, against, 0),
        (bad, ["lint"], 0),
        (bad, against, 1),
        (worse, ["lint"], 1),
    ):
        assert cli.main(root, args) == status
        said = capsys.readouterr().out
        assert said.startswith(
            "lint: no findings" if status == 0 else ("round-trip: ", "size: ")
        )


CANONICAL_BREACHES = {
    "commit id": (r"\AFrom 0", "From 1"),
    "mail prefix": (r"Subject: ", "Subject: [PATCH] "),
    "numbered": (r"Subject: ", "Subject: [PATCH 1/2] "),
    "unfolded subject": (r"(Subject: .*)\n ", r"\1 "),
    "stat": (r"\n\ndiff --git", r"\n---\n x | 1 +\n\ndiff --git"),
    "short ids": (r"index (.{9}).*\.\.(.{9}).* ", r"index \1..\2 "),
    "encoded name": ("Zoë", "=?UTF-8?q?Zo=C3=AB?="),
    "other prefixes": (r"--- a/(.*)\n\+\+\+ b/", r"--- i/\1\n+++ w/"),
    "extra header": (r"Subject: ", r"X-Mailer: x\nSubject: "),
    "blank line at the end": (r"\Z", r"\n"),
}


@pytest.mark.parametrize("breach", CANONICAL_BREACHES)
def test_canonical_breaches(breach: str, tmp_path: Path) -> None:
    broken = _edited("canonical", CANONICAL_BREACHES[breach])
    assert broken != _fixture("canonical", "pass")
    assert "canonical" in _findings(tmp_path, broken)


@pytest.mark.parametrize(
    ("value", "legal"),
    [
        ("Pending", True),
        ("Submitted https://example.com/pull/1", True),
        ("Tracked https://example.com/pull/1", True),
        ("Tracked https://example.com/pull/1 https://example.com/issues/2", True),
        ("Backport 0123abc", True),
        ("Denied https://example.com/pull/1", True),
        ("Inappropriate for this project only", True),
        ("Submitted", False),
        ("Tracked", False),
        ("Tracked #1", False),
        ("Tracked https://example.com/pull/1 and more", False),
        ("Backport later", False),
        ("Inappropriate", False),
        ("pending", False),
    ],
)
def test_upstream_status(value: str, legal: bool, tmp_path: Path) -> None:
    drop_when = ("Drop-When: .*", "Drop-When: #1 or #2 is merged")
    files = _edited("size", (STATUS, f"Upstream-Status: {value}"), drop_when)
    assert ("trailers" in _findings(tmp_path, files)) is not legal


@pytest.mark.parametrize(
    ("when", "named"),
    [
        ("#46461 is merged", True),
        ("vLLM merges #46461 or another", True),
        ("vLLM looks at each request", False),
        ("#464610 is merged", False),
    ],
)
def test_tracked_change_ends_the_patch(when: str, named: bool, tmp_path: Path) -> None:
    """A patch that tracks somebody else's pull request waits for that one."""
    status = "Upstream-Status: Tracked https://example.com/pull/46461/files"
    files = _edited("size", (STATUS, status), ("Drop-When: .*", f"Drop-When: {when}"))
    wanted = "tracked: cache-dtype.patch: Drop-When does not name #46461"
    assert _lines(tmp_path, files) == ([] if named else [wanted])


@pytest.mark.parametrize("key", lint.REQUIRED)
def test_required_trailers(key: str, tmp_path: Path) -> None:
    lines = _lines(tmp_path, _edited("size", (rf"^{key}: .*\n", "")))
    assert f"trailers: cache-dtype.patch has no {key}" in lines


@pytest.mark.parametrize(
    ("subject", "legal"),
    [
        ("[Core] Add a dtype", True),
        ("[V1/Attention] Embed a dtype", True),
        ("Add a dtype", False),
        ("[core] Add a dtype", False),
        ("[Core] add a dtype", False),
        ("[Core] Added a dtype", False),
        ("[Core] Adding a dtype", False),
        ("[Core] Add a dtype.", False),
        ("[Core] Add " + "x" * 61, True),
        ("[Core] Add " + "x" * 62, False),
    ],
)
def test_subjects(subject: str, legal: bool, tmp_path: Path) -> None:
    files = _edited("size", (r"^Subject: .*$", f"Subject: {subject}"))
    assert ("subject" in _findings(tmp_path, files)) is not legal


@pytest.mark.parametrize(
    ("path", "legal"),
    [
        ("vllm/v1/core/kv_cache_manager.py", False),
        ("vllm/v1/core/sched/scheduler.py", False),
        ("vllm/v1/worker/gpu_model_runner.py", False),
        ("vllm/v1/worker/cpu_model_runner.py", False),
        ("vllm/v1/worker/gpu/model_runner.py", False),
        # Drafters are no model runners.
        ("vllm/v1/worker/gpu/spec_decode/eagle/speculator.py", True),
    ],
)
def test_paths_to_keep_off(path: str, legal: bool, tmp_path: Path) -> None:
    text = (FIXTURES / "hands-off.pass.patch").read_text()
    text = text.replace("vllm/v1/worker/gpu_worker.py", path)
    assert ("hands-off" in _findings(tmp_path, _of_patch(text))) is not legal


def test_two_owners(tmp_path: Path) -> None:
    files = _fixture("series-complete", "pass")
    for name, text in files.items():
        if name.endswith(".patch"):
            sign = "Signed-off-by"
            files[name] = text.replace(sign, f"Overlay: docs/**\n{sign}", 1)
    files["vllm_overlay/docs/a.md"] = "a\n"
    assert _findings(tmp_path, files) == {"overlay-owned"}


def test_owner_by_name(tmp_path: Path) -> None:
    """The patch that names a file in full owns it, whatever globs others have."""
    files = _fixture("series-complete", "pass")
    sign = "Signed-off-by"
    for name, glob in (("cache-dtype", "docs/a.md"), ("pages", "docs/*")):
        text = files[f"patches/{name}.patch"]
        text = text.replace(sign, f"Overlay: {glob}\n{sign}", 1)
        files[f"patches/{name}.patch"] = text
    files |= {"vllm_overlay/docs/a.md": "a\n", "vllm_overlay/docs/b.md": "b\n"}
    root = _project(tmp_path / "p", files)
    assert lint.lint(root) == []
    series = load_series(root)
    assert {patch.name: series.overlay_of(patch) for patch in series.patches} == {
        "cache-dtype.patch": ["docs/a.md"],
        "pages.patch": ["docs/b.md"],
    }


def test_unlisted_and_repeated_patches(tmp_path: Path) -> None:
    files = _fixture("series-complete", "pass")
    files["patches/series"] = "cache-dtype.patch\ncache-dtype.patch\n"
    lines = _lines(tmp_path, files)
    assert {line for line in lines if line.startswith("series-complete: ")} == {
        "series-complete: cache-dtype.patch is listed 2 times",
        "series-complete: pages.patch is not listed in series",
    }
