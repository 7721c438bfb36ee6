# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Say whether a tree holds the series, whole and unchanged."""

from .disk import temporary_of
from .git import blob_id
from .model import Series
from .plan import chains
from .state import MANIFEST, FileState, Manifest, base_is_gone, read_manifest, survey
from .target import STATE_FOLDER, Target

_REMEDY = "apply.sh puts the series back, revert.sh takes the rest off"


def verify(series: Series, target: Target) -> list[str]:
    """Return the tree's problems, one line each."""
    manifest = read_manifest(target)
    if manifest is None:
        return _without_manifest(series, target)
    problems = []
    if manifest.state != "applied":
        run = "an apply" if manifest.state == "applying" else "a revert"
        problems.append(
            f"{run} was interrupted: apply.sh completes the series, "
            "revert.sh restores the base"
        )
    if manifest.revision != series.revision:
        problems.append(
            f"revision {manifest.revision[:12]} is applied, "
            f"this is revision {series.revision[:12]}"
        )
    if temporary_of(target.state / MANIFEST).exists():
        problems.append(
            f"{STATE_FOLDER} holds a half-written manifest: apply.sh or revert.sh "
            "clears it"
        )
    states = survey(target, manifest)
    problems += _half_state(target, manifest, states)
    for path, state in states.items():
        if state is not FileState.APPLIED:
            problems.append(f"{path}: {_wording(target, path, state)}")
        if temporary_of(target.root / path).exists():
            problems.append(f"{path}: a half-written copy lies beside it")
    return problems


def _wording(target: Target, path: str, state: FileState) -> str:
    if state is FileState.BASE and (target.root / path).exists():
        return "not as applied (as in the base)"
    return "missing" if state is not FileState.CHANGED else "differs"


def _half_state(
    target: Target, manifest: Manifest, states: dict[str, FileState]
) -> list[str]:
    """Name the ways in which a package manager leaves half of the series behind."""
    if manifest.state != "applied":
        return []
    here = [
        entry.path
        for entry in manifest.files
        if entry.kind == "added" and states[entry.path] is FileState.APPLIED
    ]
    edited = [
        states[entry.path]
        for entry in manifest.files
        if entry.kind == "modified" and entry.path != manifest.record
    ]
    if base_is_gone(target, manifest):
        return [f"vllm was uninstalled, {len(here)} added file(s) remain: {_REMEDY}"]
    if edited and here and all(state is FileState.BASE for state in edited):
        return [
            f"vllm was reinstalled over the series: the edited files are the base's, "
            f"{len(here)} added file(s) remain: {_REMEDY}"
        ]
    if manifest.record and states[manifest.record] is not FileState.APPLIED:
        return [
            f"{manifest.record} does not list the series: "
            f"pip uninstall would leave {len(here)} file(s)"
        ]
    return []


def _without_manifest(series: Series, target: Target) -> list[str]:
    """Judge a tree that may hold the series without a manifest, such as commits."""
    problems = []
    present = 0
    for path, chain in chains(series.patches).items():
        data = target.read(path) if target.covers(path) else None
        if data is None and not path.startswith("vllm/"):
            continue
        found = None if data is None else blob_id(data)
        present += found == chain.final
        if found != chain.final:
            state = "not patched" if found == chain.base else "differs"
            problems.append(f"{path}: {state if found else 'missing'}")
    for path, file in series.overlay.items():
        if target.covers(path):
            data = target.read(path)
            present += data is not None
            if data != file.data:
                problems.append(f"{path}: {'missing' if data is None else 'differs'}")
    if problems and not present:
        return ["the series is not applied"]
    if problems:
        problems.insert(0, "part of the series is there, and no manifest of an apply")
    return problems
