# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Digests of the CUDA modules that serving compiles: a check of pure refactorings.

    module_digests.py           compares with the committed digests, and names changes
    module_digests.py --write   writes them again, after an intended change

`modules` has for each architecture and kernel the number of its instances, and a
digest of their names, flags and headers of constants. `sources` has for each kernel a
digest of its source and the headers that it includes, without comments and white space.
A module's name in the cache of built kernels is no such digest, because it changes with
each comment.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from native_kernels import digest, normalised_sources, served

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "tests/instances/module_digests.json"


def find_digests() -> dict[str, Any]:
    """Returns the digests of the vLLM that this Python imports."""
    parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    sources: dict[str, Path] = {}
    for capability, module in served():
        flags = " ".join(module.flags)
        text = f"{module.instance}\n{flags}\n{module.is_specific}\n{module.header}"
        parts[str(capability)][module.kernel].append(text)
        sources[module.kernel] = module.source
    return {
        "modules": {
            capability: {
                kernel: f"{len(texts)} {digest(sorted(texts))}"
                for kernel, texts in sorted(own.items())
            }
            for capability, own in parts.items()
        },
        "sources": {
            kernel: digest(normalised_sources(source))
            for kernel, source in sorted(sources.items())
        },
    }


def name_changes(found: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    """Returns a line for each digest that differs from the committed one."""
    changes = []
    for kernel in sorted(found["sources"].keys() | committed["sources"].keys()):
        if found["sources"].get(kernel) != committed["sources"].get(kernel):
            changes.append(f"{kernel}: the source, or a header that it includes")
    for capability in sorted(found["modules"].keys() | committed["modules"].keys()):
        now = found["modules"].get(capability, {})
        before = committed["modules"].get(capability, {})
        for kernel in sorted(now.keys() | before.keys()):
            value, old = now.get(kernel, "0 -"), before.get(kernel, "0 -")
            if value != old:
                changes.append(
                    f"{kernel} for sm_{capability}: {value.split()[0]} instances, "
                    f"where {old.split()[0]} were, or other flags or constants"
                )
    return changes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the digests again")
    args = parser.parse_args()
    found = find_digests()
    if args.write:
        COMMITTED.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    changes = name_changes(found, json.loads(COMMITTED.read_text()))
    print("\n".join(changes) or "no module has changed")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
