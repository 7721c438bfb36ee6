# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read and write UPSTREAM.toml, the pin of the vLLM release below the series."""

from dataclasses import asdict, dataclass
from pathlib import Path

import tomllib

from .errors import SeriesError

PIN_FILE = "UPSTREAM.toml"
_INTRO = (
    "# The vLLM release that this series is written against. No other file names it."
)


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


def to_toml(upstream: Upstream) -> str:
    """The text of the pin file."""
    tables = {
        "project": {"name": upstream.project, "version": upstream.version},
        "sdist": asdict(upstream.sdist),
        **{f"wheel.{arch}": asdict(pin) for arch, pin in upstream.wheels.items()},
    }
    lines = [_INTRO]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f'{key} = "{table[key]}"' for key in table)]
    return "\n".join(lines) + "\n"


def load_upstream(root: Path) -> Upstream:
    """Read the pin of the series at `root`."""
    path = root / PIN_FILE
    try:
        pins = tomllib.loads(path.read_text(encoding="utf-8"))
        return Upstream(
            project=pins["project"]["name"],
            version=pins["project"]["version"],
            sdist=Pin(**pins["sdist"]),
            wheels={name: Pin(**pin) for name, pin in pins.get("wheel", {}).items()},
        )
    except OSError as error:
        raise SeriesError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SeriesError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise SeriesError(f"{path}: missing or unknown entry ({error})") from None
