# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A small vLLM, a series for it, and ways to look at trees."""

import base64
import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from turbo_series.errors import SeriesError
from turbo_series.model import Series, load_series

ROOT = Path(__file__).resolve().parents[2]
Done = subprocess.CompletedProcess[str]
SPDX = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)
BASE = {
    "setup.py": "package_data = [\n    'a',\n    'b',\n]\n",
    "pyproject.toml": "[project]\nname = 'vllm'\n",
    ".buildkite/steps.yaml": "# CI\n\nsteps:\n  - one\n  - two\n",
    "tests/test_base.py": "def test_base():\n    pass\n",
    "vllm/__init__.py": "from vllm.config.cache import DTYPES\n",
    "vllm/_version.py": "__version__ = version = '0.33.0'\n",
    "vllm/config/__init__.py": "",
    "vllm/config/cache.py": "DTYPES = [\n    'auto',\n    'fp8',\n]\nSIZE = 1\n",
    "vllm/platforms/cuda.py": "def backend():\n    return 'flash'\n",
}
PKG_INFO = "Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\n"
OVERLAY = {
    "vllm/turbo/__init__.py": SPDX,
    "vllm/turbo/format.py": SPDX + "BITS = 4\n",
    "vllm/turbo/csrc/kernel.cu": SPDX.replace("#", "//") + "int x;\n",
    "tests/turbo/test_format.py": SPDX + "def test_bits():\n    pass\n",
    "docs/turbo.md": "# Turbo\n",
}
# Name, subject, edits as (path, old, new), overlay globs. An entry may edit nothing.
PATCHES = (
    (
        "cache-dtype.patch",
        "[Core] Add the turbo cache dtype",
        [("vllm/config/cache.py", "    'fp8',\n", "    'fp8',\n    'turbo',\n")],
        ["vllm/turbo/*.py"],
    ),
    (
        "backend.patch",
        "[Attention] Select the turbo backend for its cache dtype, and pack sources",
        [
            ("setup.py", "    'b',\n", "    'b',\n    'cu',\n"),
            ("vllm/config/cache.py", "SIZE = 1\n", "SIZE = 2\n"),
            ("vllm/platforms/cuda.py", "'flash'", "'turbo'"),
        ],
        ["vllm/turbo/csrc/**"],
    ),
    (
        "docs.patch",
        "[Docs] Describe the turbo cache dtype",
        [],
        ["docs/turbo.md"],
    ),
    (
        "ci-step.patch",
        "[CI] Run the turbo tests",
        [(".buildkite/steps.yaml", "  - two\n", "  - two\n  - turbo\n")],
        ["tests/**"],
    ),
)
AUTHOR = {
    "GIT_AUTHOR_NAME": "Zoë Example",
    "GIT_AUTHOR_EMAIL": "zoe@example.com",
    "GIT_AUTHOR_DATE": "2026-01-05T10:00:00+0100",
    "GIT_COMMITTER_NAME": "Someone Else",
    "GIT_COMMITTER_EMAIL": "else@example.com",
    "GIT_CONFIG_GLOBAL": os.devnull,
}
FORMAT = (
    "--keep-subject --no-stat --no-signature --zero-commit --full-index "
    "--no-encode-email-headers --always"
)


def run(*command: object, **options: Any) -> Done:
    """Run a command, whose output is captured as text."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, **options)


def git(folder: Path, *args: str) -> str:
    """Run git plainly, apart from the code under test."""
    env = {**os.environ, **AUTHOR}
    return run("git", *args, cwd=folder, env=env, check=True).stdout


def write_tree(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode())


def make_checkout(root: Path) -> Path:
    """A git repository that holds the base as its one commit."""
    write_tree(root, BASE)
    git(root, "init", "-q", "-b", "main", "--template=")
    git(root, "add", "-A", "-f")
    git(root, "commit", "-q", "-m", "base")
    return root


def make_sdist(root: Path) -> Path:
    write_tree(root, {**BASE, "PKG-INFO": PKG_INFO})
    return root


# A change of the base, as (path, old, new); with an empty old text a file is deleted.
Change = tuple[str, str, str]


def make_release(folder: Path, version: str, *changes: Change) -> Path:
    """The packed sdist of another release of the base."""
    top = make_sdist(folder / f"vllm-{version}")
    (top / "PKG-INFO").write_text(PKG_INFO.replace("0.33.0", version))
    for path, old, new in changes:
        if not old:
            (top / path).unlink()
            continue
        text = (top / path).read_text()
        assert text.count(old) == 1
        (top / path).write_text(text.replace(old, new))
    archive = folder / f"vllm-{version}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(top, arcname=top.name)
    shutil.rmtree(top)
    return archive


def _record_line(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"{path},sha256={digest.decode().rstrip('=')},{len(data)}\n"


def wheel_files(version: str = "0.33.0") -> dict[str, bytes]:
    """The contents of a wheel of the base."""
    info = f"vllm-{version}.dist-info"
    files = {p: t.encode() for p, t in BASE.items() if p.startswith("vllm/")}
    files[f"{info}/METADATA"] = PKG_INFO.replace("0.33.0", version).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nTag: py3-none-any\n"
    record = "".join(_record_line(path, data) for path, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    return files


def make_wheel(folder: Path, version: str = "0.33.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in wheel_files(version).items():
            # A fixed date: pip notes the hash of the file it installed from.
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


def make_installed(root: Path, version: str = "0.33.0") -> Path:
    """A site-packages folder as an installer leaves it."""
    for path, data in wheel_files(version).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


MAKERS = {"checkout": make_checkout, "sdist": make_sdist, "installed": make_installed}


def message(subject: str, globs: list[str], guard: str) -> str:
    lines = [
        subject,
        "",
        "Why this is needed – in a sentence.",
        "",
        "Upstream-Status: Pending",
        "Drop-When: vLLM has it",
        f"Guarded-By: {guard}",
        *(f"Overlay: {glob}" for glob in globs),
        "Signed-off-by: Zoë Example <zoe@example.com>",
    ]
    return "\n".join(lines) + "\n"


def make_project(root: Path, work: Path) -> Path:
    """A project folder with the series, its patches written by plain git."""
    write_tree(root, {f"vllm_overlay/{path}": text for path, text in OVERLAY.items()})
    shutil.copy(ROOT / "UPSTREAM.toml", root / "UPSTREAM.toml")
    order = ["# The order.", ""]
    (root / "patches").mkdir()
    make_checkout(work)
    for name, subject, edits, globs in PATCHES:
        for path, old, new in edits:
            text = (work / path).read_text()
            assert text.count(old) == 1
            (work / path).write_text(text.replace(old, new))
        text = message(subject, globs, "tests/turbo/test_format.py::test_bits")
        how = ("-q", "-a", "--allow-empty", "--cleanup=verbatim")
        git(work, "commit", *how, "-m", text)
        patch = git(work, "format-patch", "--stdout", *FORMAT.split(), "-1")
        (root / "patches" / name).write_bytes(patch.encode())
        order += [f"# About {name}.", name]
    (root / "patches" / "series").write_text("\n".join(order) + "\n")
    return root


def expected(kind: str) -> dict[str, bytes]:
    """The files of a tree of this kind with the series applied."""
    files = {**BASE, **OVERLAY}
    for _, _, edits, _ in PATCHES:
        for path, old, new in edits:
            files[path] = files[path].replace(old, new)
    return {
        path: text.encode()
        for path, text in files.items()
        if kind != "installed" or path.startswith("vllm/")
    }


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """Each file's mode and bytes, and each folder, without git's and Python's own."""
    found = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if {".git", "__pycache__"} & set(relative.parts):
            continue
        mode = stat.S_IMODE(path.lstat().st_mode)
        found[relative.as_posix()] = (mode, b"" if path.is_dir() else path.read_bytes())
    return found


@contextmanager
def refusing(root: Path, words: str) -> Iterator[pytest.ExceptionInfo[SeriesError]]:
    """Expect a SeriesError with some words, and a tree that stays as it was."""
    before = snapshot(root)
    with pytest.raises(SeriesError, match=words) as error:
        yield error
    assert snapshot(root) == before


def contents(root: Path, paths: dict[str, bytes]) -> dict[str, bytes]:
    """The bytes of the `paths` that exist."""
    return {p: (root / p).read_bytes() for p in paths if (root / p).is_file()}


def project_with(project: Path, names: list[str]) -> Series:
    """The series cut down to some patches, which apply to the base without the rest."""
    work = project.parent / "cut"
    make_checkout(work)
    for name, _, edits, _ in PATCHES:
        if name not in names:
            (project / "patches" / name).unlink()
            continue
        for path, old, new in edits:
            text = (work / path).read_text()
            (work / path).write_text(text.replace(old, new))
        git(work, "commit", "-q", "-a", "-m", "[Core] Cut")
        patch = git(work, "format-patch", "--stdout", *FORMAT.split(), "-1")
        (project / "patches" / name).write_bytes(patch.encode())
    (project / "patches/series").write_text("\n".join(names) + "\n")
    return load_series(project)
