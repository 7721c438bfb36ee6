# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rules of the series. Each has a passing and a failing fixture in its tests."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .branch import (
    FORMAT_PATCH,
    NO_PATH,
    build_commits,
    differences,
    export_commits,
    objects_of,
)
from .errors import SeriesError
from .git import Git, scratch
from .model import OVERLAY, PATCHES, Series, glob_regex, load_overlay, read_order
from .patchfile import Patch, parse_patch
from .plan import chains
from .proposals import PROPOSALS, faults, load_proposals
from .propose import find_conflicts
from .series_file import NAME
from .upstream import load_upstream

MAX_LINES = 60
MAX_SUBJECT = 72
ONCE = ("Upstream-Status", "Drop-When")
REQUIRED = (*ONCE, "Guarded-By", "Signed-off-by")
_STATUS = re.compile(
    r"Pending|Submitted https?://\S+|Tracked https?://\S+(?: https?://\S+)*"
    r"|Backport [0-9a-f]{7,40}|Denied https?://\S+|Inappropriate \S.*"
)
_NUMBER = re.compile(r"/(?:pull|issues)/(\d+)")
_SIGNED = re.compile(r"\S.* <[^<>@\s]+@[^<>@\s]+>")
_SUBJECT = re.compile(r"(?:\[[A-Z][\w/ .-]*\])+ (?P<verb>[A-Z][a-z]+)\b.*[^.\s]")
# Imperatives that end like a past or continuous form, or a third person.
_VERBS = {"Alias", "Bring", "Embed", "Exceed", "Feed", "Focus", "Need", "Seed", "Speed"}
# Drafters lie beside the model runner that runs them.
_HANDS_OFF = re.compile(
    r"vllm/v1/core/.*|vllm/v1/worker/gpu/(?!spec_decode/).*"
    r"|vllm/v1/worker/\w*model_runner\w*\.py"
)
_SPDX = (
    "SPDX-License-Identifier: Apache-2.0",
    "SPDX-FileCopyrightText: Copyright contributors to the vLLM project",
)
_COMMENTS = {".py": "#", ".cu": "//", ".cuh": "//", ".h": "//", ".cpp": "//"}

Rule = Callable[[Series], Iterator[str]]
BaseRule = Callable[[Series, Path], Iterator[str]]


@dataclass(frozen=True)
class Finding:
    """A breach of a rule."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


def trailers(series: Series) -> Iterator[str]:
    """Every patch has the required trailers, with legal values."""
    for patch in series.patches:
        for key in REQUIRED:
            values = patch.trailer(key)
            if not any(values):
                yield f"{patch.name} has no {key}"
            elif key in ONCE and len(values) > 1:
                yield f"{patch.name} has {len(values)} {key}"
        for value in patch.trailer("Upstream-Status"):
            if value and not _STATUS.fullmatch(value):
                yield f"{patch.name}: Upstream-Status cannot be {value!r}"
        for value in patch.trailer("Signed-off-by"):
            if value and not _SIGNED.fullmatch(value):
                yield f"{patch.name}: Signed-off-by is {value!r}, not NAME <EMAIL>"


def tracked(series: Series) -> Iterator[str]:
    """A patch that tracks somebody else's change names it in Drop-When."""
    for patch in series.patches:
        when = " ".join(patch.trailer("Drop-When"))
        for value in patch.trailer("Upstream-Status"):
            numbers = _NUMBER.findall(value) if value.startswith("Tracked ") else []
            for number in numbers:
                if not re.search(rf"#{number}\b", when):
                    yield f"{patch.name}: Drop-When does not name #{number}"


def guard_exists(series: Series) -> Iterator[str]:
    """Guarded-By names an existing test: in the overlay, in the patch's additions to
    vLLM's tests, or in this project.
    """
    for patch in series.patches:
        for value in filter(None, patch.trailer("Guarded-By")):
            path, *parts = value.split("::")
            overlay = series.overlay.get(path)
            own = series.root / path
            edits = [file for file in patch.files if file.path == path]
            if overlay is not None:
                text = overlay.data.decode(errors="replace")
            elif path.startswith("tests/") and edits:
                text = b"".join(edits[0].added).decode(errors="replace")
            elif path.startswith("tests/") and ".." not in path and own.is_file():
                text = own.read_text(encoding="utf-8")
            else:
                yield f"{patch.name}: Guarded-By {path} does not exist"
                continue
            for part in parts:
                name = part.split("[")[0]
                definition = rf"^\s*(?:async )?(?:def|class) {re.escape(name)}\b"
                if not re.search(definition, text, re.MULTILINE):
                    yield f"{patch.name}: no {name} in {path}"


def size(series: Series) -> Iterator[str]:
    """A patch only wires; logic is in the overlay."""
    for patch in series.patches:
        if patch.changed_lines > MAX_LINES:
            yield f"{patch.name} changes {patch.changed_lines} lines, over {MAX_LINES}"


def edits_only(series: Series) -> Iterator[str]:
    """A patch adds, deletes and moves no file and changes no mode."""
    for patch in series.patches:
        for file in patch.files:
            if file.kind != "edited":
                yield f"{patch.name}: {file.path}: {file.kind}"


def subject(series: Series) -> Iterator[str]:
    """`[Area] Do something`, short."""
    for patch in series.patches:
        line = patch.subject
        match = _SUBJECT.fullmatch(line)
        if len(line) > MAX_SUBJECT:
            yield f"{patch.name}: {len(line)} characters of subject, over {MAX_SUBJECT}"
        if match is None:
            yield f"{patch.name}: subject is not `[Area] Do something`: {line!r}"
        elif match["verb"] not in _VERBS and re.search(
            r"(?:ed|ing|[^s]s)$", match["verb"]
        ):
            yield f"{patch.name}: {match['verb']!r} is not an imperative"


def patch_name(series: Series) -> Iterator[str]:
    """The order is in `series`, not in the names."""
    for patch in series.patches:
        if not NAME.fullmatch(patch.name):
            yield f"{patch.name} is not lower-case words without a leading number"


def overlay_owned(series: Series) -> Iterator[str]:
    """Each overlay file goes with one patch, and each Overlay trailer with a file."""
    owner: dict[str, str] = {}
    for patch in series.patches:
        for path in series.overlay_of(patch):
            if path in owner:
                yield f"{path} belongs to both {owner[path]} and {patch.name}"
            owner[path] = patch.name
        for glob in patch.trailer("Overlay"):
            if not any(glob_regex(glob).fullmatch(path) for path in series.overlay):
                yield f"{patch.name}: Overlay {glob!r} matches nothing"
    for path in series.overlay:
        if path not in owner:
            yield f"{path} is in no patch's Overlay"


def spdx(series: Series) -> Iterator[str]:
    """Overlay sources begin with vLLM's two-line header."""
    for path, file in series.overlay.items():
        mark = _COMMENTS.get(Path(path).suffix)
        if mark is None:
            continue
        lines = file.data.decode(errors="replace").splitlines()
        if lines and lines[0].startswith("#!"):
            del lines[0]
        if lines[:2] != [f"{mark} {line}" for line in _SPDX]:
            yield f"{OVERLAY}/{path} has no SPDX header"


def whitespace(series: Series) -> Iterator[str]:
    """No added line ends in blanks."""
    for patch in series.patches:
        for file in patch.files:
            for line in file.added:
                text = line.rstrip(b"\r\n")
                if text != text.rstrip():
                    yield f"{patch.name}: {file.path}: blanks at the end of {text!r}"


def hands_off(series: Series) -> Iterator[str]:
    """The core, the schedulers and the model runners stay as they are."""
    for patch in series.patches:
        for file in patch.files:
            if _HANDS_OFF.fullmatch(file.path):
                yield f"{patch.name} touches {file.path}"


def chained(series: Series) -> Iterator[str]:
    """A patch starts from the result of the patches before it."""
    edits = [
        (patch, file) for patch in series.patches for file in patch.files if file.new_id
    ]
    last: dict[str, str] = {}
    for patch, file in edits:
        if last.setdefault(file.path, file.old_id) != file.old_id:
            yield f"{patch.name}: {file.path} does not start from the patch before it"
        last[file.path] = file.new_id


def _header(git: Git, patch: Patch, tree: str) -> bytes:
    """The text that export writes above the diffs of a patch's files."""
    env = {
        "GIT_AUTHOR_NAME": patch.author,
        "GIT_AUTHOR_EMAIL": patch.email,
        "GIT_AUTHOR_DATE": patch.date,
        "GIT_COMMITTER_NAME": patch.author,
        "GIT_COMMITTER_EMAIL": patch.email,
    }
    made = git.out("commit-tree", tree, data=patch.message.encode(), env=env)
    text = git.out(*FORMAT_PATCH, "-1", made.decode().strip(), "--", NO_PATH)
    return text + b"\n" if patch.files else text


def canonical(series: Series) -> Iterator[str]:
    """The bytes are what export writes."""
    with scratch() as git:
        tree = git.text("write-tree")
        for patch in series.patches:
            diffs = sum(len(file.text) for file in patch.files)
            head = patch.data[: len(patch.data) - diffs]
            if head != _header(git, patch, tree):
                yield f"{patch.name}: header or message is not as export writes it"
            paths = [file.path for file in patch.files]
            if paths != sorted(set(paths)):
                yield f"{patch.name}: files are not in order"
            for file in patch.files:
                if file.kind == "edited" and not file.new_id:
                    yield f"{patch.name}: {file.path} has no full-index diff header"
                if file.stray:
                    yield f"{patch.name}: more than the change follows {file.path}"


def proposals(series: Series) -> Iterator[str]:
    """Each proposal is ready for vLLM, as far as its text says."""
    if not (series.root / PROPOSALS).is_dir():
        return
    try:
        for proposal in load_proposals(series):
            for text in faults(proposal):
                yield f"{proposal.name} {text}"
    except SeriesError as error:
        yield str(error)


def proposals_merge(series: Series, base: Path) -> Iterator[str]:
    """Each proposal merges onto the base alone, and so do its tests."""
    if (series.root / PROPOSALS).is_dir():
        yield from find_conflicts(series, base)


def overlay_new(series: Series, base: Path) -> Iterator[str]:
    """The overlay only adds."""
    for path in series.overlay:
        if (base / path).exists():
            yield f"{path} exists in the base"


def round_trip(series: Series, base: Path) -> Iterator[str]:
    """Imported onto the base and exported again, the series is the same bytes."""
    theirs = Git(base)
    try:
        head = theirs.text("rev-parse", "HEAD")
        with scratch() as git:
            git.env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = objects_of(theirs)
            chains(series.patches)
            made = export_commits(series.root, git, build_commits(series, git, head))
        for name in differences(series.root, made):
            yield f"{name} comes back different"
    except SeriesError as error:
        yield str(error)


RULES: dict[str, Rule] = {
    "trailers": trailers,
    "tracked": tracked,
    "guard-exists": guard_exists,
    "size": size,
    "edits-only": edits_only,
    "subject": subject,
    "patch-name": patch_name,
    "overlay-owned": overlay_owned,
    "spdx": spdx,
    "whitespace": whitespace,
    "hands-off": hands_off,
    "chained": chained,
    "canonical": canonical,
    "proposals": proposals,
}
BASE_RULES: dict[str, BaseRule] = {
    "overlay-new": overlay_new,
    "round-trip": round_trip,
    "proposals-merge": proposals_merge,
}
# Checked while the series is read, since a series that breaks one cannot be loaded.
READ_RULES = ("series-complete", "readable")


def _read(root: Path) -> tuple[Series, list[Finding]]:
    """Load the readable part of the series, with findings on the rest."""
    order = read_order(root)
    here = sorted(path.name for path in (root / PATCHES).glob("*.patch"))
    findings = []
    for name in sorted(set(order)):
        if order.count(name) > 1:
            findings.append(f"{name} is listed {order.count(name)} times")
    findings += [
        f"{name} is not listed in series" for name in here if name not in order
    ]
    findings += [f"{name} does not exist" for name in order if name not in here]
    found = [Finding("series-complete", text) for text in findings]
    patches = []
    with scratch(init=False) as git:
        for name in dict.fromkeys(order):
            if name in here:
                try:
                    data = (root / PATCHES / name).read_bytes()
                    patches.append(parse_patch(name, data, git))
                except SeriesError as error:
                    found.append(Finding("readable", str(error)))
    overlay = load_overlay(root)
    return Series(root, load_upstream(root), tuple(patches), overlay), found


def lint(root: Path, base: Path | None = None) -> list[Finding]:
    """Check the series at `root`, also against a base checkout if one is given."""
    series, found = _read(root)
    for name, rule in RULES.items():
        found += [Finding(name, text) for text in rule(series)]
    if base is not None:
        for name, base_rule in BASE_RULES.items():
            found += [Finding(name, text) for text in base_rule(series, base)]
    return found
