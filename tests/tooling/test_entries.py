# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ci/entries.py on small series, each a line of commits."""

import py_compile
import sys
from pathlib import Path

import pytest
import trees

SCRIPT = trees.ROOT / "ci/entries.py"
PATH = "tests/turbo/test_format.py"
TEST = (
    "from vllm.turbo import format\n\n\ndef test_bits():\n    assert format.BITS == 4\n"
)


class Checkout:
    """A checkout of the small vLLM, for commits of a series."""

    def __init__(self, root: Path) -> None:
        self.root = trees.make_checkout(root)
        trees.git(root, "update-ref", "refs/turbo-series/turbo", "HEAD")
        trees.git(root, "switch", "-q", "-c", "turbo")

    def add(self, subject: str, files: dict[str, str], *guards: str) -> None:
        """Commit an entry."""
        trees.write_tree(self.root, files)
        trees.git(self.root, "add", "-A")
        trailers = "".join(f"Guarded-By: {guard}\n" for guard in guards)
        trees.git(self.root, "commit", "-q", "-m", f"{subject}\n\n{trailers}")

    def compile_unchecked(self) -> None:
        """Leave bytecode of the format that Python does not compare with a source."""
        stale = py_compile.PycInvalidationMode.UNCHECKED_HASH
        path = self.root / "vllm/turbo/format.py"
        py_compile.compile(str(path), invalidation_mode=stale)

    def check(self) -> tuple[int, str]:
        """Run the script; return its status and what it printed."""
        done = trees.run(sys.executable, SCRIPT, self.root)
        branch = trees.git(self.root, "branch", "--show-current")
        assert branch == "turbo\n"
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


PACKAGE = {"vllm/turbo/__init__.py": "", "vllm/turbo/format.py": "BITS = 4\n"}


def test_good_series(checkout: Checkout) -> None:
    """A guard runs with the entry that brings it; the engine's guards are left out."""
    checkout.add("[A] Wire", {"setup.py": "x = 1\n"}, f"{PATH}::test_bits")
    checkout.add("[A] Add", PACKAGE, "tests/engine/test_x.py::test_y")
    checkout.add("[A] Test", {PATH: TEST}, PATH)
    status, said = checkout.check()
    assert status == 0, said
    lines = said.splitlines()
    assert [line.rsplit(" in ", 1)[0] for line in lines] == [
        "[1/3] [A] Wire: 0 module(s), 0 test file(s), 0 guard(s): passed",
        "[2/3] [A] Add: 2 module(s), 0 test file(s), 0 guard(s): passed",
        "[3/3] [A] Test: 0 module(s), 1 test file(s), 2 guard(s): passed",
    ]


SKIPPED = TEST.replace("    assert", "    import pytest\n    pytest.skip()\n    assert")
CASES = (
    "import pytest\n\n\n@pytest.mark.parametrize('case', [0, 1, 2])\n"
    "def test_cases(case):\n    assert case == {first}\n"
)


@pytest.mark.parametrize(
    ("files", "guards", "reason"),
    [
        ({"setup.py": "x = (\n"}, [], "setup.py: "),
        ({"vllm/turbo/a.py": "import vllm.turbo.later\n"}, [], "vllm.turbo.later"),
        ({PATH: TEST.replace("format", "later")}, [], "cannot import name 'later'"),
        ({PATH: TEST.replace("4", "3")}, [f"{PATH}::test_bits"], "assert 4 == 3"),
        ({PATH: SKIPPED}, [f"{PATH}::test_bits"], "did not pass: " + PATH),
        ({PATH: TEST}, [f"{PATH}::test_bytes"], f"did not pass: {PATH}::test_bytes"),
        ({PATH: CASES.format(first=1)}, [PATH], "assert 0 == 1"),
    ],
    ids=["syntax", "import", "collection", "failure", "skip", "name", "case"],
)
def test_bad_entries(
    checkout: Checkout, files: dict[str, str], guards: list[str], reason: str
) -> None:
    """The broken entry is named, though a later one mends it; others are checked."""
    checkout.add("[A] Add", PACKAGE)
    checkout.add("[A] Break", files, *guards)
    later = {path: "" for path in files}
    later |= {"vllm/turbo/later.py": "BITS = 4\n", "setup.py": "x = 2\n"}
    checkout.add("[A] Mend", later)
    status, said = checkout.check()
    assert status == 1
    assert reason in said
    assert said.splitlines()[-1] == "failed: [A] Break"
    assert said.count("failed: ") == 1
    assert "[3/3] [A] Mend" in said


def test_guards_beside_a_broken_file(checkout: Checkout) -> None:
    """The guards run all the same, and are not blamed."""
    broken = {"tests/turbo/test_broken.py": "import vllm.turbo.later\n"}
    checkout.add("[A] Add", {**PACKAGE, PATH: TEST, **broken}, f"{PATH}::test_bits")
    status, said = checkout.check()
    assert status == 1
    assert "test_broken.py" in said
    assert "1 passed" in said
    assert "did not pass" not in said


def test_guards_in_folders_of_their_own(checkout: Checkout) -> None:
    """A guard in one of vLLM's test files runs beside one in the entry's own."""
    old = "def test_old():\n    assert False\n"
    theirs = "tests/config/test_cache.py"
    broken = {"tests/conftest.py": "import vllm.gone\n", "tests/turbo/conftest.py": ""}
    checkout.add("[A] Be there before", {theirs: old, **broken})
    new = {theirs: f"{old}\n\ndef test_new():\n    pass\n", **PACKAGE, PATH: TEST}
    checkout.add("[A] Add", new, f"{theirs}::test_new", f"{PATH}::test_bits")
    status, said = checkout.check()
    assert status == 0, said
    assert "[2/2] [A] Add: 2 module(s), 1 test file(s), 2 guard(s): passed" in said


def test_one_case_of_a_guard(checkout: Checkout) -> None:
    """Only the first case runs: the kernels' step runs all."""
    checkout.add("[A] Test", {PATH: CASES.format(first=0)}, f"{PATH}::test_cases")
    assert checkout.check()[0] == 0


def test_stale_bytecode(checkout: Checkout) -> None:
    """Python's cache does not hide what an entry changes."""
    checkout.add("[A] Add", {**PACKAGE, PATH: TEST}, f"{PATH}::test_bits")
    (checkout.root / "vllm/turbo/format.py").write_text("BITS = 3\n")
    checkout.compile_unchecked()
    trees.git(checkout.root, "checkout", "-q", ".")
    status, said = checkout.check()
    assert status == 0, said


def test_stale_bytecode_of_another_entry(checkout: Checkout) -> None:
    """A cache of a later entry's sources does not hide an entry's own either."""
    checkout.add("[A] Be there before", PACKAGE)
    trees.git(checkout.root, "update-ref", "refs/turbo-series/turbo", "HEAD")
    checkout.add("[A] Test", {PATH: TEST}, f"{PATH}::test_bits")
    checkout.add("[A] Change", {"vllm/turbo/format.py": "BITS = 5\n"})
    checkout.compile_unchecked()
    status, said = checkout.check()
    assert status == 0, said


def test_no_series(checkout: Checkout) -> None:
    assert checkout.check()[0] == 1


def test_fixtures_above_a_guards_folder(checkout: Checkout) -> None:
    """Guards in folders of the kernels' tests share the conftest.py above these."""
    tests = "tests/kernels/turbo"
    fixture = "import pytest\n\n\n@pytest.fixture\ndef bits():\n    return 4\n"
    files = {
        f"{tests}/conftest.py": fixture,
        f"{tests}/formats/test_bits.py": "def test_bits(bits):\n    assert bits == 4\n",
        f"{tests}/layer/test_x.py": "def test_x(bits):\n    assert bits\n",
        "tests/conftest.py": "import vllm.gone\n",
    }
    guards = [path for path in files if "/test_" in path]
    checkout.add("[A] Add", {**PACKAGE, **files}, *guards)
    status, said = checkout.check()
    assert status == 0, said
    assert "2 test file(s), 2 guard(s): passed" in said
