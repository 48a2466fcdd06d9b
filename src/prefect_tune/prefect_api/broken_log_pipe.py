"""Keep a run alive when the reader of its log is gone: a worker that was killed has held the pipe of its output.

Rich exits the process, or the thread, that prints to a broken pipe, and Prefect's console handler lets that pass. The
log still goes to Prefect's API, and to all other handlers.

To ask upstream: that `PrefectConsoleHandler` treats a broken pipe as any other error of a handler.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from functools import partial
from typing import IO

from rich.console import Console

from prefect_tune.terminal.live_display import console_handlers


def outlive_log_reader() -> None:
    """From now on, drop what is logged to the console of this process once its reader is gone. Call it at any time."""
    for handler in console_handlers():
        console = getattr(handler, "console", None)
        if isinstance(console, Console):
            vars(console)["on_broken_pipe"] = partial(_fall_silent, console)


def _fall_silent(console: Console) -> None:
    """Print nothing more; send other output, such as `print`, to nowhere if its reader is gone too."""
    console.quiet = True
    for stream in (console.file, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is no file, closed, or None
            _redirect_if_broken(stream)


def _redirect_if_broken(stream: IO[str]) -> None:
    number = stream.fileno()
    poll = select.poll()
    poll.register(number, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, number)
    finally:
        os.close(nowhere)
