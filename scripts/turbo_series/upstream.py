# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read UPSTREAM.toml, the pin of the vLLM release below the series."""

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import SeriesError

_TABLE = re.compile(r"\[([A-Za-z0-9_.-]+)\]")
_ENTRY = re.compile(r'([A-Za-z0-9_-]+)\s*=\s*"([^"\\]*)"')


@dataclass(frozen=True)
class Pin:
    """A released file and the SHA-256 of its bytes."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Upstream:
    """The base of the series."""

    project: str
    version: str
    sdist: Pin
    wheels: dict[str, Pin]


def parse_tables(text: str) -> dict[str, dict[str, str]]:
    """Parse TOML that has only tables of double-quoted strings.

    `tomllib` came with Python 3.11 and the scripts support 3.10, so the pin file
    keeps to this subset.
    """
    tables: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if table := _TABLE.fullmatch(line):
            current = tables.setdefault(table[1], {})
        elif (entry := _ENTRY.fullmatch(line)) and current is not None:
            current[entry[1]] = entry[2]
        else:
            raise SeriesError(f"UPSTREAM.toml line {number}: cannot read {line!r}")
    return tables


def load_upstream(root: Path) -> Upstream:
    """Read the pin of the series at `root`."""
    path = root / "UPSTREAM.toml"
    try:
        tables = parse_tables(path.read_text(encoding="utf-8"))
        return Upstream(
            project=tables["project"]["name"],
            version=tables["project"]["version"],
            sdist=Pin(**tables["sdist"]),
            wheels={
                name.removeprefix("wheel."): Pin(**table)
                for name, table in tables.items()
                if name.startswith("wheel.")
            },
        )
    except OSError as error:
        raise SeriesError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError) as error:
        raise SeriesError(f"{path}: missing or unknown entry ({error})") from None
