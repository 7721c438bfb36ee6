# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A plugin of pytest's: a failure is told when it happens, as is a test that took long.

A run on a GPU that is lent for minutes may not see its end.
"""

import pytest

SHOWN = 2000
LONG_SECONDS = 30


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\nfailed: {report.nodeid}\n{report.longreprtext[-SHOWN:]}", flush=True)
    if report.duration > LONG_SECONDS:
        print(f"\n{report.duration:.0f} s: {report.nodeid}", flush=True)
