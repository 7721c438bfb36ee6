# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Show that a proposal's tests fail without its change and pass with it."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from .errors import SeriesError
from .git import Git
from .proposals import Proposal, is_test
from .target import user_python

Say = Callable[[str], None]
PYTEST = ("-m", "pytest", "-q", "--no-header", "--disable-warnings", "--tb=short")
# More is no help to a reader of the pull request.
MAX_LINES = 60
# How tests run on a machine without a GPU, where this project's environment is.
_SETTINGS = (
    "import json, vllm_turbo_cpu_standins.settings as s;"
    "print(json.dumps(s.engine_environment('v2')))"
)
PLUGINS = "-p vllm_turbo_cpu_standins.interpreter -p vllm_turbo_cpu_standins.varlen"
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """A run of tests.

    Attributes:
        output: The command and what pytest printed, without folders of this machine.
        outcomes: The outcomes of each test's cases, by the test's id.

    """

    output: str
    outcomes: dict[str, set[str]]


def find_tests(tree: Git, paths: list[str]) -> tuple[list[str], list[str]]:
    """The ids of the tests that staged changes add lines to, and of those the new."""
    found, known = [], set()
    for path in paths:
        diff = tree.out("diff", "--cached", "--unified=0", "HEAD", "--", path).decode()
        lines: set[int] = set()
        for match in _HUNK.finditer(diff):
            start, count = int(match[1]), int(match[2] or 1)
            lines |= set(range(start, start + count))
        module = ast.parse((tree.folder / path).read_text(encoding="utf-8"))
        found += [f"{path}::{name}" for name in _touched(module, lines)]
        old = tree.run("show", f"HEAD:{path}").stdout.decode()
        every = set(range(1, old.count("\n") + 2))
        known |= {f"{path}::{name}" for name in _touched(ast.parse(old), every)}
    return found, [name for name in found if name not in known]


def _touched(node: ast.Module | ast.ClassDef, lines: set[int]) -> list[str]:
    found = []
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            found += [f"{child.name}::{name}" for name in _touched(child, lines)]
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([child.lineno, *(x.lineno for x in child.decorator_list)])
            own = set(range(first, (child.end_lineno or first) + 1))
            if child.name.startswith("test") and own & lines:
                found.append(child.name)
    return found


def settings(python: str) -> dict[str, str]:
    """Environment variables of tests: those of the stand-ins, where they are."""
    done = subprocess.run(
        [python, "-c", _SETTINGS], capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else {}


def run_tests(tree: Git, tests: list[str], variables: dict[str, str]) -> Run:
    """Run tests of a work tree, which is also the vLLM that they import."""
    scratch = tree.folder.parent
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    python = user_python()
    unseen = ["-pno:cacheprovider", "--show-capture=no", f"--junitxml={report}"]
    unseen.append(f"--basetemp={scratch / 'tmp'}")
    search = os.pathsep.join(
        [str(tree.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [python, *PYTEST, *unseen, *tests],
        cwd=tree.folder,
        # Byte code of the run without the change may count for one with it: a source
        # can change within a second, and keep its size.
        env={
            **os.environ,
            **variables,
            "PYTHONPATH": search,
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if not report.is_file():
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise SeriesError(f"{python} cannot run the tests: {' '.join(said[-3:])}")
    names = [f"{name}={shlex.quote(text)}" for name, text in variables.items()]
    command = shlex.join(["python", *PYTEST, *tests])
    lines = clean(done.stdout, scratch).strip().splitlines()
    if len(lines) > MAX_LINES:
        lines = ["...", *lines[-MAX_LINES:]]
    output = "\n".join([" ".join(["$", *names, command]), *lines])
    return Run(output, read_outcomes(report, tests))


def clean(text: str, scratch: Path) -> str:
    """Take this machine's folders out of what pytest printed."""
    text = text.replace(f"{scratch / 'vllm'}/", "").replace(str(scratch), "")
    return re.sub(r"/\S+?/(?:site-packages|lib/python3\.\d+)/", "", text)


def read_outcomes(report: Path, tests: list[str]) -> dict[str, set[str]]:
    """The outcomes of each test's cases: "passed", "failed" or "skipped"."""
    keys = {}
    for test in tests:
        path, _, name = test.partition("::")
        module = path.removesuffix(".py").replace("/", ".")
        keys[f"{module}.{name.replace('::', '.')}"] = test
    outcomes: dict[str, set[str]] = {test: set() for test in tests}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name', '').split('[')[0]}"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        if "skipped" in kinds:
            outcome = "skipped"
        # A module that cannot be imported has one case, of its own name.
        for key, test in keys.items():
            if name == key or key.startswith(f"{name.strip('.')}."):
                outcomes[test].add(outcome)
    return outcomes


def prove(proposal: Proposal, tree: Git, say: Say) -> str:
    """Run a proposal's tests without and with its change.

    Args:
        proposal: The one that is staged in `tree`.
        tree: The work tree; it has the change afterwards, as before.
        say: Takes a line on each run.

    Returns:
        The part of the pull request's text that shows both.

    Raises:
        SeriesError: A test passes without the change, or does not pass with it.

    """
    staged = tree.text("diff", "--cached", "--name-only").splitlines()
    code = [path for path in staged if not is_test(path)]
    files = [path for path in staged if is_test(path) and path.endswith(".py")]
    tests, new = find_tests(tree, files)
    if not tests:
        raise SeriesError(f"{proposal.name} changes no test")
    variables = settings(user_python())
    if proposal.added and variables:
        # Its kernels and its backend are for a GPU.
        variables["PYTEST_ADDOPTS"] = PLUGINS
    tree.out("restore", "--source=HEAD", "--worktree", "--", *code)
    try:
        before = run_tests(tree, tests, variables)
    finally:
        tree.out("restore", "--worktree", "--", *code)
    say(f"{proposal.name}, without the change: {before.output.splitlines()[-1]}")
    # A test that is only adapted may pass, if others fail.
    failed = [name for name in tests if "failed" in before.outcomes[name]]
    if wrong := [name for name in new or tests if name not in failed]:
        raise SeriesError(
            f"{', '.join(wrong)} does not fail without the change:\n{before.output}"
        )
    after = run_tests(tree, tests, variables)
    say(f"{proposal.name}, with the change: {after.output.splitlines()[-1]}")
    if wrong := [
        name
        for name in tests
        if "failed" in after.outcomes[name] or "passed" not in after.outcomes[name]
    ]:
        raise SeriesError(f"{', '.join(wrong)} does not pass:\n{after.output}")
    return (
        "Without the change the tests fail:\n\n"
        f"```console\n{before.output}\n```\n\n"
        "With the change they pass:\n\n"
        f"```console\n{after.output}\n```\n"
    )


def _run(command: list[str], tree: Git) -> "subprocess.CompletedProcess[str]":
    """Run a tool in a work tree, with the programs beside `PYTHON` found first."""
    python = user_python()
    folder = str(Path(shutil.which(python) or python).parent)
    path = os.pathsep.join([folder, os.environ.get("PATH", "")])
    return subprocess.run(
        [python, *command],
        cwd=tree.folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def run_hooks(root: Path, tree: Git, say: Say) -> str:
    """Run vLLM's pre-commit hooks and mypy, as far as this environment has them.

    Returns:
        The part of the pull request's text that shows them; empty if none ran.

    Raises:
        SeriesError: A hook fails, or mypy has an error that it has not without the
            change.

    """
    if _run(["-c", "import pre_commit, yaml"], tree).returncode:
        say(f"left out: vLLM's pre-commit, which {user_python()} does not have")
        return ""
    done = _run([str(root / "ci/vllm_hooks.py"), str(tree.folder), "--staged"], tree)
    output = clean(done.stdout, tree.folder.parent).strip()
    if done.returncode:
        raise SeriesError(f"vLLM's pre-commit fails:\n{output or done.stderr.strip()}")
    lines = [line for line in output.splitlines() if not line.endswith("Skipped")]
    lines.append(run_mypy(tree))
    say(f"vLLM's pre-commit passes; {lines[-1]}")
    return "\nvLLM's pre-commit hooks:\n\n```console\n" + "\n".join(lines) + "\n```\n"


def run_mypy(tree: Git) -> str:
    """Run vLLM's mypy hook with and, if it has errors, without the change.

    The hook's own environment lacks PyTorch, so one that has it may find more.

    Returns:
        A line on the result.

    Raises:
        SeriesError: There are errors with the change alone.

    """
    changed = ("diff", "--cached", "--name-only", "--diff-filter=M", "--", "*.py")
    files = tree.text(*changed).split()
    hook = tree.folder / "tools/pre_commit/mypy.py"
    if not hook.is_file() or _run(["-c", "import mypy"], tree).returncode:
        return "mypy: left out, it is not here"
    command = [str(hook), "3.11", *files]
    after = mypy_errors(_run(command, tree).stdout)
    if not after:
        return "mypy: no errors"
    tree.out("restore", "--source=HEAD", "--worktree", "--", *files)
    try:
        before = mypy_errors(_run(command, tree).stdout)
    finally:
        tree.out("restore", "--worktree", "--", *files)
    if new := after - before:
        raise SeriesError("mypy, with the change:\n" + "\n".join(new.elements()))
    return f"mypy: {before.total()} errors without the change, none new with it"


def mypy_errors(text: str) -> Counter[str]:
    """The errors that mypy printed, without their lines' numbers."""
    found = re.findall(r"^(\S+?):\d+(?::\d+)?: error: (.+)$", text, re.MULTILINE)
    return Counter(f"{path}: {error}" for path, error in found)
