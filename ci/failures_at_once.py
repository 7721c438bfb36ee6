# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A pytest plugin that prints failures, and tests that took long, as they happen.

A run on a GPU that is lent for minutes may not reach its end. At the end, also of an
interrupted run, a table has the files whose tests took longest.
"""

from collections import Counter

import pytest

SHOWN = 2000
LONG_SECONDS = 30
FILES_SHOWN = 30
seconds_by_file: Counter[str] = Counter()
tests_by_file: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\nfailed: {report.nodeid}\n{report.longreprtext[-SHOWN:]}", flush=True)
    file = report.nodeid.partition("::")[0]
    seconds_by_file[file] += report.duration
    tests_by_file[file] += report.when == "call"
    if report.duration > LONG_SECONDS:
        print(f"\n{report.duration:.0f} s: {report.nodeid}", flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("seconds and tests by file")
    for file, seconds in seconds_by_file.most_common(FILES_SHOWN):
        terminalreporter.write_line(f"{seconds:.0f} s, {tests_by_file[file]}: {file}")
