"""Capture what other code writes to a terminal while a live table is shown, to print it above the table."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TextIO, cast

_MOST_CHUNKS = 20_000
_DROPPED = "(more was printed at once than the live table could pass on: lines are missing here)"


class OutputCapture(io.TextIOBase):
    """Replaces a terminal's stream and keeps what is written; a write never waits for the terminal."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self._terminal = terminal
        self._guard = threading.Lock()
        self._lets_through = False
        self._chunks: deque[str] = deque(maxlen=_MOST_CHUNKS)
        self._has_dropped = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the stub has an attribute where a property does
        return self._terminal.encoding

    def write(self, text: str) -> int:
        if self._lets_through:
            return self._terminal.write(text)
        with self._guard:
            self._has_dropped |= len(self._chunks) == _MOST_CHUNKS
            self._chunks.append(text)
        return len(text)

    def flush(self) -> None:
        if self._lets_through:
            self._terminal.flush()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal.fileno()

    def writable(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        """Return what only the terminal's stream has, such as `buffer`, whose writes are not kept."""
        return getattr(self._terminal, name)

    def take_lines(self) -> Sequence[str]:
        """Return the complete lines since the last call; of too many the last ones, after a line that says so."""
        with self._guard:
            whole, newline, rest = "".join(self._chunks).rpartition("\n")
            self._chunks.clear()
            if rest:
                self._chunks.append(rest)
            dropped = [_DROPPED] * self._has_dropped
            self._has_dropped = False
        return [*dropped, *(whole.split("\n") if newline else ())]

    def let_through(self) -> None:
        """Write the rest to the terminal, and pass later writes straight through. Raises the terminal's errors."""
        self._lets_through = True
        with self._guard:
            rest = "".join(self._chunks)
            self._chunks.clear()
        self._terminal.write(rest)
        self._terminal.flush()


@contextmanager
def captured(capture: OutputCapture, terminal: Sequence[TextIO]) -> Iterator[None]:
    """Redirect what `print` and logging handlers write to these streams into `capture`.

    Handlers with a Rich console of their own (Prefect's, which log every task run) show only warnings and errors
    meanwhile, unless Prefect's log level is DEBUG.
    """
    with ExitStack() as undoing:
        for name in ("stdout", "stderr"):
            if (stream := getattr(sys, name)) in terminal:
                setattr(sys, name, capture)
                undoing.callback(setattr, sys, name, stream)
        for handler in _stream_handlers():
            if handler.stream in terminal:
                undoing.callback(_redirect(handler, cast(TextIO, capture)))
        yield


def _redirect(handler: logging.StreamHandler[TextIO], stream: TextIO) -> Callable[[], None]:
    """Redirect the handler, and return a function that undoes it."""
    before, level = handler.stream, handler.level
    console = getattr(handler, "console", None)
    handler.stream = stream
    if console is not None:
        console.file = stream
        if logging.getLogger("prefect").getEffectiveLevel() > logging.DEBUG:
            handler.setLevel(max(level, logging.WARNING))

    def undo() -> None:
        handler.stream = before
        handler.setLevel(level)
        if console is not None:
            console.file = before

    return undo


def console_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    """Yield the handlers with a Rich console of their own: Prefect's."""
    return (each for each in _stream_handlers() if hasattr(each, "console"))


def _stream_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {
        id(handler): handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers
    }
    for handler in handlers.values():
        if isinstance(handler, logging.StreamHandler):
            yield handler
