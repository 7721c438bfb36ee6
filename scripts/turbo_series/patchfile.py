# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parse one patch file: header, trailers, and the change of each file."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from .errors import MissingToolError, SeriesError
from .git import Git, scratch

_DIFF = re.compile(rb"diff --git a/(.+) b/(.+)")
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_INDEX = re.compile(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)( [0-7]{6})?")
_KINDS = (
    (b"new file mode", "added"),
    (b"deleted file mode", "deleted"),
    (b"rename ", "renamed"),
    (b"copy ", "copied"),
    (b"old mode ", "mode changed"),
    (b"GIT binary patch", "binary"),
    (b"Binary files ", "binary"),
)


@dataclass(frozen=True)
class FileDiff:
    """What a patch does to one file.

    `kind` is "edited" for a plain edit, the only kind that a series may hold.
    `text` is the diff as it stands in the patch.
    """

    path: str
    kind: str
    old_id: str
    new_id: str
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    text: bytes


@dataclass(frozen=True)
class Patch:
    """A parsed patch. `message` is the commit message, subject first."""

    name: str
    data: bytes
    author: str
    email: str
    date: str
    message: str
    trailers: tuple[tuple[str, str], ...]
    files: tuple[FileDiff, ...]
    tail: bytes

    @property
    def subject(self) -> str:
        return self.message.split("\n", 1)[0]

    @property
    def changed_lines(self) -> int:
        return sum(len(file.added) + len(file.removed) for file in self.files)

    def trailer(self, key: str) -> list[str]:
        """The values of a trailer, in order."""
        return [value for name, value in self.trailers if name.lower() == key.lower()]


def safe_path(path: str) -> str:
    """Return `path`, or raise if it could lead out of the tree."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or ".git" in parts:
        raise SeriesError(f"unsafe path {path!r}")
    return path


def _take_hunk(
    lines: list[bytes], start: int, added: list[bytes], removed: list[bytes]
) -> int:
    """Consume the hunk whose @@ line is `start`; return the index after it.

    The counts on the @@ line decide where it ends: a removed line may well read
    `--- a/file`.
    """
    match = _HUNK.match(lines[start])
    assert match is not None
    old, new = (1 if count is None else int(count) for count in match.groups())
    at = start + 1
    while old > 0 or new > 0:
        line = lines[at] if at < len(lines) else b""
        if line.startswith(b"+"):
            added.append(line[1:])
            new -= 1
        elif line.startswith(b"-"):
            removed.append(line[1:])
            old -= 1
        elif line.startswith(b" "):
            old, new = old - 1, new - 1
        elif not line.startswith(b"\\"):
            raise SeriesError("a hunk ends early")
        at += 1
    while at < len(lines) and lines[at].startswith(b"\\"):
        at += 1
    return at


def _take_file(lines: list[bytes], start: int) -> tuple[FileDiff, int]:
    """Consume the diff of one file; return it and the index after it."""
    head = _DIFF.fullmatch(lines[start].rstrip(b"\n"))
    if head is None:
        raise SeriesError("cannot read a `diff --git` line")
    kind, ids = "edited", ("", "")
    added: list[bytes] = []
    removed: list[bytes] = []
    at = start + 1
    while at < len(lines) and not lines[at].startswith((b"@@ ", b"diff --git ")):
        line = lines[at]
        for prefix, name in _KINDS:
            if line.startswith(prefix):
                kind = name
        if index := _INDEX.match(line):
            ids = (index[1].decode(), index[2].decode())
        elif kind != "binary" and line.startswith((b"-- ", b"\n")):
            break
        at += 1
    while at < len(lines) and lines[at].startswith(b"@@ "):
        at = _take_hunk(lines, at, added, removed)
    diff = FileDiff(
        path=safe_path(head[2].decode()),
        kind=kind,
        old_id=ids[0],
        new_id=ids[1],
        added=tuple(added),
        removed=tuple(removed),
        text=b"".join(lines[start:at]),
    )
    return diff, at


def parse_diff(data: bytes) -> tuple[tuple[FileDiff, ...], bytes]:
    """Split a patch into its file changes and whatever follows the last one."""
    # Not splitlines(): a lone carriage return is content here, not a line's end.
    lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
    at = 0
    while at < len(lines) and not lines[at].startswith(b"diff --git "):
        at += 1
    files: list[FileDiff] = []
    while at < len(lines) and lines[at].startswith(b"diff --git "):
        file, at = _take_file(lines, at)
        files.append(file)
    return tuple(files), b"".join(lines[at:])


def parse_trailers(git: Git, message: str) -> tuple[tuple[str, str], ...]:
    """The trailers of a commit message, as git reads them."""
    out = git.out(
        "interpret-trailers", "--parse", "--no-divider", data=message.encode()
    ).decode()
    pairs = (line.partition(":") for line in out.splitlines())
    return tuple((key.strip(), value.strip()) for key, _, value in pairs)


def parse_patch(name: str, data: bytes, git: Git | None = None) -> Patch:
    """Parse the bytes of the patch file `name`.

    Args:
        name: the file's name, used in messages.
        data: its bytes.
        git: a scratch folder to work in, for callers that parse many.

    """
    if git is None:
        with scratch(init=False) as own:
            return parse_patch(name, data, own)
    try:
        files, tail = parse_diff(data)
        if not files:
            raise SeriesError("no change in it")
        body = git.folder / "message"
        diff = git.folder / "diff"
        fields: dict[str, str] = {}
        for line in (
            git.out(
                "mailinfo", "-k", "--encoding=UTF-8", str(body), str(diff), data=data
            )
            .decode()
            .splitlines()
        ):
            key, _, value = line.partition(": ")
            fields.setdefault(key, value)
        text = body.read_text(encoding="utf-8").strip("\n")
        missing = {"Author", "Email", "Subject", "Date"} - fields.keys()
        if missing:
            raise SeriesError(f"no {', '.join(sorted(missing))} in its header")
        message = fields["Subject"] + "\n" + (f"\n{text}\n" if text else "")
        return Patch(
            name=name,
            data=data,
            author=fields["Author"],
            email=fields["Email"],
            date=fields["Date"],
            message=message,
            trailers=parse_trailers(git, message),
            files=files,
            tail=tail,
        )
    except MissingToolError:
        raise
    except (SeriesError, UnicodeDecodeError) as error:
        raise SeriesError(f"{name}: {error}") from None
