"""A table that stands in a terminal while something runs, drawn in a thread of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn, TextIO, TypeGuard

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.text import Text

from prefect_tune.terminal.aside import Aside, set_aside

__all__ = ["Screen", "can_show", "standing"]

_PERIOD = timedelta(seconds=0.5)
_SHARE = 0.05
_PATIENCE = timedelta(seconds=2)
_ONLY_ONE = threading.Lock()


def can_show(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a table can stand there: in a terminal that can move its cursor, where nobody asked for none."""
    if environment.get("PREFECT_TUNE_PROGRESS") == "off" or environment.get("TERM") == "dumb":
        return False
    return _is_terminal(stream) and (stream.encoding or "").lower().replace("-", "") == "utf8"


def _is_terminal(stream: TextIO | None) -> TypeGuard[TextIO]:
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def standing(
    draw: Callable[[int, int], RenderableType], broke: Callable[[Exception], None], terminal: TextIO
) -> Iterator[None]:
    """Have the table stand there meanwhile, and nothing of it afterwards; of several at once only the first is shown.

    Args:
        draw: returns it for so many columns and lines; called in a thread of its own, again and again.
        broke: is told in that thread when the terminal or `draw` fails; that ends the table and nothing else.
        terminal: where.
    """
    if not _ONLY_ONE.acquire(blocking=False):
        yield
        return
    try:
        screen = Screen(draw, broke, terminal, aside := Aside(terminal))
        with set_aside(aside, [terminal, *filter(_is_terminal, (sys.stdout, sys.stderr))]):
            screen.start()
            try:
                yield
            finally:
                screen.end()
    finally:
        _ONLY_ONE.release()


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Have it be an error like any other: Rich would close stdout, and end the process."""
        raise BrokenPipeError(f"{self.file}: nobody reads it any more")


class Screen(threading.Thread):
    """Draws until it is ended, or the terminal breaks. However long a drawing takes, it takes a 20th of the time."""

    def __init__(
        self,
        draw: Callable[[int, int], RenderableType],
        broke: Callable[[Exception], None],
        terminal: TextIO,
        aside: Aside,
    ) -> None:
        super().__init__(name="progress", daemon=True)
        self._draw = draw
        self._broke = broke
        self._aside = aside
        self.console = _Console(file=terminal, highlight=False, markup=False)
        self._over = threading.Event()

    def end(self) -> None:
        """Have it take the table away; a terminal that does not take even that is left as it is."""
        self._over.set()
        self.join(_PATIENCE.total_seconds())

    def run(self) -> None:
        """Draw."""
        try:
            self._stand()
            self._aside.let_through()
        except Exception as error:  # noqa: BLE001 - the thread's edge: whatever broke, the search goes on without it
            with suppress(OSError, ValueError):  # it may be the terminal that broke
                self._aside.let_through()
            self._broke(error)

    def _stand(self) -> None:
        with Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        ) as live:
            self.console.show_cursor()  # whatever becomes of this process, the terminal has one
            patience = 0.0
            while not self._over.wait(patience):
                began = time.thread_time()
                self._print_lines()
                self._measure()
                live.update(self._draw(*self.console.size), refresh=True)
                patience = max(_PERIOD.total_seconds(), (time.thread_time() - began) / _SHARE)
            self._print_lines()

    def _measure(self) -> None:
        """Of this very terminal: Rich asks whatever stdin, stdout or stderr are."""
        width, height = os.get_terminal_size(self.console.file.fileno())  # which raises when it has hung up
        if width and height:
            self.console.size = ConsoleDimensions(width, height)

    def _print_lines(self) -> None:
        if lines := self._aside.take_lines():
            self.console.print(Text("\n").join(map(Text.from_ansi, lines)), soft_wrap=True)
