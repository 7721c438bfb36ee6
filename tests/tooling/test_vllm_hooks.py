# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ci/vllm_hooks.py on a small checkout with hooks of its own."""

import sys
from pathlib import Path

import pytest
import trees

SCRIPT = trees.ROOT / "ci/vllm_hooks.py"
CONFIG = """
exclude: 'third_party/.*'
repos:
- repo: https://example.com/ruff-pre-commit
  rev: v0.14.0
  hooks:
  - id: ruff-check
    args: [--fix]
  - id: ruff-format
- repo: https://example.com/unknown
  rev: v1
  hooks:
  - id: unknown
- repo: local
  hooks:
  - id: no-tabs
    name: No tabs
    language: python
    entry: python tools/no_tabs.py
    types: [python]
    additional_dependencies: [nowhere]
  - id: mypy
    name: Run mypy
    language: python
    entry: python tools/no_such_file.py
  - id: script
    name: Run a script
    language: script
    entry: tools/no_such_file.sh
"""
NO_TABS = """
import sys

found = [name for name in sys.argv[1:] if "\\t" in open(name).read()]
print(*found, "has a tab")
sys.exit(bool(found))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = trees.make_checkout(tmp_path / "checkout")
    files = {
        ".pre-commit-config.yaml": CONFIG,
        "tools/no_tabs.py": NO_TABS,
        "vllm/theirs.py": "x = '\t'\n",
    }
    trees.write_tree(root, files)
    trees.git(root, "add", "-A")
    trees.git(root, "commit", "-q", "-m", "tools")
    trees.git(root, "update-ref", "refs/turbo-series/turbo", "HEAD")
    trees.git(root, "switch", "-q", "-c", "turbo")
    return root


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("vllm/ours.py", "x = 1\n", ""),
        ("vllm/ours.py", 'x = "\t"\n', "vllm/ours.py has a tab"),
        ("vllm/ours.py", "import os\n", "F401"),
        ("vllm/ours.py", "x  =  1\n", "Would reformat: vllm/ours.py"),
        ("vllm/ours.txt", "\t\n", ""),
        ("vllm/third_party/ours.py", "x  = '\t'\n", ""),
    ],
)
def test_hooks(checkout: Path, path: str, text: str, reason: str) -> None:
    """Hooks run on the files of the series alone, and change none."""
    trees.write_tree(checkout, {path: text, "docs/ours.md": "# Ours\n"})
    trees.git(checkout, "add", "-A")
    trees.git(checkout, "commit", "-q", "-m", "ours")
    done = trees.run(sys.executable, SCRIPT, checkout)
    assert done.returncode == bool(reason), done.stdout + done.stderr
    assert reason in done.stdout
    assert "theirs" not in done.stdout
    for hook in ("ruff-check", "ruff-format", "No tabs"):
        assert hook in done.stdout
    for hook in ("unknown", "mypy", "script"):
        assert hook not in done.stdout
    assert trees.git(checkout, "status", "--porcelain") == ""


FORMAT = "from vllm.v1.attention.ops.turbo.format import TILE_TOKENS"


@pytest.mark.parametrize(
    ("path", "line", "name"),
    [
        ("vllm/envs.py", FORMAT, "ops.turbo.format.TILE_TOKENS"),
        ("vllm/envs.py", "from vllm.v1.attention.ops import turbo", "ops.turbo"),
        (
            "vllm/envs.py",
            "from vllm.v1.attention.backends import turbo_attn",
            "backends.turbo_attn",
        ),
        (
            "vllm/v1/attention/backends/registry.py",
            "from .mla.turbo_mla import TurboMLABackend",
            "mla.turbo_mla",
        ),
        ("vllm/envs.py", "from vllm.v1.attention.backends import turboquant_attn", ""),
        ("vllm/v1/attention/ops/turbo/choose.py", FORMAT, ""),
        ("vllm/v1/attention/backends/mla/turbo_mla.py", FORMAT, ""),
        ("tests/kernels/turbo/utils.py", FORMAT, ""),
    ],
)
def test_core_is_free_of_the_feature(
    checkout: Path, path: str, line: str, name: str
) -> None:
    """No module of vLLM's core imports turbo's, within a function either."""
    used = line.split()[-1]
    text = f"def use():\n    {line}\n\n    return {used}\n"
    trees.write_tree(checkout, {path: text})
    trees.git(checkout, "add", "-A")
    trees.git(checkout, "commit", "-q", "-m", "ours")
    done = trees.run(sys.executable, SCRIPT, checkout)
    assert done.returncode == bool(name), done.stdout + done.stderr
    assert ("core is free of the feature" in done.stdout) == bool(name)
    if name:
        assert f"{path} imports " in done.stdout and name in done.stdout
