# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A plugin for pytest that leaves out tests that would be skipped, and counts them:
`-p vllm_turbo_cpu_standins.left_out`.

Starting and reporting thousands of tests that need a GPU would take longer than many
tests that run.
"""

from typing import Any

import pytest

LEFT_OUT = "tests that cannot run here"
NUM_LEFT_OUT = pytest.StashKey[int]()


def cannot_run(item: pytest.Item) -> bool:
    """Returns whether a condition that is known at collection skips the test."""
    return any(True in mark.args for mark in item.iter_markers("skipif"))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out tests that cannot run, and counts them."""
    left_out = list(filter(cannot_run, items))
    config.hook.pytest_deselected(items=left_out)
    config.stash[NUM_LEFT_OUT] = len(left_out)
    # Each of several processes collects all tests, and another reports.
    getattr(config, "workeroutput", {})[LEFT_OUT] = len(left_out)
    items[:] = [item for item in items if not cannot_run(item)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the number from one of the processes that run the tests."""
    output = getattr(node, "workeroutput", {})
    if LEFT_OUT in output:
        node.config.stash[NUM_LEFT_OUT] = output[LEFT_OUT]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Reports the number of tests that were left out."""
    if num := config.stash.get(NUM_LEFT_OUT, 0):
        terminalreporter.write_line(f"left out: {num} {LEFT_OUT}")
