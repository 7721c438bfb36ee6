# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs vLLM's own pre-commit hooks on the files that the series touches.

The series must be a branch of a checkout, as `series.py import` makes it. The hooks are
those of the checkout's configuration that run in seconds: its own checks, and the
linters that are in this environment. mypy takes minutes.

And vLLM's core stays free of the feature: no touched module of vLLM imports turbo's,
except turbo's own. vLLM's registry has their names as text.
"""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

# Turbo's modules, by name, also in relative imports, and by path.
FEATURE = re.compile(r"(^|\.)(ops\.turbo|turbo_(attn|metadata|tail|mla)\w*)(\.|$)")
OWN_PATH = re.compile(r"vllm/v1/attention/(ops/turbo/|backends/(mla/)?turbo_)")
SLOW = {"mypy"}
TOOLS: dict[str, dict] = {
    "ruff-check": {"entry": "ruff check", "types_or": ["python", "pyi"]},
    "ruff-format": {"entry": "ruff format --check", "types_or": ["python", "pyi"]},
    "typos": {"entry": "typos", "types": ["text"]},
    "clang-format": {"entry": "clang-format --dry-run --Werror"},
}
WRITES = {"--fix", "--verbose"}


def here(hook: dict) -> dict | None:
    """Returns a hook as it runs in this environment, or None if it does not."""
    if hook["id"] in TOOLS:
        hook = {"name": hook["id"], **hook, **TOOLS[hook["id"]]}
        hook["args"] = [word for word in hook.get("args", []) if word not in WRITES]
    elif hook["id"] in SLOW or not hook.get("entry", "").startswith("python tools/"):
        return None
    # vLLM or this project has the packages that hooks ask for.
    left_out = ("additional_dependencies", "verbose")
    kept = {name: value for name, value in hook.items() if name not in left_out}
    return {**kept, "language": "system"}


def configuration(folder: Path) -> str:
    """Returns the text of a pre-commit configuration of the hooks that run here."""
    theirs = yaml.safe_load((folder / ".pre-commit-config.yaml").read_text())
    hooks = [here(hook) for repo in theirs["repos"] for hook in repo["hooks"]]
    own = {"repo": "local", "hooks": [hook for hook in hooks if hook]}
    return yaml.safe_dump({"exclude": theirs.get("exclude", "^$"), "repos": [own]})


def feature_imports(folder: Path, files: Iterable[str]) -> Iterator[str]:
    """Yields a line for each import of turbo's modules in a file of vLLM's core."""
    for file in files:
        path = folder / file
        is_core = file.startswith("vllm/") and not OWN_PATH.match(file)
        if not is_core or path.suffix != ".py" or not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                package = f"{getattr(node, 'module', None) or ''}."
                names = [f"{package}{alias.name}".strip(".") for alias in node.names]
                for name in filter(FEATURE.search, names):
                    yield f"{file} imports {name}: core is free of the feature"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the checkout, on the branch")
    parser.add_argument("--branch", default="turbo", help="its name (default: turbo)")
    parser.add_argument(
        "--staged", action="store_true", help="the files that are staged instead"
    )
    args = parser.parse_args()
    changes = ["git", "diff", "--name-only", "-z"]
    if args.staged:
        changes += ["--cached"]
    else:
        changes += [f"refs/turbo-series/{args.branch}", args.branch]
    listed = subprocess.run(
        changes, cwd=args.folder, check=True, capture_output=True, text=True
    )
    files = listed.stdout.split("\0")[:-1]
    found = list(feature_imports(args.folder, files))
    print(*found, sep="\n", end="\n" if found else "")
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "hooks.yaml"
        config.write_text(configuration(args.folder))
        command = ["pre-commit", "run", "--config", str(config), "--files", *files]
        return subprocess.run(command, cwd=args.folder).returncode or bool(found)


if __name__ == "__main__":
    sys.exit(main())
