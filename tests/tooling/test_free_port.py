# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""scripts/quickstart.py finds a port that a server can bind later."""

import random
import socket

import pytest
import quickstart


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", quickstart.free_port()))
        port = taken.getsockname()[1]
        other = quickstart.free_port()
        monkeypatch.setattr(random, "sample", lambda *_: [port, other])
        assert quickstart.free_port() == other != port


def test_connections_are_not_given_the_port() -> None:
    """Systems give connections ports from 32768 on."""
    assert all(20000 <= quickstart.free_port() < 32000 for _ in range(100))
