# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The RECORD of an installed distribution: which files pip removes with it."""

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping

from .errors import SeriesError


def entry(data: bytes) -> tuple[str, str]:
    """The hash and size fields of a file."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.decode().rstrip("="), str(len(data))


def _line(row: Iterable[str], ending: str) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator=ending).writerow(row)
    return out.getvalue()


def listed_paths(record: bytes) -> set[str]:
    """The paths that a RECORD lists."""
    rows = csv.reader(io.StringIO(record.decode("utf-8"), newline=""))
    return {row[0] for row in rows if row}


def updated(
    record: bytes,
    changed: Mapping[str, bytes],
    added: Mapping[str, bytes],
    unhashed: Iterable[str],
) -> bytes:
    """RECORD after the series is applied; lines of other files keep their bytes.

    Args:
        record: the RECORD as installed.
        changed: new contents of files that it may list.
        added: contents of new files.
        unhashed: new files listed without hash, because they change again.

    """
    try:
        text = record.decode("utf-8")
    except UnicodeDecodeError:
        raise SeriesError("RECORD is not UTF-8") from None
    ending = "\r\n" if "\r\n" in text else "\n"
    lines = io.StringIO(text, newline="").readlines()
    out = []
    for line in lines:
        path = next(csv.reader([line]), [""])[0]
        if path in changed:
            line = _line((path, *entry(changed[path])), ending)
        out.append(line)
    if out and not out[-1].endswith("\n"):
        out[-1] += ending
    out += [_line((path, *entry(data)), ending) for path, data in sorted(added.items())]
    out += [_line((path, "", ""), ending) for path in sorted(unhashed)]
    return "".join(out).encode("utf-8")
