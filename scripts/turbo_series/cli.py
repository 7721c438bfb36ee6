# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command line of the series."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from . import branch, lint, operate, pins, proposals, propose, report, sdist, step
from .errors import SeriesError
from .git import Git
from .kernels import load_kernels
from .model import load_series
from .plan import target_name
from .target import open_target
from .upstream import load_upstream
from .verify import verify

Command = Callable[[argparse.Namespace], int]


def _apply(args: argparse.Namespace) -> int:
    series = load_series(args.root)
    target = open_target(args.target)
    if args.commit and args.kernels:
        raise SeriesError("kernels are no part of a commit: leave out one of the two")
    kernels = load_kernels(args.kernels, series, target) if args.kernels else None
    if args.commit:
        branch.commit_series(series, target, check=args.check)
    else:
        operate.apply(series, target, check=args.check, kernels=kernels)
    return 0


def _revert(args: argparse.Namespace) -> int:
    operate.revert(open_target(args.target), force=args.force, check=args.check)
    return 0


def _verify(args: argparse.Namespace) -> int:
    series = load_series(args.root)
    target = open_target(args.target)
    problems = verify(series, target)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"verified: revision {series.revision[:12]} on {target_name(target)}")
    return 1 if problems else 0


def _import(args: argparse.Namespace) -> int:
    target = open_target(args.folder)
    branch.commit_series(load_series(args.root), target, branch=args.branch)
    return 0


def _export(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    made = branch.read_branch(args.root, folder, args.branch, args.base)
    if Git(folder).out("status", "--porcelain", "--untracked-files=no"):
        print(f"note: uncommitted changes in {folder} are not exported")
    if args.check:
        names = branch.differences(args.root, made)
    else:
        names = branch.write_export(args.root, made)
        if args.base:
            branch.remember_base(Git(folder), args.branch, args.base)
    for name in names:
        print(f"{'would change' if args.check else 'changed'}: {name}")
    if not names:
        print(f"no change: {len(made.patches)} patch(es), {len(made.overlay)} file(s)")
    return 1 if args.check and names else 0


def _lint(args: argparse.Namespace) -> int:
    findings = lint.lint(args.root, Path(args.base) if args.base else None)
    for finding in findings:
        print(finding)
    if not findings:
        print("lint: no findings")
    return 1 if findings else 0


def _index(args: argparse.Namespace) -> int:
    series = load_series(args.root)
    path = report.index_path(series)
    text = report.index(series)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        print(f"{path.name} is up to date")
    elif args.check:
        print(f"{path} is stale; run scripts/series.py index")
        return 1
    else:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


def _stats(args: argparse.Namespace) -> int:
    print(report.stats(load_series(args.root)))
    return 0


def _sdist(args: argparse.Namespace) -> int:
    sdist.obtain(load_upstream(args.root), Path(args.folder), args.git)
    return 0


def _step(args: argparse.Namespace) -> int:
    folder = (args.folder or args.root / "build" / "step").resolve()
    if args.abort:
        step.abort(folder)
        return 0
    if args.check and not args.version:
        raise SeriesError("--check is for a VERSION")
    if args.version:
        old = load_upstream(args.root)
        if args.check:
            # A list needs no wheels, which may come later than the sdist.
            new = pins.find_pins(replace(old, wheels={}), args.version)
            step.forecast(args.root, new)
            return 0
        step.prepare(args.root, folder, pins.find_pins(old, args.version))
    return 0 if step.resume(args.root, folder) else 1


def _newer(args: argparse.Namespace) -> int:
    if version := pins.find_newer(load_upstream(args.root)):
        print(version)
    return 0


def _pr(args: argparse.Namespace) -> int:
    series = load_series(args.root)
    if args.list:
        found = proposals.load_proposals(series)
        print(proposals.table(found))
        return 1 if any(map(proposals.faults, found)) else 0
    if args.name is None:
        raise SeriesError("which proposal? series.py pr --list names them")
    if args.site:
        propose.apply_alone(series, args.name, args.site)
    elif args.check:
        propose.check(series, args.name, args.folder, args.onto)
    else:
        propose.propose(series, args.name, args.folder, args.onto, args.body)
    return 0


def _parser(root: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="series.py", description=__doc__)
    parser.add_argument(
        "--root", type=Path, default=root, help="the project (default: this one)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    def target(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "target",
            nargs="?",
            metavar="TARGET",
            help="a vLLM git checkout, an unpacked sdist, or a site-packages folder "
            "that holds vllm (default: the vllm that `python` imports; PYTHON or an "
            "active virtual environment chooses another)",
        )

    def check(sub: argparse.ArgumentParser, text: str) -> None:
        sub.add_argument("--check", action="store_true", help=text)

    sub = command("apply", _apply, "apply the series to a vLLM tree")
    target(sub)
    check(sub, "try it, write nothing")
    sub.add_argument(
        "--commit", action="store_true", help="in a checkout: one commit a patch"
    )
    sub.add_argument(
        "--kernels",
        type=Path,
        metavar="FILE",
        help="an archive of CUDA kernels to add, so that none are built at start",
    )
    sub = command("revert", _revert, "take the series off again")
    target(sub)
    check(sub, "try it, write nothing")
    sub.add_argument(
        "--force", action="store_true", help="discard changes made since the apply"
    )
    sub = command("verify", _verify, "compare a tree with what apply wrote")
    target(sub)
    sub = command("import", _import, "make a branch of the series in a checkout")
    sub.add_argument("folder", metavar="DIR", help="a checkout whose HEAD is the base")
    sub.add_argument("--branch", default="turbo", help="its name (default: turbo)")
    sub = command("export", _export, "turn such a branch back into files")
    sub.add_argument("folder", metavar="DIR", help="the checkout")
    sub.add_argument("--branch", default="turbo", help="its name (default: turbo)")
    sub.add_argument("--base", help="the commit below it (default: as last said)")
    check(sub, "fail if the files would change, write nothing")
    sub = command("lint", _lint, "check the series against its rules")
    sub.add_argument("--base", metavar="DIR", help="a checkout of the base, for more")
    sub = command("index", _index, "write patches/README.md")
    check(sub, "fail if it is stale, write nothing")
    command("stats", _stats, "count lines")
    sub = command("sdist", _sdist, "fetch the pinned sdist and unpack it")
    sub.add_argument("folder", metavar="DIR", help="a new or empty folder")
    sub.add_argument("--git", action="store_true", help="commit it as the base")
    sub = command("step", _step, "rebase the series onto another release of vLLM")
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("version", nargs="?", metavar="VERSION", help="the release")
    what.add_argument(
        "--continue", action="store_true", help="go on once a conflict is resolved"
    )
    what.add_argument("--abort", action="store_true", help="give the step up")
    sub.add_argument(
        "--folder", type=Path, help="where the work is done (default: build/step)"
    )
    check(sub, "list what a person must look at, write nothing")
    command("newer", _newer, "print the newest release, if the pin is of an older one")
    sub = command("pr", _pr, "make the branch and the body of a pull request to vLLM")
    sub.add_argument("name", nargs="?", metavar="NAME", help="an entry, without .patch")
    sub.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="a checkout that has the base (default: the current folder)",
    )
    sub.add_argument(
        "--onto", metavar="REF", help="where it starts (default: the base)"
    )
    sub.add_argument(
        "--body", type=Path, metavar="FILE", help="the body (default: build/pr/NAME.md)"
    )
    sub.add_argument("--list", action="store_true", help="show all proposals instead")
    sub.add_argument(
        "--site",
        type=Path,
        metavar="TARGET",
        help="apply one that is no entry to this vLLM alone, as apply does",
    )
    check(sub, "run the tests, write nothing")
    return parser


def main(root: Path, argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    args = _parser(root).parse_args(argv)
    try:
        return args.run(args)
    except SeriesError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
    return 1
