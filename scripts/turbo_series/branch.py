# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The series as commits: onto a branch, and back into files."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import SeriesError
from .git import Git, blob_id, scratch
from .model import OVERLAY, PATCHES, OverlayFile, Series, glob_regex, overlay_paths
from .patchfile import Patch, parse_patch, parse_trailers
from .plan import apply_patch, chains, refuse_base, require_id
from .series_file import new_order, patch_name, subjects
from .target import KIND_NAMES, Target

Say = Callable[[str], None]

# Everything that shapes a patch's bytes is spelled out; the rest of git's
# configuration is out of reach in a scratch repository.
FORMAT_PATCH = (
    "format-patch",
    "--stdout",
    "--keep-subject",
    "--no-stat",
    "--no-signature",
    "--zero-commit",
    "--full-index",
    "--no-renames",
    "--no-encode-email-headers",
    "--diff-algorithm=myers",
    "--indent-heuristic",
    "--unified=3",
    # The entry of a commit that edits nothing is its message.
    "--always",
    "--sparse",
)
# A path that no commit holds.
NO_PATH = ".git"


def owners(series: Series) -> dict[str, str]:
    """Map each overlay file to the one patch whose trailers name it."""
    found: dict[str, str] = {}
    for patch in series.patches:
        for path in series.overlay_of(patch):
            if path in found:
                raise SeriesError(
                    f"{OVERLAY}/{path} belongs to both {found[path]} and {patch.name}"
                )
            found[path] = patch.name
    for path in series.overlay:
        if path not in found:
            raise SeriesError(f"{OVERLAY}/{path} is in no patch's Overlay trailer")
    return found


def _head_blobs(git: Git, commit: str, paths: list[str]) -> dict[str, str]:
    """The blob ids of those of `paths` that a commit holds."""
    if not paths:
        return {}
    listed = git.out("--literal-pathspecs", "ls-tree", "-rz", commit, "--", *paths)
    found = {}
    for line in listed.decode().split("\0")[:-1]:
        meta, path = line.split("\t", 1)
        found[path] = meta.split()[2]
    return found


def _in_head(series: Series, target: Target, git: Git) -> bool:
    """Judge HEAD: True if it holds the series, False if it is the base; else raise."""
    wanted = chains(series.patches)
    blobs = _head_blobs(git, "HEAD", [*wanted, *series.overlay])
    if all(blobs.get(path) == chain.final for path, chain in wanted.items()) and all(
        blobs.get(path) == blob_id(file.data) for path, file in series.overlay.items()
    ):
        return True
    for path, chain in wanted.items():
        if blobs.get(path) != chain.base:
            problem = "other content" if path in blobs else "missing"
            refuse_base(series, target, path, f"{problem} in HEAD")
    for path in series.overlay:
        if path in blobs:
            raise SeriesError(f"{path} exists already in HEAD")
    return False


def _require_checkout(target: Target, git: Git) -> None:
    if target.kind != "checkout":
        raise SeriesError(
            f"{target.root} is {KIND_NAMES[target.kind]}; commits need a git checkout"
        )
    if target.state.exists():
        raise SeriesError(
            f"{target.root}: the series is applied to the files; run revert.sh first"
        )
    dirty = git.out("status", "--porcelain", "--untracked-files=no").decode()
    if dirty:
        raise SeriesError(
            f"{target.root} has uncommitted changes: {dirty.splitlines()[0].strip()}"
        )


def _committer(git: Git, patch: Patch) -> dict[str, str]:
    """Who commits: as configured, else the patch's author."""
    who = {}
    for name, key, fallback in (
        ("GIT_COMMITTER_NAME", "user.name", patch.author),
        ("GIT_COMMITTER_EMAIL", "user.email", patch.email),
    ):
        configured = git.run("config", key).stdout.decode().strip()
        who[name] = git.env.get(name) or configured or fallback
    return who


def _commit_patch(git: Git, series: Series, patch: Patch, parent: str) -> str:
    """Make one commit on `parent`; the index holds the parent's tree."""
    if patch.files:
        apply_patch(git, patch, list(patch.files), "--cached")
    staged = {file.path: git.text("rev-parse", f":{file.path}") for file in patch.files}
    for file in patch.files:
        require_id(patch, file, staged[file.path])
    lines = []
    for path in series.overlay_of(patch):
        overlay = series.overlay[path]
        blob = git.out("hash-object", "-w", "--stdin", data=overlay.data)
        lines.append(f"{overlay.git_mode} {blob.decode().strip()}\t{path}\n")
    git.out("update-index", "--add", "--index-info", data="".join(lines).encode())
    env = {
        "GIT_AUTHOR_NAME": patch.author,
        "GIT_AUTHOR_EMAIL": patch.email,
        "GIT_AUTHOR_DATE": patch.date,
        **_committer(git, patch),
    }
    tree = git.text("write-tree")
    message = patch.message.encode()
    made = git.out("commit-tree", tree, "-p", parent, data=message, env=env)
    return made.decode().strip()


def build_commits(series: Series, git: Git, base: str) -> list[str]:
    """Write the commits as objects only; no branch and no file of the tree changes."""
    owners(series)
    commits = [base]
    with tempfile.TemporaryDirectory() as folder:
        own = Git(git.folder, env={**git.env, "GIT_INDEX_FILE": f"{folder}/index"})
        own.out("read-tree", base)
        for patch in series.patches:
            commits.append(_commit_patch(own, series, patch, commits[-1]))
    return commits[1:]


def commit_series(
    series: Series,
    target: Target,
    branch: str | None = None,
    check: bool = False,
    say: Say = print,
) -> None:
    """Commit the series onto HEAD, or onto a new branch that starts there."""
    git = Git(target.root)
    _require_checkout(target, git)
    if branch is not None:
        ref = f"refs/heads/{branch}"
        if git.run("check-ref-format", ref).returncode:
            raise SeriesError(f"{branch!r} is no name for a branch")
        if git.run("show-ref", "--verify", "--quiet", ref).returncode == 0:
            raise SeriesError(f"{target.root} has a branch {branch} already")
    if _in_head(series, target, git):
        say(f"already applied, as commits: {target.root}")
        return
    for path in series.overlay:
        if (target.root / path).exists():
            raise SeriesError(f"{target.root / path} exists already and is not ours")
    base = git.text("rev-parse", "HEAD")
    commits = build_commits(series, git, base)
    count, tip = len(commits), commits[-1]
    if check:
        say(f"would make {count} commit(s) in {target.root}")
        return
    if branch is None:
        git.out("merge", "--quiet", "--ff-only", tip)
    else:
        git.out("switch", "--quiet", "--create", branch, tip)
    where = branch or git.run("branch", "--show-current").stdout.decode().strip()
    if where:
        remember_base(git, where, base)
    say(f"made {count} commit(s) on {where or 'a detached HEAD'} in {target.root}")


def base_ref(branch: str) -> str:
    """The ref that remembers where the series starts on a branch."""
    return f"refs/turbo-series/{branch}"


def remember_base(git: Git, branch: str, base: str) -> None:
    """Note where the series starts on a branch."""
    git.out("update-ref", base_ref(branch), f"{base}^{{commit}}")


@dataclass
class Exported:
    """The files that a branch turns into."""

    patches: dict[str, bytes] = field(default_factory=dict)
    overlay: dict[str, OverlayFile] = field(default_factory=dict)
    order: bytes = b""


def find_commits(git: Git, branch: str, base: str | None) -> list[str]:
    """The commits of the series on a branch, oldest first."""
    tip = git.text("rev-parse", "--verify", f"{branch}^{{commit}}")
    if base is None:
        base = base_ref(branch)
        if git.run("rev-parse", "--verify", "--quiet", base).returncode:
            raise SeriesError(f"where does {branch} start? name the commit with --base")
    base = git.text("rev-parse", "--verify", f"{base}^{{commit}}")
    if git.run("merge-base", "--is-ancestor", base, tip).returncode:
        raise SeriesError(
            f"{branch} does not start at {base[:12]}; was it rebased? "
            "Name the commit that it starts at with --base"
        )
    lines = git.text("rev-list", "--reverse", "--parents", f"{base}..{tip}")
    commits = [line.split() for line in lines.splitlines()]
    for commit, *parents in commits:
        if len(parents) != 1:
            raise SeriesError(f"{commit[:12]} is a merge; the series is a line")
    if not commits:
        raise SeriesError(f"{branch} holds no commit on top of {base[:12]}")
    return [commit for commit, *_ in commits]


def _changes(git: Git, commit: str) -> list[tuple[str, str]]:
    """The status letter and path of each file that a commit touches."""
    flags = ("-r", "-z", "--no-commit-id", "--name-status", "--no-renames")
    out = git.out("diff-tree", *flags, commit).decode().split("\0")[:-1]
    return list(zip(out[::2], out[1::2]))


def _overlay_at(git: Git, tip: str, paths: set[str]) -> dict[str, OverlayFile]:
    """Read added files as they stand at the tip of the branch."""
    files = {}
    for path in sorted(paths):
        entry = git.out("--literal-pathspecs", "ls-tree", tip, "--", path).decode()
        if not entry:
            continue
        mode, kind, _ = entry.split(None, 2)
        if kind != "blob" or mode not in ("100644", "100755"):
            raise SeriesError(f"{path} is not a plain file")
        data = git.out("cat-file", "blob", f"{tip}:{path}")
        files[path] = OverlayFile(path, data, mode == "100755")
    return files


def _format(git: Git, commit: str, edited: list[str]) -> bytes:
    """The patch of one commit, less the files that it adds."""
    paths = sorted(edited) or [NO_PATH]
    return git.out("--literal-pathspecs", *FORMAT_PATCH, "-1", commit, "--", *paths)


def _split_changes(
    git: Git, commit: str, known: set[str]
) -> tuple[list[str], list[str]]:
    """The base's files that a commit edits, and the files that it adds.

    A later commit may go on with a file that an earlier one added; that is neither,
    since the overlay holds the file as it is in the end.
    """
    edited, added = [], []
    for status, path in _changes(git, commit):
        if path in known:
            continue
        if status == "A":
            added.append(path)
        elif status == "M":
            edited.append(path)
        else:
            raise SeriesError(f"{commit[:12]} does more than edit {path} ({status})")
    return edited, added


def objects_of(git: Git) -> str:
    """The object store of a repository, for a scratch repository to borrow."""
    return git.text("rev-parse", "--path-format=absolute", "--git-path", "objects")


def read_branch(
    root: Path, checkout: Path, branch: str, base: str | None = None
) -> Exported:
    """Turn the commits of a branch into the files of a series.

    Args:
        root: the project, whose patch names are kept where subjects match.
        checkout: the vLLM checkout that has the branch.
        branch: the branch.
        base: the commit below the series; as remembered by the import if None.

    """
    theirs = Git(checkout)
    commits = find_commits(theirs, branch, base)
    with scratch() as git:
        git.env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = objects_of(theirs)
        return export_commits(root, git, commits)


def export_commits(root: Path, git: Git, commits: list[str]) -> Exported:
    """Turn commits, oldest first, into the files of a series."""
    made = Exported()
    known_names = subjects(root)
    overlay: set[str] = set()
    for commit in commits:
        edited, added = _split_changes(git, commit, overlay)
        message = git.out("log", "-1", "--format=%B", commit).decode().rstrip("\n")
        subject = message.split("\n", 1)[0]
        if not edited and not added:
            raise SeriesError(
                f"{subject!r} edits no file of the base and adds none; squash it"
            )
        _require_overlay_trailers(git, subject, message, added)
        overlay.update(added)
        name = patch_name(known_names, subject)
        if name in made.patches:
            raise SeriesError(f"two commits would both be {name}")
        made.patches[name] = data = _format(git, commit, edited)
        patch = parse_patch(name, data, git)
        if patch.message.rstrip("\n") != message:
            raise SeriesError(f"{subject!r}: mail would not keep this message")
        for file in patch.files:
            if file.kind != "edited":
                raise SeriesError(f"{subject!r}: {file.path}: {file.kind}")
    made.overlay = _overlay_at(git, commits[-1], overlay)
    made.order = new_order(root, list(made.patches))
    return made


def _require_overlay_trailers(
    git: Git, subject: str, message: str, added: list[str]
) -> None:
    globs = [
        glob_regex(value)
        for key, value in parse_trailers(git, message + "\n")
        if key.lower() == "overlay"
    ]
    for path in added:
        if not any(glob.fullmatch(path) for glob in globs):
            raise SeriesError(f"{subject!r} adds {path}: give it `Overlay: {path}`")


def wanted_files(made: Exported) -> dict[str, bytes]:
    """The project's files that an export stands for, and their bytes."""
    wanted = {f"{PATCHES}/series": made.order}
    wanted |= {f"{PATCHES}/{name}": data for name, data in made.patches.items()}
    return wanted | {f"{OVERLAY}/{path}": f.data for path, f in made.overlay.items()}


def project_files(root: Path) -> set[str]:
    """The patches and overlay files that a project has."""
    patches = {f"{PATCHES}/{path.name}" for path in (root / PATCHES).glob("*.patch")}
    return patches | {f"{OVERLAY}/{path}" for path in overlay_paths(root)}


def differences(root: Path, made: Exported) -> list[str]:
    """The project's files that an export would write, change or delete."""
    wanted = wanted_files(made)
    found = project_files(root) - wanted.keys()
    for name, data in wanted.items():
        full = root / name
        if not full.is_file() or full.read_bytes() != data:
            found.add(name)
    for path, file in made.overlay.items():
        full = root / OVERLAY / path
        if full.is_file() and bool(full.stat().st_mode & 0o100) != file.executable:
            found.add(f"{OVERLAY}/{path}")
    return sorted(found)


def write_export(root: Path, made: Exported) -> list[str]:
    """Write the branch's files to `patches/` and the overlay; return changed paths."""
    changed = differences(root, made)
    wanted = wanted_files(made)
    for name in changed:
        full = root / name
        if name not in wanted:
            full.unlink()
            prune(full.parent, root / name.partition("/")[0])
            continue
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(wanted[name])
        if file := made.overlay.get(name.removeprefix(f"{OVERLAY}/")):
            full.chmod(0o755 if file.executable else 0o644)
    return changed


def prune(folder: Path, top: Path) -> None:
    """Delete folders that an export emptied."""
    while folder != top and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
