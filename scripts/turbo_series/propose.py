# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make the branch and the body of one pull request to vLLM.

All work is done in a work tree of its own, and the branch is made in the end: a step
that is refused, or fails, leaves the checkout as it was. Nothing is pushed.
"""

import contextlib
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from . import operate, prove
from .branch import base_ref, build_commits
from .errors import SeriesError
from .git import Git
from .model import Series
from .proposals import (
    PROPOSALS,
    Proposal,
    faults,
    find_proposal,
    is_test,
    load_proposals,
)
from .target import open_target

Say = Callable[[str], None]
# Trailers that are for this project alone. A person signs in the maintainers' place.
OURS = (
    "Upstream-Status", "Drop-When", "Guarded-By", "Overlay", "Requires",
    "Signed-off-by",
)  # fmt: skip
TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
_CHECKLIST = re.compile(r"^---\n(.*?)(?:^\*\*BEFORE SUBMITTING.*|\Z)", re.M | re.S)
_ASSISTED = "AI assistance was used during the creation of this PR."


def propose(
    series: Series,
    name: str,
    folder: Path,
    onto: str | None = None,
    body: Path | None = None,
    say: Say = print,
) -> None:
    """Write a branch, and a file with the body of its pull request.

    Args:
        series: The series that the entry belongs to.
        name: The entry, without `.patch`; the branch has this name.
        folder: A vLLM checkout that has the pinned release.
        onto: The commit to start at; the pinned release if None.
        body: The file for the body; below `build/pr` if None.
        say: Takes a line on each step.

    Raises:
        SeriesError: vLLM would refuse it, or a test does not show what it should.

    """
    proposal = find_proposal(series, name)
    _refuse(proposal)
    git = Git(open_target(str(folder)).root)
    signer = find_signer(git)
    ref = f"refs/heads/{name}"
    if git.run("show-ref", "--verify", "--quiet", ref).returncode == 0:
        raise SeriesError(f"{folder} has a branch {name}; delete or rename it first")
    with prepared(series, proposal, git, onto) as tree:
        proof = prove.prove(proposal, tree, say)
        proof += prove.run_hooks(series.root, tree, say)
        commit = _commit(tree, proposal, signer)
        text = make_body(proposal, proof, _template(tree))
    body = body or series.root / "build" / "pr" / f"{name}.md"
    body.parent.mkdir(parents=True, exist_ok=True)
    body.write_text(text, encoding="utf-8")
    git.out("branch", name, commit)
    title, body_file = shlex.quote(proposal.title), shlex.quote(str(body))
    say(
        f"made branch {name} in {folder}, and {body}. Read both: who proposes them "
        "answers for them, and names a tool that helped in a Co-authored-by. Then\n"
        f"  git push FORK {name}\n"
        "  gh pr create --repo vllm-project/vllm "
        f"--title {title} --body-file {body_file}"
    )


def check(
    series: Series, name: str, folder: Path, onto: str | None = None, say: Say = print
) -> None:
    """Run the tests of a proposal, or of a tracked entry, and write nothing.

    Raises:
        SeriesError: It is not ready, or a test does not show what it should.

    """
    proposal = find_proposal(series, name)
    _refuse_faults(proposal)
    with prepared(series, proposal, Git(open_target(str(folder)).root), onto) as tree:
        prove.prove(proposal, tree, say)
    say(f"{name}: its tests fail without the change and pass with it")


def apply_alone(series: Series, name: str, folder: Path, say: Say = print) -> None:
    """Apply a proposal that is no entry of the series to a vLLM tree, and nothing else.

    Args:
        series: The series on whose release it is.
        name: The proposal.
        folder: A checkout, an unpacked sdist or a site-packages folder, not patched.
        say: Takes a line on each step.

    Raises:
        SeriesError: The proposal is an entry, or does not apply to the tree.

    """
    proposal = find_proposal(series, name)
    if not proposal.added:
        raise SeriesError(f"{name} is an entry of the series: use apply")
    operate.apply(proposal.alone(series), open_target(str(folder)), say=say)


def _refuse(proposal: Proposal) -> None:
    """Raise unless the entry waits to be proposed, and is ready."""
    status = proposal.status
    if proposal.is_tracked:
        raise SeriesError(
            f"{proposal.name} is open upstream: {status.removeprefix('Tracked ')}. "
            f"Give that one {PROPOSALS}/{proposal.name}/comment.md and the tests; "
            "pr --check runs them"
        )
    if status != "Pending":
        raise SeriesError(f"{proposal.name} is not to be proposed: {status}")
    _refuse_faults(proposal)


def _refuse_faults(proposal: Proposal) -> None:
    if found := faults(proposal):
        raise SeriesError(f"{proposal.name} {'; '.join(found)}")


def find_signer(git: Git) -> dict[str, str]:
    """Who signs off, as git's environment variables of author and committer.

    Raises:
        SeriesError: git has no name, or an address that is nobody's.

    """
    found: dict[str, str] = {}
    for part in ("name", "email"):
        value = git.run("config", f"user.{part}").stdout.decode().strip()
        if not value or (part == "email" and not _is_address(value)):
            raise SeriesError(
                f"a person signs off what vLLM takes, and git's user.{part} is "
                f"{value or 'not set'}: git -C {git.folder} config user.{part} YOURS"
            )
        found |= {f"GIT_{who}_{part.upper()}": value for who in ("AUTHOR", "COMMITTER")}
    return found


def _is_address(value: str) -> bool:
    return bool(re.fullmatch(r"[^@\s<>]+@[^@\s<>]+\.[^@\s<>.]+", value)) and not (
        value.endswith(".example")
    )


@contextlib.contextmanager
def prepared(
    series: Series, proposal: Proposal, git: Git, onto: str | None
) -> Iterator[Git]:
    """A work tree of the checkout in which the change and its tests are staged.

    Raises:
        SeriesError: The entry does not merge, or changes other files than its own.

    """
    base, entry = _find_entry(series, proposal, git)
    with work_tree(git, onto or base) as tree:
        _stage(tree, proposal, entry, onto or "the pinned release")
        yield tree


@contextlib.contextmanager
def work_tree(git: Git, commit: str) -> Iterator[Git]:
    """A work tree at a commit, which is gone afterwards."""
    start = git.text("rev-parse", "--verify", f"{commit}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="turbo-series-") as scratch:
        folder = Path(scratch) / "vllm"
        git.out("worktree", "add", "--quiet", "--detach", str(folder), start)
        try:
            yield Git(folder)
        finally:
            git.out("worktree", "remove", "--force", str(folder))


def find_conflicts(series: Series, checkout: Path) -> Iterator[str]:
    """Yield why a proposal does not merge onto the checkout's HEAD alone."""
    git = Git(checkout)
    with work_tree(git, "HEAD") as tree:
        for proposal in load_proposals(series):
            try:
                _stage(tree, proposal, _find_entry(series, proposal, git)[1], "HEAD")
            except SeriesError as error:
                yield str(error)
            tree.out("reset", "--quiet", "--hard")


def _find_entry(series: Series, proposal: Proposal, git: Git) -> tuple[str, str]:
    """The pinned release's commit, and the entry's, as an object on it."""
    version = series.upstream.version
    refs = (f"refs/tags/v{version}", base_ref("turbo"), "HEAD")
    known = (ref for ref in refs if not git.run("rev-parse", "-q", ref).returncode)
    base = next(known, "HEAD")
    if proposal.added:
        first = proposal.alone(series)
    else:
        # Entries that vLLM may take alone come before the files of the overlay.
        end = series.patches.index(proposal.patch) + 1
        first = replace(series, patches=series.patches[:end], overlay={})
    try:
        return base, build_commits(first, git, base)[-1]
    except SeriesError as error:
        raise SeriesError(
            f"{git.folder}: {base} is not vLLM {version} ({error}); fetch the tag "
            f"v{version}"
        ) from None


def _stage(tree: Git, proposal: Proposal, entry: str, onto: str) -> None:
    done = tree.run("cherry-pick", "--no-commit", entry)
    left = tree.text("diff", "--name-only", "--diff-filter=U").split("\n")
    if done.returncode:
        where = ", ".join(filter(None, left)) or done.stderr.decode().strip()
        raise SeriesError(f"{proposal.name} does not merge onto {onto}: {where}")
    if proposal.tests_data:
        how = ("apply", "--3way", "--index", "--whitespace=nowarn", "-")
        applied = tree.run(*how, data=proposal.tests_data)
        if applied.returncode:
            said = applied.stderr.decode(errors="replace").strip()
            raise SeriesError(f"{proposal.name}: tests.patch does not apply: {said}")
    staged = set(tree.text("diff", "--cached", "--name-only").splitlines())
    if not any(not is_test(path) for path in staged):
        raise SeriesError(f"{proposal.name} changes nothing of {onto}: vLLM has it")
    if others := staged - {file.path for file in proposal.files}:
        raise SeriesError(f"{proposal.name} also changes {', '.join(sorted(others))}")


def commit_message(proposal: Proposal, signer: dict[str, str]) -> str:
    """The entry's message under the pull request's title, without our trailers."""
    patch = proposal.patch
    _, *parts = patch.message.strip().split("\n\n")
    if patch.trailers:
        parts.pop()
    kept = [f"{key}: {value}" for key, value in patch.trailers if key not in OURS]
    who = f"{signer['GIT_AUTHOR_NAME']} <{signer['GIT_AUTHOR_EMAIL']}>"
    kept.append(f"Signed-off-by: {who}")
    return "\n\n".join([proposal.title, *parts, "\n".join(kept)]) + "\n"


def _commit(tree: Git, proposal: Proposal, signer: dict[str, str]) -> str:
    message = commit_message(proposal, signer).encode()
    written = tree.text("write-tree")
    made = tree.out(
        "commit-tree", written, "-p", "HEAD", "-F", "-", data=message, env=signer
    )
    return made.decode().strip()


def _template(tree: Git) -> str:
    return tree.run("show", f"HEAD:{TEMPLATE}").stdout.decode()


def make_body(proposal: Proposal, proof: str, template: str) -> str:
    """The pull request's text: the proposal's, the proof, what is related to it, and
    the checklist of vLLM's template, for a person to tick.
    """
    head, details, tail = proposal.text.partition("\n## Details")
    related = "\n".join(f"- {line}" for line in proposal.related)
    text = f"{head.rstrip()}\n\n{proof.strip()}\n{details}{tail.rstrip()}\n\n"
    text += f"A search for duplicates found:\n\n{related}\n"
    found = _CHECKLIST.search(template)
    checklist = found[1].strip() if found else ""
    ticked = checklist.replace(f"[ ] {_ASSISTED}", f"[x] {_ASSISTED}")
    if ticked == checklist:
        ticked = f"{ticked}\n\n{_ASSISTED}".strip()
    return f"{text}\n---\n\n{ticked}\n"
