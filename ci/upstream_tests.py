# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs vLLM's own tests of KV connectors and of offloading under a turbo cache dtype.

The tests are the pinned sdist's with the series, which completes one of their stubs.
They test this environment's vLLM. Two things are changed: the models that they name are
folders with only a configuration, and an import of Ray is gone, which one parameter of
one test needs. `upstream_plugin.py` gives their caches the dtype.

`upstream_tests.toml` has the expected outcomes: the number of cases of each file that
pass, and the reason why each other test does not apply. A test with another outcome
fails this check, also one that passes unexpectedly. `--kv-cache-dtype auto` changes no
cache: a test that fails then fails without the series' dtypes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "cpu_standins")]

from turbo_series import operate, sdist  # noqa: E402
from turbo_series.model import load_series  # noqa: E402
from turbo_series.target import open_target  # noqa: E402
from turbo_series.upstream import load_upstream  # noqa: E402

TABLE = Path(__file__).with_suffix(".toml")
TESTS = Path("tests/v1")
FOLDERS = ("kv_connector/unit", "kv_offload")
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "dtype": "float16",
}
# The part of a model's configuration that tests need, by the name that they use.
MODELS = {
    "facebook/opt-125m": OPT
    | {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "word_embed_proj_dim": 768,
    },
    "facebook/opt-350m": OPT
    | {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "ffn_dim": 4096,
        "word_embed_proj_dim": 512,
    },
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
    },
}
# Replaced text of a test's file, and its replacement.
EDITS = {"kv_connector/unit/test_nixl_connector.py": ("\nimport ray\n", "\n")}
# Limit of a test, which none reaches on a busy machine.
TIMEOUT_S = 300
NOT_NAMED = "not named"
HEADING = (
    "# The outcomes of vLLM's tests of connectors and offloading with turbo4: the",
    "# cases of each file that pass, and the cases of each other test that do not,",
    "# with the reason (upstream_tests.py --write).",
)


@dataclass
class Outcomes:
    """The outcomes of the tests.

    Attributes:
        passed: Cases that pass, by file.
        packed: Passed cases whose caches had the dtype's pages, by file.
        others: Cases that do not pass, by test, without its parameters.
        reasons: The reason of the first of these, by test.

    """

    passed: Counter[str] = field(default_factory=Counter)
    packed: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, cases: dict[str, list[Any]]) -> "Outcomes":
        """Counts the outcomes that `upstream_plugin.py` noted."""
        found = cls()
        for nodeid, (outcome, reason, has_pages) in cases.items():
            test = nodeid.removeprefix(f"{TESTS}/").split("[")[0]
            if outcome == "passed":
                found.passed[test.split("::")[0]] += 1
                found.packed[test.split("::")[0]] += has_pages
            else:
                found.others[test] += 1
                found.reasons.setdefault(test, reason)
        return found


def prepare(folder: Path) -> None:
    """Unpacks the pinned sdist with the series, and adapts the tests to this check."""
    sdist.obtain(load_upstream(ROOT), folder, git=False)
    operate.apply(load_series(ROOT), open_target(folder))
    # Otherwise it is imported in place of the environment's.
    (folder / "vllm").rename(folder / "unused-vllm")
    for path, (old, new) in EDITS.items():
        replace(folder / TESTS / path, old, new)
    for name, config in MODELS.items():
        model = folder / "models" / name.replace("/", "--")
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(config))
        users = [
            path
            for path in (folder / TESTS).rglob("*.py")
            if f'"{name}"' in path.read_text(encoding="utf-8")
        ]
        assert users, f"no test names {name}"
        for path in users:
            replace(path, f'"{name}"', f'"{model}"')


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def run_tests(folder: Path, cache_dtype: str, paths: list[str]) -> Outcomes:
    """Runs tests of an unpacked sdist, with their output as ours."""
    from vllm_turbo_cpu_standins.settings import engine_environment

    noted = folder / "outcomes.json"
    search = [str(Path(__file__).parent), str(folder)]
    variables = engine_environment("v1") | {
        "UPSTREAM_CACHE_DTYPE": cache_dtype,
        "UPSTREAM_OUTCOMES": str(noted),
        "PYTHONPATH": os.pathsep.join(search),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "upstream_plugin", "--tb=no", "--disable-warnings", "-rN"]
    command += ["--continue-on-collection-errors", f"--timeout={TIMEOUT_S}"]
    command += [str(TESTS / path) for path in paths]
    subprocess.run(command, cwd=folder, env=os.environ | variables)
    if not noted.is_file():
        raise SystemExit("the tests did not run to their end: see above")
    return Outcomes.of(json.loads(noted.read_text()))


@dataclass
class Table:
    """The expected outcomes.

    Attributes:
        passes: Cases that pass, by file.
        others: The number of cases that do not pass, and the reason, by test.

    """

    passes: dict[str, int]
    others: dict[str, tuple[int, str]]


def load_table() -> Table:
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    others = {
        test: (count, entry["reason"])
        for entry in table["not_applicable"]
        for test, count in entry["tests"].items()
    }
    return Table(table["passes"], others)


def is_below(test: str, paths: list[str]) -> bool:
    """Whether a test, or file, is in one of the folders or files."""
    return any(f"{test}/".startswith((f"{path}/", f"{path}::")) for path in paths)


def compare(found: Outcomes, table: Table, paths: list[str]) -> list[str]:
    """Returns a line for each outcome that differs from the table's."""
    wrong = [
        f"{name}: {found.passed[name]} cases pass, not {table.passes.get(name, 0)}"
        for name in sorted({*table.passes, *found.passed})
        if is_below(name, paths) and found.passed[name] != table.passes.get(name, 0)
    ]
    for test in sorted({*table.others, *found.others}):
        if not is_below(test, paths):
            continue
        wanted, reason = table.others.get(test, (0, NOT_NAMED))
        if found.others[test] != wanted or reason == NOT_NAMED:
            said = found.reasons.get(test, "all pass, or there are none")
            count = found.others[test]
            wrong.append(
                f"{test}: {count} cases do not pass, not {wanted} ({reason}): {said}"
            )
    return wrong


def table_of(found: Outcomes, former: Table) -> str:
    """Returns a table's text with the former reasons; new tests are marked."""
    by_reason: dict[str, dict[str, int]] = {}
    for test, count in sorted(found.others.items()):
        _, reason = former.others.get(test, (0, NOT_NAMED))
        by_reason.setdefault(reason, {})[test] = count
    lines = [*HEADING, "", "[passes]"]
    lines += [f'"{name}" = {count}' for name, count in sorted(found.passed.items())]
    for reason, tests in sorted(by_reason.items()):
        lines += ["", "[[not_applicable]]", f"reason = {json.dumps(reason)}"]
        lines += ["[not_applicable.tests]"]
        for test, count in tests.items():
            note = f"  # {found.reasons[test]}" if reason == NOT_NAMED else ""
            lines.append(f'"{test}" = {count}{note}')
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", default=list(FOLDERS), help="below tests/v1 (all)"
    )
    parser.add_argument("--kv-cache-dtype", default="turbo4")
    parser.add_argument(
        "--write", action="store_true", help="write the table's numbers anew"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "vllm"
        prepare(folder)
        found = run_tests(folder, args.kv_cache_dtype, args.paths)
    if args.write:
        TABLE.write_text(table_of(found, load_table()), encoding="utf-8")
    wrong = compare(found, load_table(), args.paths)
    print(*wrong, sep="\n")
    total, others = found.passed.total(), found.others.total()
    packed = found.packed.total()
    print(
        f"{total} cases pass, {packed} of them with pages of the dtype; {others} do "
        f"not apply; {len(wrong)} not as expected"
    )
    return 1 if wrong or not total else 0


if __name__ == "__main__":
    sys.exit(main())
