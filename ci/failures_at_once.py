# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A plugin of pytest's: a failure is told when it happens, and not at the end alone.

A run on a GPU that is lent for minutes may not see its end.
"""

import pytest

SHOWN = 2000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\nfailed: {report.nodeid}\n{report.longreprtext[-SHOWN:]}", flush=True)
