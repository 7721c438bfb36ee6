# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Links, paths and commands of the documents."""

import sys
from pathlib import Path

import documents
import pytest
import trees
from references import Project, check_commands, check_links
from trees import ROOT

FILES = {
    "README.md": "# The title\n\n## A `code` & a dash\n\n## Twice\n\n## Twice\n",
    "docs/other.md": '# Other\n\n```text\n# no heading\n```\n<a id="here"></a>\n',
    "patches/a.patch": '+    turbo_kernel: str = "auto"\n',
    "models/small/config.json": "{}",
    "scripts/run.py": (
        "import common\nfrom package import cli\n"
        'parser.add_argument("--own", "-o", help="--no-option")\n'
        'parser.add_argument("--flag", action=argparse.BooleanOptionalAction)\n'
    ),
    "scripts/common.py": 'add = parser.add_argument\nadd("--shared")\n',
    "scripts/package/__init__.py": "",
    "scripts/package/cli.py": 'sub.add_argument("--inner")\n',
    "scripts/run.sh": '# --comment\nexec "$python" "$here/run.py" --given "$@"\n',
    "scripts/test.sh": "case $step in\n    lint | tooling) ;;\nesac\n# --all\n--all)\n",
    "ci/gpu.py": (
        "from types import SimpleNamespace as Section\n"
        'SECTIONS = {"bench": Section(commands="benchmarks/time.py --output x\\ny"),'
        '"kernels": Section(commands="-m pytest tests")}\n'
        'def main():\n    parser.add_argument("--list")\n'
    ),
    "benchmarks/time.py": 'parser.add_argument("--arms")\n',
    "vllm_overlay/vllm/turbo/build.py": 'run_module(f"{__spec__.parent}.prebuild")\n',
    "vllm_overlay/vllm/turbo/prebuild.py": 'parser.add_argument("--arch")\n',
    "vllm_overlay/docs/features/turbo.md": "# Turbo\n",
    "vllm_overlay/tests/turbo/fit.py": "",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A small project with a script of each kind."""
    root = tmp_path_factory.mktemp("small")
    trees.write_tree(root, FILES)
    return Project(root)


def _find(check, small: Project, text: str, name: str) -> list[str]:
    document = small.root / name
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(text)
    return [f"{line}: {fault}" for line, fault in check(document, small)]


@pytest.mark.parametrize(
    "target",
    [
        "https://example.org/nothing#here",
        "#first",
        "other.md",
        "other.md#other",
        "other.md#here",
        "../README.md#a-code--a-dash",
        "../README.md#twice-1",
        "../models",
        "../scripts/run.py",
    ],
)
def test_good_links(small: Project, target: str):
    text = f"# First\n\n[two\nlines]({target}) and [![picture](other.md)]({target})\n"
    assert _find(check_links, small, text, "docs/links.md") == []


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("#second", "no such heading"),
        ("others.md", "no such file"),
        ("other.md#no-heading", "no such heading"),
        ("../README.md#twice-2", "no such heading"),
        ("../../outside.md", "no such file"),
    ],
)
def test_broken_links(small: Project, target: str, fault: str):
    wanted = f"{target}: {fault}"
    for text, line in (
        (f"# First\n\n[two\nlines]({target})\n", 4),
        (f"| a |\n|---|\n| [`b`]({target}) |\n", 3),
        (f'[![x](other.md)]({target} "title")\n', 1),
        (f"[a][b]\n\n[b]: {target}\n", 3),
    ):
        found = _find(check_links, small, text, "docs/links.md")
        assert found == [f"{line}: {wanted}"], text


def test_code_has_no_links(small: Project):
    text = "`[a](none.md)`\n\n    [a](none.md)\n\n```\n[a](none.md)\n```\n"
    assert _find(check_links, small, text, "docs/links.md") == []


def test_links_of_vllms_pages(small: Project):
    """Links to vLLM's own pages are not checked.

    The project's files outside the overlay are not in vLLM's tree.
    """
    name = "vllm_overlay/docs/features/links.md"
    text = "[a](../../docs/cli.md#a) [b](turbo.md#turbo) [c](../features/turbo.md)\n"
    assert _find(check_links, small, text, name) == []
    text = "[a](turbo_none.md)\n[b](turbo.md#none)\n[c](../../../README.md)\n"
    assert _find(check_links, small, text, name) == [
        "1: turbo_none.md: no such file",
        "2: turbo.md#none: no such heading",
        "3: ../../../README.md: out of vLLM's tree",
    ]


COMMANDS = [
    "scripts/run.py --own 1 --shared --inner --no-flag",
    "python scripts/run.py MODEL [--own a b] [--flag]   # not --this",
    "scripts/run.sh --own --given --help",
    "`run.py` --own=1 | other --option",
    "scripts/test.sh lint tooling --all && vllm serve --option",
    "ci/gpu.py bench kernels",
    "ci/gpu.py --list",
    "ci/gpu.py bench -- --arms a b",
    "ci/gpu.py kernels -- -n 4 --dist worksteal",
    "python -m vllm.turbo.build --arch 9.0",
    "python -m pytest scripts/run.py --durations=5",
    "vllm serve MODEL --attention-config.turbo_kernel cuda",
    "models/NAME models/*/config.json models/... scripts/{run,common}.py,",
    "recipes/models/none.yaml $OUT/scripts/none.py",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_good_commands(small: Project, command: str):
    command = command.replace("`", "")
    text = f"A\n\n    {command}\n\n```bash\n$ {command}\n```\n\nThe `{command}`.\n"
    assert _find(check_commands, small, text, "docs/commands.md") == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("scripts/none.sh", "scripts/none.sh: no such file"),
        ("a b/ scripts/none", "scripts/none: no such file"),
        ("models/NAME tests/none/", "tests/none/: no such file"),
        ("scripts/{run,none}.py", "scripts/none.py: no such file"),
        ("scripts/*.toml", "scripts/*.toml: no such file"),
        ("scripts/run.py --own --none", "--none: no option of run.py"),
        ("run.py [--none]", "--none: no option of run.py"),
        ("scripts/run.sh --comment", "--comment: no option of run.sh"),
        ("scripts/test.sh lint none", "none: no section of test.sh"),
        ("ci/gpu.py bench none", "none: no section of gpu.py"),
        ("ci/gpu.py --none bench", "--none: no option of gpu.py"),
        ("ci/gpu.py bench -- --list", "--list: no option of time.py"),
        ("python -m vllm.turbo.build --none", "--none: no option of build.py"),
        ("python -m vllm.turbo.none --none", "vllm.turbo.none: no such module"),
        (
            "vllm serve --attention-config.turbo_none 1",
            "turbo_none: no option of the series",
        ),
    ],
)
def test_broken_commands(small: Project, command: str, fault: str):
    for text, line in (
        (f"A\n\n    {command}\n", 3),
        (f"A\n\n```bash\n{command}\n```\n", 4),
        (f"A paragraph\nand `{command}`.\n", 2),
        (f"| a |\n|---|\n| `{command}` |\n", 3),
    ):
        found = _find(check_commands, small, text, "docs/commands.md")
        assert found == [f"{line}: {fault}"], text


def test_commands_of_several_lines(small: Project):
    text = "A\n\n    scripts/run.py --own \\\n      --none\n\n`run.py\n--none`\n"
    assert _find(check_commands, small, text, "docs/commands.md") == [
        "3: --none: no option of run.py",
        "6: --none: no option of run.py",
    ]


def test_paths_of_vllms_pages(small: Project):
    text = "`tests/turbo/fit.py` `tests/turbo/none.py`\n"
    name = "vllm_overlay/docs/features/commands.md"
    assert _find(check_commands, small, text, name) == [
        "1: tests/turbo/none.py: no such file"
    ]
    assert len(_find(check_commands, small, text, "docs/commands.md")) == 2


@pytest.fixture(scope="module")
def project_files() -> Project:
    return Project()


@pytest.mark.parametrize(
    "document",
    [pytest.param(x, id=str(x.relative_to(ROOT))) for x in documents.find_documents()],
)
def test_references(document: Path, project_files: Project):
    found = [*check_links(document, project_files)]
    found += check_commands(document, project_files)
    assert not found, "\n".join(f"{document}:{line}: {fault}" for line, fault in found)


def test_scripts_of_the_project_are_read(project_files: Project):
    """A check that reads nothing would find no fault."""
    scripts = ROOT / "scripts"
    assert {"--model", "--kv-cache-dtype"} <= project_files.options(
        scripts / "quickstart.sh"
    )
    assert "--kernels" in project_files.options(scripts / "apply.sh")
    assert "--fixup" not in project_files.options(scripts / "series.py")
    assert {"bench", "transfers", "quality"} <= set(project_files.sections)
    assert all(project_files.sections.values())
    assert {"lint", "tooling", "engine"} <= project_files.steps
    assert "turbo_window" in project_files.turbo_options


def test_command():
    done = trees.run(sys.executable, ROOT / "ci/references.py", "--help")
    assert done.returncode == 0
    assert "FILE" in done.stdout
