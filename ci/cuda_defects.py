# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plant small defects in the CUDA kernels, and see that tests fail for them.

    python ci/cuda_defects.py [NAME]...

It runs on a GPU, with the vLLM that the Python imports. Each test has to pass without a
defect, and to fail with it, on kernels that were built. A kernel that does not end
fails too: a defect in its barriers can make it wait for ever. A defect that cannot be
planted, or does not compile, counts as not found. ci/sanitize.py plants the defects
that only compute-sanitizer can see.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
from attention_defects import ATTENTION_DEFECTS
from latent_defects import LATENT_DEFECTS
from planting import BARRIER, Change, Defect

TESTS = Path(__file__).parents[1] / "vllm_overlay/tests/kernels/turbo"
# Exit statuses of pytest, and those that it does not have.
PASSED, FAILED, NOT_PLANTED, ENDLESS = 0, 1, 70, 71
# A test and the build of its kernels take a minute.
LIMIT_S = 600
# The words of build.py, and of the emulated GPU, for a kernel that does not compile.
NOT_BUILT = "was not compiled or linked"
NOT_EMULATED = "CannotBuildError"


DEFECTS = ATTENTION_DEFECTS | LATENT_DEFECTS
# The beginnings of sources that only Hopper has kernels of.
OF_HOPPER = (
    "decode_wgmma/",
    "extend_wgmma/",
    "latent/columns",
    "latent/rows",
    "latent/listed",
)
# Defects by name, which begins with the tool that has to find it. A defect is a change
# to the sources, or None if ci/sanitize.py gives the kernels wrong inputs.
SANITIZER_DEFECTS = {
    # A block table that names a page past the end of the cache.
    "memcheck-page": None,
    # Pages that nobody has written.
    "initcheck-pages": None,
    "racecheck-merge": Defect("merge/merge.cuh", BARRIER, "", times=2),
    # Teams of warps that go on to their next sequence while one still reads.
    "racecheck-team": Defect(
        "decode/segment.cuh", "team.sync();  // before tiles are copied", "//"
    ),
    # Warps that decode a tile into a place that others still read.
    "racecheck-stages": Defect(
        "extend_mma/produce.cuh",
        "wait_for(shared.empty_values[stage.index], stage.parity ^ 1);",
        "",
    ),
    # Warps that read a tile before it has been decoded.
    "racecheck-values": Defect(
        "extend_mma/consume.cuh",
        "wait_for(shared.full_values[part.stage.index], part.stage.parity);",
        ";",
    ),
}


def of_this_gpu(defects: Mapping[str, Defect | None]) -> list[str]:
    """Returns the names of defects in kernels that this GPU runs."""
    import torch

    from vllm.v1.attention.ops.turbo.cuda import decode_wgmma
    from vllm.v1.attention.ops.turbo.cuda.build import capability_of

    capability = capability_of(torch.device("cuda", 0))
    if capability == decode_wgmma.CAPABILITY:
        return list(defects)
    return [
        name
        for name, defect in defects.items()
        if defect is None or not defect.source.startswith(OF_HOPPER)
    ]


class NotPlanted(Exception):
    """A defect's source has changed, so that its text is not there."""


class BuildFailures:
    """A plugin for pytest that counts tests for which kernels could not be built."""

    count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Look for the build's messages."""
        text = report.longreprtext
        self.count += report.failed and (NOT_BUILT in text or NOT_EMULATED in text)


def plant(change: Defect | Change) -> None:
    """Let this process build its kernels from a copy of the sources with a change.

    Raises:
        NotPlanted: If the text that it replaces is not there.

    """
    from vllm.v1.attention.ops.turbo.cuda import build as cuda_build

    folder = Path(tempfile.mkdtemp()) / "cuda"
    shutil.copytree(cuda_build.SOURCE_DIR, folder)
    source = folder / change.source
    text = source.read_text()
    found = text.count(change.old)
    if found != (change.times if isinstance(change, Defect) else 1):
        raise NotPlanted(f"{found} times in {change.source}: {change.old}")
    source.write_text(text.replace(change.old, change.new))
    cuda_build.SOURCE_DIR = folder


def run_test(defect: Defect, *options: str) -> int:
    """Runs a test in this process, and returns pytest's exit status; ``NOT_PLANTED`` if
    kernels could not be built.
    """
    arguments = ["-q", "-rN", "--tb=line", "-p", "no:cacheprovider", *options]
    if defect.selected:
        arguments += ["-k", defect.selected]
    failures = BuildFailures()
    status = pytest.main([*arguments, str(TESTS / defect.test)], plugins=[failures])
    return NOT_PLANTED if failures.count else status


def run_apart(name: str, option: str) -> int:
    """Does the same as ``run_test``, in a process that loads kernels of its own.

    Returns ``ENDLESS`` if it takes more than ``LIMIT_S``.
    """
    command = [sys.executable, __file__, option, name]
    try:
        return subprocess.run(command, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return ENDLESS


def look_for(names: Iterable[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields each defect with its test's statuses without it and with it, when known.

    A test of several defects runs once without any.
    """
    names = list(names)
    tests = {
        name: (defect.test, defect.selected, defect.shown_by)
        for name in names
        for defect in [DEFECTS[name]]
    }
    # The compiler takes most of the time, and each process has a copy of PyTorch.
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        planted = {pool.submit(run_apart, name, "--with"): name for name in names}
        first = {test: name for name, test in tests.items()}
        sound = {
            test: pool.submit(run_apart, name, "--without")
            for test, name in first.items()
        }
        for ended in as_completed(planted):
            name = planted[ended]
            yield name, (sound[tests[name]].result(), ended.result())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DEFECTS))
    parser.add_argument("--with", dest="planted", choices=DEFECTS, help="run its test")
    parser.add_argument("--without", choices=DEFECTS, help="but plant nothing")
    args = parser.parse_args()
    if name := args.planted or args.without:
        defect = DEFECTS[name]
        try:
            for change in (defect.shown_by, defect if args.planted else None):
                if change is not None:
                    plant(change)
        except NotPlanted as error:
            print(f"{name}: {error}")
            return NOT_PLANTED
        # The first failure is enough, and each case may build other kernels.
        return run_test(defect, *(["--exitfirst"] if args.planted else []))
    if unknown := sorted({*args.names} - {*DEFECTS}):
        parser.error(f"no such defect: {', '.join(unknown)}; --help has their names")
    wrong = []
    names = args.names or of_this_gpu(DEFECTS)
    for name, statuses in look_for(names):
        is_caught = statuses in ((PASSED, FAILED), (PASSED, ENDLESS))
        wrong += [] if is_caught else [name]
        said = "is caught" if is_caught else f"is not caught: statuses {statuses}"
        print(f"{name} {said}", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
