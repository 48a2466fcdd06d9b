"""Keep Prefect's log lines below a warning out of a cell while its output shows a search."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

from prefect_tune.notebook.kernel import can_show_output
from prefect_tune.terminal.output_capture import console_handlers


class _QuietFilter(logging.Filter):
    """Passes warnings and errors; at Prefect's log level DEBUG everything."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or logging.getLogger("prefect").isEnabledFor(logging.DEBUG)


_FILTER = _QuietFilter()
_guard = threading.Lock()
_uses: list[object] = []  # the searches that are shown at this moment
_displayed: dict[Console, bool] = {}  # whether Rich displayed the lines of a console before them


@contextmanager
def quiet_console() -> Iterator[None]:
    """Have the handlers that write Prefect's log to the console write warnings and errors only, as text.

    In a notebook they would display an HTML output for each line. The records reach all other handlers, so that
    Prefect's UI has the whole log.
    """
    use = object()
    with _guard:
        _uses.append(use)
        for handler in console_handlers():
            handler.addFilter(_FILTER)  # adding it again has no effect
            _write_lines(handler)
    try:
        yield
    finally:
        with _guard:
            _uses.remove(use)
            for handler in () if _uses else console_handlers():
                handler.removeFilter(_FILTER)
            while _displayed and not _uses:
                console, is_jupyter = _displayed.popitem()
                console.is_jupyter = is_jupyter


def _write_lines(handler: logging.StreamHandler[TextIO]) -> None:
    """Have Rich write what the handler's console prints to the stream; in a notebook it displays it."""
    console = getattr(handler, "console", None)
    if isinstance(console, Console) and can_show_output():
        _displayed.setdefault(console, console.is_jupyter)
        console.is_jupyter = False
