"""Processes of tests that are forked from one that has imported everything already, and are alone like programs."""

from __future__ import annotations

import multiprocessing.forkserver
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

from tests.fakes.trial_processes import PORTABLE


def preloaded() -> ForkServerContext:
    """Return the context of processes that have the modules of `tests.flows.preloaded` when they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.flows.preloaded"])
    with patch.dict(os.environ):
        os.environ.pop(PORTABLE[0], None)  # all processes have the environment in which the first one is started
        multiprocessing.forkserver.ensure_running()
    return context


def in_own_session(log: Path) -> None:
    """Give this process a session of its own, and append all of its output to `log`."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
