# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A plugin for pytest that leaves out tests that would be skipped, and says how many:
`-p vllm_turbo_cpu_standins.left_out`.

To begin and report thousands that need a GPU takes longer than many that run.
"""

from typing import Any

import pytest

LEFT_OUT = "tests that cannot run here"
NUM_LEFT_OUT = pytest.StashKey[int]()


def cannot_run(item: pytest.Item) -> bool:
    """Whether a condition that was known when the test was made skips it."""
    return any(True in mark.args for mark in item.iter_markers("skipif"))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves them out, and counts them."""
    left_out = list(filter(cannot_run, items))
    config.hook.pytest_deselected(items=left_out)
    config.stash[NUM_LEFT_OUT] = len(left_out)
    # Each of several processes collects all tests, and another reports.
    getattr(config, "workeroutput", {})[LEFT_OUT] = len(left_out)
    items[:] = [item for item in items if not cannot_run(item)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the number from one of the processes that share the tests out."""
    output = getattr(node, "workeroutput", {})
    if LEFT_OUT in output:
        node.config.stash[NUM_LEFT_OUT] = output[LEFT_OUT]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Says how many there were."""
    if num := config.stash.get(NUM_LEFT_OUT, 0):
        terminalreporter.write_line(f"left out: {num} {LEFT_OUT}")
