"""The output of a running cell: one HTML display, which a search updates in place, and no log lines of Prefect."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from datetime import timedelta
from enum import StrEnum
from typing import TextIO, TypeAlias

from rich.console import Console

from prefect_tune.core.html_tables import Html, cell_html, paragraph, soft
from prefect_tune.core.shown_text import first_line
from prefect_tune.terminal.live_display import QuietFilter, console_handlers

_PERIOD = timedelta(seconds=1)
_SHARE = 0.05
_PATIENCE = timedelta(seconds=5)


class Ending(StrEnum):
    """How a search that a cell shows has ended."""

    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


Draw: TypeAlias = "Callable[[Ending, str], tuple[Html, str]]"
"""Returns the output as HTML and as one line of text; its arguments are the ending, and the error of a failure."""


class CellOutput:
    """A display in the cell that created it, with an id by which it is updated. Call it from any thread."""

    def __init__(self, html: Html, text: str) -> None:
        from IPython.display import display

        self._handle = display(_media(html, text), raw=True, display_id=True)
        self.is_used = False

    def show(self, html: Html, text: str) -> None:
        """Replace what is displayed."""
        self.is_used = True
        self._handle.update(_media(html, text), raw=True)


def _media(html: Html, text: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": text}


_here: ContextVar[CellOutput | None] = ContextVar("prefect_tune_cell_output", default=None)


def output_here() -> CellOutput | None:
    """Return the output of the running search's cell; None outside of a notebook."""
    return _here.get()


@contextmanager
def search_output(what: str) -> Iterator[None]:
    """In a notebook, display that `what` starts, and keep Prefect's log out of the cell; elsewhere do nothing.

    Raises:
        KeyboardInterrupt: the kernel was interrupted; it has no traceback of what waited for the search's end.
    """
    if not can_show_output():
        yield
        return
    output = CellOutput(_plain(f"{what}: starting …"), f"{what}: starting")
    token = _here.set(output)
    try:
        with quiet_console():
            yield
    except BaseException as error:
        _end_unused(output, f"{what}: {type(error).__name__}, before it began")
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{what} was interrupted; run the cell again to resume it") from None
        raise
    finally:
        _here.reset(token)
    _end_unused(output, f"{what}: nothing was left to do")


def _end_unused(output: CellOutput, text: str) -> None:
    if not output.is_used:
        output.show(_plain(text), text)


def _plain(text: str) -> Html:
    return cell_html(paragraph(soft(text)))


@contextmanager
def live_output(
    output: CellOutput, draw: Draw, on_error: Callable[[Exception], None], stop: threading.Event
) -> Iterator[None]:
    """Show what `draw` returns during the `with` block, at most once a second, and how it ended afterwards.

    Args:
        output: the output to update.
        draw: called repeatedly, in a thread of its own, which it may use for a 20th of the time.
        on_error: called in that thread with an error of `draw` or of the kernel; only the end is drawn then.
        stop: whether the search is asked to stop.
    """
    drawing = _Drawing(output, draw, on_error)
    context = copy_context()  # by which a kernel finds the cell
    runner = threading.Thread(target=context.run, args=(drawing.run,), name="cell-output", daemon=True)
    runner.start()
    try:
        yield
    except KeyboardInterrupt:
        drawing.end(Ending.INTERRUPTED)
        raise
    except BaseException as error:
        drawing.end(Ending.FAILED, first_line(f"{type(error).__name__}: {error}"))
        raise
    else:
        drawing.end(Ending.INTERRUPTED if stop.is_set() else Ending.DONE)
    finally:
        runner.join(_PATIENCE.total_seconds())


class _Drawing:
    """Draws until its end, and once more then."""

    def __init__(self, output: CellOutput, draw: Draw, on_error: Callable[[Exception], None]) -> None:
        self._output = output
        self._draw = draw
        self._on_error = on_error
        self._ending = Ending.RUNNING, ""
        self._over = threading.Event()

    def end(self, ending: Ending, why: str = "") -> None:
        """Have the end drawn."""
        self._ending = ending, why
        self._over.set()

    def run(self) -> None:
        """Draw, and after an error only the end: else the cell would say for ever that the search runs."""
        self._try(self._show_until_over)
        self._over.wait()
        self._try(self._show)

    def _try(self, draw: Callable[[], object]) -> None:
        try:
            draw()
        except Exception as error:  # noqa: BLE001 - the thread's edge: the search continues without the display
            self._on_error(error)

    def _show_until_over(self) -> None:
        while not self._over.wait(self._show()):
            pass

    def _show(self) -> float:
        """Draw once; return the pause until the next time, in seconds."""
        began = time.thread_time()
        self._output.show(*self._draw(*self._ending))
        return max(_PERIOD.total_seconds(), (time.thread_time() - began) / _SHARE)


# ---------------------------------------------------------------------------------------- the kernel and its log


def can_show_output(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a kernel, whose cells show HTML; `PREFECT_TUNE_PROGRESS=off` forbids it.

    A kernel has imported IPython and ipykernel; no other process does so for this.
    """
    if environment.get("PREFECT_TUNE_PROGRESS") == "off" or "ipykernel" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


_FILTER = QuietFilter()
_guard = threading.Lock()
_uses: list[object] = []  # the searches that are shown at this moment
_displayed: dict[Console, bool] = {}  # whether Rich displayed the lines of a console before them


@contextmanager
def quiet_console() -> Iterator[None]:
    """Have the handlers that write Prefect's log to the console write warnings, errors and notices only, as text.

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
