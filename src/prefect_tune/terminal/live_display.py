"""A live table in a terminal, drawn in a separate thread."""

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
from typing import NoReturn, TextIO, TypeAlias, TypeGuard, cast

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.text import Text

# Capture what this process prints and logs while a live table is shown, and print it above the table. Rich's own
# redirection ignores the handlers of `logging`, and would make each `print` of a training wait for the terminal.

_MAX_CHUNKS = 20_000
_DROPPED_LINES_MESSAGE = "(lines are missing here: more was printed at once than the live table could show)"


class OutputCapture(io.TextIOBase):
    """Replaces the stream of a terminal, and buffers what is written, so that a write never waits for the terminal."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self._terminal = terminal
        self._guard = threading.Lock()
        self._passes_through = False
        self._chunks: deque[str] = deque(maxlen=_MAX_CHUNKS)
        self._has_dropped = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the stub has an attribute, which a property can replace
        return self._terminal.encoding

    def write(self, text: str) -> int:
        if self._passes_through:
            return self._terminal.write(text)
        with self._guard:
            self._has_dropped |= len(self._chunks) == _MAX_CHUNKS
            self._chunks.append(text)
        return len(text)

    def flush(self) -> None:
        if self._passes_through:
            self._terminal.flush()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal.fileno()

    def writable(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        """Return an attribute that only the terminal's stream has. Writes to its `buffer` are not captured."""
        return getattr(self._terminal, name)

    def take_lines(self) -> Sequence[str]:
        """Return the complete lines since the last call; if lines were dropped, the first line says so."""
        with self._guard:
            lines, newline, rest = "".join(self._chunks).rpartition("\n")
            self._chunks.clear()
            if rest:
                self._chunks.append(rest)
            dropped = [_DROPPED_LINES_MESSAGE] * self._has_dropped
            self._has_dropped = False
        return [*dropped, *(lines.split("\n") if newline else ())]

    def pass_through(self) -> None:
        """Write the remaining buffer to the terminal, and pass later writes through. Raises the terminal's errors."""
        self._passes_through = True
        with self._guard:
            rest = "".join(self._chunks)
            self._chunks.clear()
        self._terminal.write(rest)
        self._terminal.flush()


NOTICE: Mapping[str, object] = {"is_notice": True}
"""The `extra` that marks a log line as a notice: live tables and notebooks show it, although it is below WARNING."""


class QuietFilter(logging.Filter):
    """Passes warnings, errors and notices; passes all records if Prefect's log level is DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        is_shown = record.levelno >= logging.WARNING or hasattr(record, "is_notice")
        return is_shown or logging.getLogger("prefect").isEnabledFor(logging.DEBUG)


@contextmanager
def capturing_output(capture: OutputCapture, terminal: Sequence[TextIO]) -> Iterator[None]:
    """Send to `capture` what `print` and logging handlers would write to a stream in `terminal`.

    Prefect's handlers, which have their own Rich console, also get a `QuietFilter`, because they log every task run.
    """
    with ExitStack() as restores:
        for name in ("stdout", "stderr"):
            if (stream := getattr(sys, name)) in terminal:
                setattr(sys, name, capture)
                restores.callback(setattr, sys, name, stream)
        quiet = QuietFilter()
        for handler in _iter_stream_handlers():
            if handler.stream not in terminal:
                continue
            restores.callback(setattr, handler, "stream", handler.stream)
            if (console := getattr(handler, "console", None)) is not None:
                restores.callback(setattr, console, "file", handler.stream)
                restores.callback(handler.removeFilter, quiet)
                console.file = cast(TextIO, capture)
                handler.addFilter(quiet)
            handler.stream = cast(TextIO, capture)
        yield


def find_console_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    """Return the log handlers of Prefect, which have their own Rich console."""
    return (handler for handler in _iter_stream_handlers() if hasattr(handler, "console"))


def _iter_stream_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {
        id(handler): handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers
    }
    for handler in handlers.values():
        if isinstance(handler, logging.StreamHandler):
            yield handler


_DRAW_INTERVAL = timedelta(seconds=0.5)
_MAX_CPU_SHARE = 0.05
_END_TIMEOUT = timedelta(seconds=2)
DrawTable: TypeAlias = Callable[[int, int], RenderableType]
ErrorHandler: TypeAlias = Callable[[Exception], None]
_display_lock = threading.Lock()
_displays: list[LiveDisplay] = []


def can_show_display(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether live tables are enabled, and `stream` is a UTF-8 terminal with cursor control."""
    if environment.get("PREFECT_TUNE_PROGRESS") == "off" or environment.get("TERM") == "dumb":
        return False
    return _is_terminal(stream) and (stream.encoding or "").lower().replace("-", "") == "utf8"


def _is_terminal(stream: TextIO | None) -> TypeGuard[TextIO]:
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def live_display(draw: DrawTable, on_error: ErrorHandler, terminal: TextIO) -> Iterator[None]:
    """Show a live table during the `with` block, then remove it; if another table is shown already, show none.

    A thread calls `draw` with the terminal's numbers of columns and lines. `on_error` receives errors of `draw` or the
    terminal; such an error ends the table, but not the block.
    """
    if not _display_lock.acquire(blocking=False):
        yield
        return
    try:
        screen = LiveDisplay(draw, on_error, terminal, capture := OutputCapture(terminal))
        with capturing_output(capture, [terminal, *filter(_is_terminal, (sys.stdout, sys.stderr))]):
            screen.start()
            _displays.append(screen)
            try:
                yield
            finally:
                _displays.remove(screen)
                screen.stop()
    finally:
        _display_lock.release()


def end_display() -> None:
    """Remove the live table of this process before its `with` block ends. May be called from any thread."""
    for screen in tuple(_displays):
        screen.stop()


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raise an `OSError` for a closed pipe; Rich's own method would close stdout and end the process."""
        raise BrokenPipeError(f"{self.file}: the reader has closed it")


class LiveDisplay(threading.Thread):
    """Draws until `stop` is called or the terminal fails. Drawing uses at most 5 % of a CPU."""

    def __init__(self, draw: DrawTable, on_error: ErrorHandler, terminal: TextIO, capture: OutputCapture) -> None:
        super().__init__(name="progress", daemon=True)
        self._draw = draw
        self._on_error = on_error
        self._capture = capture
        self.console = _Console(file=terminal, highlight=False, markup=False)
        self._stop_requested = threading.Event()

    def stop(self) -> None:
        """Remove the table and end the thread; wait at most 2 s for a terminal that does not respond."""
        self._stop_requested.set()
        self.join(_END_TIMEOUT.total_seconds())

    def run(self) -> None:
        try:
            self._draw_until_end()
            self._capture.pass_through()
        except Exception as error:  # noqa: BLE001 - the thread's edge: the search continues without the table
            with suppress(OSError, ValueError):  # the terminal may be the cause, and fail again
                self._capture.pass_through()
            self._on_error(error)

    def _draw_until_end(self) -> None:
        with Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        ) as live:
            self.console.show_cursor()  # so that the cursor stays visible even if this process is killed
            pause = 0.0
            while not self._stop_requested.wait(pause):
                began = time.thread_time()
                self._print_captured_lines()
                # Rich might use the size of stdin. `get_terminal_size` raises `OSError` if the terminal has hung up.
                width, height = os.get_terminal_size(self.console.file.fileno())
                if width and height:
                    self.console.size = ConsoleDimensions(width, height)
                live.update(self._draw(*self.console.size), refresh=True)
                pause = max(_DRAW_INTERVAL.total_seconds(), (time.thread_time() - began) / _MAX_CPU_SHARE)
            self._print_captured_lines()

    def _print_captured_lines(self) -> None:
        if lines := self._capture.take_lines():
            self.console.print(Text("\n").join(map(Text.from_ansi, lines)), soft_wrap=True)
