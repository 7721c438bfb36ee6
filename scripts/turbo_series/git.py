# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run git without letting the caller's environment redirect it."""

import contextlib
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from .errors import MissingToolError, SeriesError

# A surrounding hook or `git rebase --exec` exports GIT_DIR, GIT_INDEX_FILE and the
# like; any of them would send our commands to another repository.
_KEPT = {
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_SYSTEM",
    "GIT_CONFIG_NOSYSTEM",
    "GIT_EXEC_PATH",
    "GIT_COMMITTER_NAME",
    "GIT_COMMITTER_EMAIL",
}


class Git:
    """git in one folder.

    Args:
        folder: where commands run.
        isolated: ignore the user's and the system's configuration, so that output
            does not depend on who runs it. Not for a repository of the user, whose
            configuration may be what allows git to open it (`safe.directory`).
        env: variables set on top.

    """

    def __init__(
        self,
        folder: Path,
        isolated: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("GIT_") or name in _KEPT
        }
        self.env = {**kept, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
        if isolated:
            self.env |= {
                # HOME as well, for a git that does not know GIT_CONFIG_GLOBAL yet.
                "HOME": str(folder),
                "XDG_CONFIG_HOME": str(folder),
                "GIT_CONFIG_GLOBAL": os.devnull,
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
            }
        self.env |= env or {}

    def run(
        self,
        *args: str,
        data: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run a command and return it, whatever its exit status."""
        try:
            return subprocess.run(
                ["git", *args],
                cwd=self.folder,
                env={**self.env, **(env or {})},
                input=data,
                stdin=subprocess.DEVNULL if data is None else None,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            if not self.folder.is_dir():
                raise SeriesError(f"{self.folder}: no such folder") from None
            raise MissingToolError("git is not installed or not on PATH") from None

    def out(
        self,
        *args: str,
        data: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run a command that must succeed and return its standard output."""
        done = self.run(*args, data=data, env=env)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            reason = lines[0] if lines else f"exit status {done.returncode}"
            raise SeriesError(f"git {args[0]} in {self.folder}: {reason}")
        return done.stdout

    def text(self, *args: str, env: Mapping[str, str] | None = None) -> str:
        """`out`, decoded and stripped."""
        return self.out(*args, env=env).decode().strip()


@contextlib.contextmanager
def scratch(init: bool = True) -> Iterator[Git]:
    """A temporary folder, a repository of its own unless `init` is False."""
    with tempfile.TemporaryDirectory(prefix="turbo-series-") as name:
        git = Git(Path(name), isolated=True)
        if init:
            git.out("-c", "init.defaultBranch=main", "init", "--quiet", "--template=")
        yield git


def blob_id(data: bytes) -> str:
    """The id that git gives to a blob with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
