"""A live table in a terminal, drawn in a thread of its own."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import NoReturn, TextIO, TypeGuard, cast

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.text import Text

# Capture what other code writes to a terminal while a live table is shown, to print it above the table. Rich's own
# redirection would have each `print` of a training wait for the terminal, and does not know the handlers of `logging`.

_MAX_CHUNKS = 20_000
_DROPPED = "(more was printed at once than the live table could pass on: lines are missing here)"


class OutputCapture(io.TextIOBase):
    """Replaces a terminal's stream and keeps what is written; a write never waits for the terminal."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self._terminal = terminal
        self._guard = threading.Lock()
        self._lets_through = False
        self._chunks: deque[str] = deque(maxlen=_MAX_CHUNKS)
        self._has_dropped = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the stub has an attribute where a property does
        return self._terminal.encoding

    def write(self, text: str) -> int:
        if self._lets_through:
            return self._terminal.write(text)
        with self._guard:
            self._has_dropped |= len(self._chunks) == _MAX_CHUNKS
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


NOTICE: Mapping[str, object] = {"is_notice": True}
"""The `extra` of a log line below a warning that a person has to see: a live table or a cell hides the other ones."""


class QuietFilter(logging.Filter):
    """Passes warnings, errors and notices; at Prefect's log level DEBUG everything."""

    def filter(self, record: logging.LogRecord) -> bool:
        is_shown = record.levelno >= logging.WARNING or hasattr(record, "is_notice")
        return is_shown or logging.getLogger("prefect").isEnabledFor(logging.DEBUG)


@contextmanager
def captured(capture: OutputCapture, terminal: Sequence[TextIO]) -> Iterator[None]:
    """Redirect what `print` and logging handlers write to these streams into `capture`.

    Handlers with a Rich console of their own (Prefect's, which log every task run) have a `QuietFilter` meanwhile.
    """
    with ExitStack() as undoing:
        for name in ("stdout", "stderr"):
            if (stream := getattr(sys, name)) in terminal:
                setattr(sys, name, capture)
                undoing.callback(setattr, sys, name, stream)
        quiet = QuietFilter()
        for handler in _stream_handlers():
            if handler.stream not in terminal:
                continue
            undoing.callback(setattr, handler, "stream", handler.stream)
            if (console := getattr(handler, "console", None)) is not None:
                undoing.callback(setattr, console, "file", handler.stream)
                undoing.callback(handler.removeFilter, quiet)
                console.file = cast(TextIO, capture)
                handler.addFilter(quiet)
            handler.stream = cast(TextIO, capture)
        yield


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


_PERIOD = timedelta(seconds=0.5)
_SHARE = 0.05
_END_TIMEOUT = timedelta(seconds=2)
_ONLY_ONE = threading.Lock()
_shown: list[LiveDisplay] = []


def can_show(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `stream` can show a live table: it is a terminal with cursor control, and nothing forbids it."""
    if environment.get("PREFECT_TUNE_PROGRESS") == "off" or environment.get("TERM") == "dumb":
        return False
    return _is_terminal(stream) and (stream.encoding or "").lower().replace("-", "") == "utf8"


def _is_terminal(stream: TextIO | None) -> TypeGuard[TextIO]:
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def live_display(
    draw: Callable[[int, int], RenderableType], on_error: Callable[[Exception], None], terminal: TextIO
) -> Iterator[None]:
    """Show a live table during the `with` block, and remove it afterwards; of several at once only the first is shown.

    A thread calls `draw` with the number of columns and lines. `on_error` receives an error of it or of the terminal;
    only the table ends then.
    """
    if not _ONLY_ONE.acquire(blocking=False):
        yield
        return
    try:
        screen = LiveDisplay(draw, on_error, terminal, capture := OutputCapture(terminal))
        with captured(capture, [terminal, *filter(_is_terminal, (sys.stdout, sys.stderr))]):
            screen.start()
            _shown.append(screen)
            try:
                yield
            finally:
                _shown.remove(screen)
                screen.end()
    finally:
        _ONLY_ONE.release()


def end_display() -> None:
    """Remove the live table of this process, if there is one, before its `with` block ends; call it in any thread."""
    for screen in tuple(_shown):
        screen.end()


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raise an ordinary error; Rich would close stdout and end the process."""
        raise BrokenPipeError(f"{self.file}: its reader has closed it")


class LiveDisplay(threading.Thread):
    """Draws until `end`, or until the terminal fails. Drawing takes at most a 20th of the time."""

    def __init__(
        self,
        draw: Callable[[int, int], RenderableType],
        on_error: Callable[[Exception], None],
        terminal: TextIO,
        capture: OutputCapture,
    ) -> None:
        super().__init__(name="progress", daemon=True)
        self._draw = draw
        self._on_error = on_error
        self._capture = capture
        self.console = _Console(file=terminal, highlight=False, markup=False)
        self._over = threading.Event()

    def end(self) -> None:
        """Remove the table and end the thread; a terminal that does not respond is left as it is."""
        self._over.set()
        self.join(_END_TIMEOUT.total_seconds())

    def run(self) -> None:
        try:
            self._show()
            self._capture.let_through()
        except Exception as error:  # noqa: BLE001 - the thread's edge: the search continues without the table
            with suppress(OSError, ValueError):  # the terminal may be the cause
                self._capture.let_through()
            self._on_error(error)

    def _show(self) -> None:
        with Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        ) as live:
            self.console.show_cursor()  # so that the terminal has one even if this process is killed
            pause = 0.0
            while not self._over.wait(pause):
                began = time.thread_time()
                self._print_lines()
                # The size of this terminal: Rich reads that of stdin, stdout or stderr. Raises if it has hung up.
                width, height = os.get_terminal_size(self.console.file.fileno())
                if width and height:
                    self.console.size = ConsoleDimensions(width, height)
                live.update(self._draw(*self.console.size), refresh=True)
                pause = max(_PERIOD.total_seconds(), (time.thread_time() - began) / _SHARE)
            self._print_lines()

    def _print_lines(self) -> None:
        if lines := self._capture.take_lines():
            self.console.print(Text("\n").join(map(Text.from_ansi, lines)), soft_wrap=True)
