# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`patches/series`: the order file, and the names of patches."""

import re
from pathlib import Path

from .model import PATCHES, parse_patches

NAME = re.compile(r"(?![0-9])[a-z0-9-]+\.patch")


def subjects(root: Path) -> dict[str, str]:
    """Map the subject of each patch there is to its file name."""
    paths = sorted((root / PATCHES).glob("*.patch"))
    patches = parse_patches((path.name, path.read_bytes()) for path in paths)
    return {patch.subject: patch.name for patch in patches}


def patch_name(known: dict[str, str], subject: str) -> str:
    """The file name for a commit: that of the patch with its subject, else a new one.

    A name stays when a patch moves or its text changes, so that the history of the
    file can be followed.
    """
    if subject in known:
        return known[subject]
    words = re.sub(r"^(\[[^\]]*\]\s*)+", "", subject).lower()
    slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-").lstrip("0123456789-")
    return f"{slug[:60].rstrip('-') or 'patch'}.patch"


def new_order(root: Path, names: list[str]) -> bytes:
    """`patches/series` for these names; comments stay above the line they precede."""
    path = root / PATCHES / "series"
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    lead: list[str] = []
    pending: list[str] = []
    blocks: dict[str, list[str]] = {}
    for line in old.splitlines():
        name = line.split("#")[0].strip()
        if not name:
            pending.append(line)
            continue
        if not blocks:
            # The comment on the file as a whole ends at a blank line, if there is one.
            blanks = [at for at, text in enumerate(pending, 1) if not text.strip()]
            end = max(blanks, default=len(pending))
            lead, pending = pending[:end], pending[end:]
        blocks[name] = [*pending, line]
        pending = []
    lines = list(lead)
    for name in names:
        lines += blocks.get(name, [name])
    lines += pending
    return ("\n".join(lines) + "\n").encode() if lines else b""
