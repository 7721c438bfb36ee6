# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parse one patch file: header, trailers, and the change of each file."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from .errors import MissingToolError, SeriesError
from .git import Git, scratch

# No line of a hunk begins like this: each has a mark of its own before it.
_FILE = re.compile(rb"^(?=diff --git )", re.MULTILINE)
_PATH = re.compile(rb"diff --git a/(.+) b/(.+)\n")
_EDIT = re.compile(
    rb"diff --git a/(?P<path>.+) b/(?P=path)\n"
    rb"index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40}) 100(?:644|755)\n"
    rb"--- a/(?P=path)\n\+\+\+ b/(?P=path)\n(?=@@ )"
)
_HUNKS = {b" ", b"+", b"-", b"@", b"\\"}


@dataclass(frozen=True)
class FileDiff:
    """A patch's change of one file.

    `kind` is "edited" for a plain edit, the only kind that a series may hold. Otherwise
    it is the line that names the change, as `new file mode 100644`. The ids are empty
    unless the diff of an edit begins just as export writes it. `text` is the diff in
    the patch, up to the next one; `stray` is whether `text` has more than the change.
    """

    path: str
    kind: str
    old_id: str
    new_id: str
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    text: bytes
    stray: bool


@dataclass(frozen=True)
class Patch:
    """A parsed patch. `message` is the commit message, subject first.

    `files` is empty if it edits nothing, and only its overlay files are new.
    """

    name: str
    data: bytes
    author: str
    email: str
    date: str
    message: str
    trailers: tuple[tuple[str, str], ...]
    files: tuple[FileDiff, ...]

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


def _lines(text: bytes) -> list[bytes]:
    """Split at newlines alone: a lone carriage return is content of a line."""
    return re.findall(rb"[^\n]*\n|[^\n]+", text)


def _counts(git: Git, diff: bytes) -> dict[str, tuple[str, str]]:
    """The numbers of lines added to and removed from each file, as git reads them."""
    listed = git.out("apply", "--numstat", "-z", data=diff).decode().split("\0")[:-1]
    lines = (line.split("\t", 2) for line in listed)
    return {path: (added, removed) for added, removed, path in lines}


def _parse_file(text: bytes, counts: dict[str, tuple[str, str]]) -> FileDiff:
    head = _PATH.match(text)
    if head is None:
        raise SeriesError("cannot read a `diff --git` line")
    path = safe_path(head[2].decode())
    header, at, hunks = text.partition(b"\n@@ ")
    what = _lines(header)[1:]
    plain = [line.split()[:1] for line in what] == [[b"index"], [b"---"], [b"+++"]]
    edit = _EDIT.match(text)
    lines = _lines(at[1:] + hunks)
    added = tuple(line[1:] for line in lines if line.startswith(b"+"))
    removed = tuple(line[1:] for line in lines if line.startswith(b"-"))
    firsts = {line[:1] for line in lines}
    # A signature reads like a removed line, but git does not count it.
    count = (str(len(added)), str(len(removed)))
    return FileDiff(
        path=path,
        kind="edited" if plain else what[0].decode().strip() if what else "no change",
        old_id=edit["old"].decode() if edit else "",
        new_id=edit["new"].decode() if edit else "",
        added=added,
        removed=removed,
        text=text,
        stray=plain and (counts.get(path) != count or not _HUNKS.issuperset(firsts)),
    )


def parse_diff(git: Git, data: bytes) -> tuple[FileDiff, ...]:
    """Split a patch into its file changes."""
    texts = _FILE.split(data)[1:]
    if not texts:
        return ()
    counts = _counts(git, b"".join(texts))
    return tuple(_parse_file(text, counts) for text in texts)


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
        files = parse_diff(git, data)
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
        patch = Patch(
            name=name,
            data=data,
            author=fields["Author"],
            email=fields["Email"],
            date=fields["Date"],
            message=message,
            trailers=parse_trailers(git, message),
            files=files,
        )
        if not files and not patch.trailer("Overlay"):
            raise SeriesError("it changes nothing and names no Overlay")
        # A blank line stands between a message and the first diff.
        if not files and data.endswith(b"\n\n"):
            raise SeriesError("its diffs are cut off")
        return patch
    except MissingToolError:
        raise
    except (SeriesError, UnicodeDecodeError) as error:
        raise SeriesError(f"{name}: {error}") from None
