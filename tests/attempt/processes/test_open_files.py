"""The processes of trials close every file that they open: Python reports unclosed ones as `ResourceWarning`."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest

from prefect_tune.attempt.processes.fork_client import ForkedProcess, ForkServer

_LOUD = {"PYTHONWARNINGS": "always::ResourceWarning", "PYTHONUNBUFFERED": "1"}


def _served(forks: ForkServer) -> None:
    child = forks.fork().child()
    assert isinstance(child, ForkedProcess)
    child.dismiss()
    assert child.end(timedelta(seconds=60)) == 0


def test_a_fork_server_its_subreapers_and_their_trials_leave_no_socket_open(capfd: pytest.CaptureFixture[str]) -> None:
    forks = ForkServer.start({**os.environ, **_LOUD})
    _served(forks)
    _served(forks)  # by the subreaper of the first, if it is still free
    time.sleep(0.3)  # a subreaper stays for 0.2 s
    _served(forks)
    last = forks.fork().child()
    assert last is not None
    forks.end()
    last.dismiss()
    assert last.end(timedelta(seconds=60)) == 0
    assert capfd.readouterr().err == ""
