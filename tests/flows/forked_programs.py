"""Processes of tests that are forked from a process with all imports, each in its own session."""

from __future__ import annotations

import multiprocessing.forkserver
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

from tests.fakes.trial_processes import PORTABLE


def get_preloaded_context() -> ForkServerContext:
    """Return the context of processes that start with the modules of `tests.flows.preloaded`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.flows.preloaded"])
    with patch.dict(os.environ):
        os.environ.pop(PORTABLE[0], None)  # all processes have the environment of the first one
        multiprocessing.forkserver.ensure_running()
    return context


def start_own_session(log: Path) -> None:
    """Move this process to a new session, and append all of its output to `log`."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
