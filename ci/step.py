# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Steps a copy of the series to a release that is made from the pinned one.

In the made release, lines near the series' own have moved in a few files, and nothing
calls a method that the overlay overrides. The step has to report how each patch
applies, to find that method and nothing else, and to stop at the patch with a conflict.
CHECKOUT is the pinned release as `series.py sdist --git` makes it; it is not changed.
"""

import argparse
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from turbo_series import cli, sdist  # noqa: E402
from turbo_series.git import Git  # noqa: E402
from turbo_series.model import load_series  # noqa: E402
from turbo_series.upstream import PIN_FILE, Pin, Upstream, load_upstream  # noqa: E402

VERSION = "999.0.0"
# Text of the pinned release and its replacement in the made one, by file.
MOVED = {
    "PKG-INFO": ("\nVersion: ", "\nVersion: 999+"),
    # Far above any hunk.
    "vllm/platforms/interface.py": ("import", "# A line more.\nimport"),
    # In a hunk's context, but not beside its lines.
    "vllm/config/cache.py": (
        '    "turboquant_4bit_nc",\n    "turboquant_k3v4_nc",\n',
        '    "turboquant_k3v4_nc",\n    "turboquant_4bit_nc",\n',
    ),
    # Beside a hunk's line.
    "vllm/v1/attention/backends/registry.py": (
        "    # Placeholder for third-party/custom backends - must",
        '    OTHER = "other.Backend"\n    # Placeholder for custom backends - must',
    ),
    "vllm/model_executor/layers/attention/mla_attention.py": (
        "            self.impl.reserve_workspace()\n",
        "            pass\n",
    ),
}
VERDICTS = {
    "add-the-turbo-cache-dtypes.patch": "3-way",
    "register-the-turbo-backend.patch": "conflict, to be resolved",
}
LOST = ["overrides MLAAttentionImpl.reserve_workspace, which nothing reads any more"]


def make_release(checkout: Path, folder: Path) -> Upstream:
    """Packs the checkout's commit with the moved lines; returns its pin."""
    git = Git(checkout)
    tree, archive = folder / "tree", folder / f"vllm-{VERSION}.tar"
    git.out("worktree", "add", "--quiet", "--detach", str(tree), "main")
    try:
        for path, (old, new) in MOVED.items():
            text = (tree / path).read_text()
            assert old in text, path
            (tree / path).write_text(text.replace(old, new, 1))
        stash = Git(tree).text("stash", "create")
        prefix = f"--prefix=vllm-{VERSION}/"
        git.out("archive", prefix, f"--output={archive}", stash)
    finally:
        git.out("worktree", "remove", "--force", str(tree))
    return Upstream("vllm", VERSION, Pin(archive.name, sdist.sha256_of(archive)), {})


def copy_project(folder: Path) -> Path:
    """Copies the files that a step reads and writes."""
    for name in ("patches", "vllm_overlay"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / PIN_FILE, folder)
    return folder


def step(checkout: Path, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Returns how each patch comes to the made release, and the findings."""
    old = sdist.download(load_upstream(ROOT))
    cache = folder / "cache" / "vllm-turbo"
    cache.mkdir(parents=True)
    (cache / old.name).symlink_to(old)
    new = make_release(checkout, cache)
    project = copy_project(folder / "project")
    said = io.StringIO()
    with (
        patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")),
        patch.object(cli.pins, "find_pins", lambda *_: new),
        contextlib.redirect_stdout(said),
    ):
        status = cli.main(project, ["step", VERSION])
    print(said.getvalue(), end="")
    assert status == 1, "the step did not stop at the conflict"
    lines = said.getvalue().splitlines()
    rows = (line.split("  ", 1) for line in lines)
    verdicts = {row[0]: row[1].strip() for row in rows if row[0].endswith(".patch")}
    found = [line.strip() for line in lines if line.startswith("  vllm_overlay/")]
    # A finding may have more places than the first.
    return verdicts, [re.sub(r"^\S+( and \d+ more)? ", "", line) for line in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="the pinned release")
    with tempfile.TemporaryDirectory() as scratch:
        found, lost = step(parser.parse_args().checkout.resolve(), Path(scratch))
    names = [each.name for each in load_series(ROOT).patches]
    last = names.index("register-the-turbo-backend.patch")
    wanted = {name: VERDICTS.get(name, "clean") for name in names[: last + 1]}
    for name in wanted.keys() | found.keys():
        if wanted.get(name) != found.get(name):
            print(f"{name}: {found.get(name)}, not {wanted.get(name)}")
    if lost != LOST:
        print(f"findings: {lost}, not {LOST}")
    return 0 if (found, lost) == (wanted, LOST) else 1


if __name__ == "__main__":
    sys.exit(main())
