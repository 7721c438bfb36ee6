# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What forks the tests' engines, when one of them never ends."""

import os
import signal
from pathlib import Path

import harness
import pytest
from harness import Parent


def test_a_job_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With where it hung in its log; the next job is none the worse."""
    monkeypatch.setattr(harness, "TIMEOUT_S", 5)
    hanging, ending, log = (tmp_path / name for name in ("fifo", "job", "log"))
    # Nobody ever writes to it.
    os.mkfifo(hanging)
    ending.write_text("{}")
    parent = Parent(tmp_path, "v1")
    try:
        wrong = parent.run(hanging, tmp_path / "none", log)
        assert wrong == f"status {-signal.SIGABRT}"
        assert "in run_job" in log.read_text()
        monkeypatch.undo()
        assert parent.run(ending, tmp_path / "result", log) is None
        assert (tmp_path / "result").read_text() == "{}"
    finally:
        parent.stop()
