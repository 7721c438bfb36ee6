# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A pytest plugin that runs some cases of tests with many: `-p some_cases`.

They have every value of every parameter. A test of few cases runs all of them. A test
may have thousands, and kernels' tests take seconds in Triton's interpreter. Two tests
are left out that take most of a minute each: smaller ones stand for them.
"""

from collections.abc import Iterator

import pytest
from covering import covering

# Cases of a test that all run.
FEW = 4
# The fits of constants to the bit. A small fit comes near them, and the golden bytes
# change with each constant and with the encoder.
LONG = {"test_value_levels_are_the_fit", "test_key_levels_are_the_fit"}
SAID = "left out: cases whose values others have, which run with --all"


def values_of(item: pytest.Function) -> Iterator[str]:
    """Yields a case's parameters with their values.

    A kernel is made anew for each case, and its text has addresses, but it has a name.
    """
    for name, value in item.callspec.params.items():
        text = str(value)
        yield f"{name}={getattr(value, 'name', text) if ' at 0x' in text else text}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out cases whose values others have, after those that cannot run."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {
        item
        for own in cases.values()
        if len(own) > FEW
        for item in {*own} - {*covering(own, values_of, together=1)}
    }
    left_out |= {item for item in items if item.name in LONG}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(SAID)
