# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A pytest plugin that compiles no kernel again that nvcc has compiled: `-p compiled`.

A test that compiles a module by nvcc takes up to a minute. It is left out if its kernel
is as it was when its tests passed on a GPU, by the record of native_kernels.py. One
kernel, which takes seconds, is always compiled.
"""

import os
import shutil

import pytest

# The kernel of each test that compiles modules; None: its parameter `name` begins with
# the kernel's.
TESTS = {
    "test_compiles_and_spills_no_more_than_is_recorded": None,
    "test_compiles_to_products_that_overlap": "latent_decode",
    "test_slices_compile_for_other_gpus": "latent_decode",
    "test_store_compiles_without_spills": "latent_store",
    "test_gather_compiles_without_spills": "latent_gather",
}
ALWAYS = "merge"
# The kernels that have not changed, for the processes that run the tests.
UNCHANGED = "TURBO_UNCHANGED_KERNELS"
LEFT_OUT = "left out: tests that compile kernels which --all compiles again"


def find_unchanged() -> list[str]:
    """Returns the CUDA kernels whose tests have passed on a GPU as they are."""
    from native_kernels import RECORD, changed, cuda_families, read_record

    found = dict(cuda_families())
    left = changed(found, read_record(RECORD))
    return [name.removeprefix("cuda/") for name in found if name not in left]


def kernel_of(item: pytest.Function) -> str | None:
    """Returns the kernel that a test compiles, if it does so."""
    name = item.nodeid.rpartition("::")[2].partition("[")[0]
    if name not in TESTS:
        return None
    return TESTS[name] or item.callspec.params["name"].split()[0]


def pytest_configure(config: pytest.Config) -> None:
    # Without nvcc these tests are skipped, and no digest is needed.
    if not hasattr(config, "workerinput"):
        found = find_unchanged() if shutil.which("nvcc") else []
        os.environ[UNCHANGED] = " ".join(x for x in found if x != ALWAYS)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    unchanged = os.environ[UNCHANGED].split()
    left_out = [item for item in items if kernel_of(item) in unchanged]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if kernel_of(item) not in unchanged]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if names := os.environ[UNCHANGED]:
        terminalreporter.write_line(f"{LEFT_OUT}: {names}")
