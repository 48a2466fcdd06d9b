"""Output of a notebook cell: one HTML display, updated in place; tables like in a terminal; no Prefect log lines."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from rich.console import Console

from prefect_tune.arrow_tables import metric_columns
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.cost import ExperimentCost, cost_sentence
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.page_elements import Cell, Code, Link, Text, Verbatim, cell_html
from prefect_tune.core.search_view import Series, numbers_in
from prefect_tune.core.shown_text import first_line, format_duration, plural, shorten
from prefect_tune.reporting.facts import DRAWN, ReportInput, spread
from prefect_tune.reporting.page import best_trial, figures, headline_and_facts, table_of_errors, table_of_trials
from prefect_tune.terminal.formatting import text_of
from prefect_tune.terminal.live_display import QuietFilter, console_handlers
from prefect_tune.terminal.progress_view import ProgressState, common_metrics, frame, trials_table

if TYPE_CHECKING:
    import pyarrow as pa

_DRAW_INTERVAL = timedelta(seconds=1)
_MAX_CPU_SHARE = 0.05
_END_TIMEOUT = timedelta(seconds=5)


class Ending(StrEnum):
    """How the search of a cell ended, or that it is running."""

    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


Draw: TypeAlias = "Callable[[Ending, str], tuple[str, str]]"
"""Returns the output as HTML and as one line of text, given the ending and the error message of a failure."""


class CellOutput:
    """A display in the cell that created it, updated by its id. May be called from any thread."""

    def __init__(self, html: str, text: str) -> None:
        from IPython.display import display

        self._handle = display({"text/html": html, "text/plain": text}, raw=True, display_id=True)
        self.is_used = False

    def show(self, html: str, text: str) -> None:
        """Replace what is displayed."""
        self.is_used = True
        self._handle.update({"text/html": html, "text/plain": text}, raw=True)


_current_output: ContextVar[CellOutput | None] = ContextVar("prefect_tune_cell_output", default=None)


def output_here() -> CellOutput | None:
    """Return the output of the cell that runs the search; None outside of a notebook."""
    return _current_output.get()


@contextmanager
def search_output(what: str) -> Iterator[None]:
    """In a notebook, display that the search `what` starts, and hide Prefect's log; elsewhere do nothing.

    Raises:
        KeyboardInterrupt: the kernel was interrupted; raised without the traceback of the waiting code.
    """
    if not can_show_output():
        yield
        return
    output = CellOutput(cell_html(Text([f"{what}: starting …"], kind="legend")), f"{what}: starting")
    token = _current_output.set(output)
    status = "nothing was left to do"
    try:
        with quiet_console():
            yield
    except BaseException as error:
        status = f"{type(error).__name__}, before it began"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{what} was interrupted; run the cell again to resume it") from None
        raise
    finally:
        _current_output.reset(token)
        if not output.is_used:
            output.show(cell_html(Text([f"{what}: {status}"], kind="legend")), f"{what}: {status}")


@contextmanager
def live_output(
    output: CellOutput, draw: Draw, on_error: Callable[[Exception], None], stop: threading.Event
) -> Iterator[None]:
    """Show the result of `draw` during the `with` block, at most once a second, and the ending afterwards.

    A thread calls `draw`, for at most 5 % of the time. `on_error` receives errors of `draw` or the kernel; after an
    error, only the ending is drawn.
    """
    ended = threading.Event()
    ending = Ending.RUNNING, ""

    def draw_once() -> float:
        """Draw, and return the pause until the next call, in seconds."""
        began = time.thread_time()
        output.show(*draw(*ending))
        return max(_DRAW_INTERVAL.total_seconds(), (time.thread_time() - began) / _MAX_CPU_SHARE)

    def draw_until_end() -> None:
        while not ended.wait(draw_once()):
            pass

    def run_display() -> None:
        """Draw until the end; after an error, draw only the ending, or the cell would show a running search forever."""
        for step in (draw_until_end, draw_once):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the thread's edge: the search continues without the display
                on_error(error)
            ended.wait()

    context = copy_context()  # the kernel finds the cell by its context
    thread = threading.Thread(target=context.run, args=(run_display,), name="cell-output", daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        ending = Ending.INTERRUPTED, ""
        raise
    except BaseException as error:
        ending = Ending.FAILED, first_line(f"{type(error).__name__}: {error}")
        raise
    else:
        ending = Ending.INTERRUPTED if stop.is_set() else Ending.DONE, ""
    finally:
        ended.set()
        thread.join(_END_TIMEOUT.total_seconds())


# The kernel and its log.


def can_show_output(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a kernel whose cells show HTML; `PREFECT_TUNE_PROGRESS=off` disables this.

    A kernel has already imported IPython and ipykernel, so this function imports neither.
    """
    if environment.get("PREFECT_TUNE_PROGRESS") == "off" or "ipykernel" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


_QUIET_FILTER = QuietFilter()
_guard = threading.Lock()
_active_uses: list[object] = []  # one object per search that is shown
_jupyter_consoles: dict[Console, bool] = {}  # the previous `is_jupyter` of each console


@contextmanager
def quiet_console() -> Iterator[None]:
    """Make Prefect's console handlers write only warnings, errors and notices, as text.

    In a notebook they would display an HTML output for each line. All other handlers still receive every record, so
    Prefect's UI has the complete log.
    """
    use = object()
    with _guard:
        _active_uses.append(use)
        for handler in console_handlers():
            handler.addFilter(_QUIET_FILTER)  # adding it again has no effect
            _disable_html_output(handler)
    try:
        yield
    finally:
        with _guard:
            _active_uses.remove(use)
            for handler in () if _active_uses else console_handlers():
                handler.removeFilter(_QUIET_FILTER)
            while _jupyter_consoles and not _active_uses:
                console, is_jupyter = _jupyter_consoles.popitem()
                console.is_jupyter = is_jupyter


def _disable_html_output(handler: logging.StreamHandler[TextIO]) -> None:
    """Make the handler's console write to its stream; in a notebook, Rich would display HTML instead."""
    console = getattr(handler, "console", None)
    if isinstance(console, Console) and can_show_output():
        _jupyter_consoles.setdefault(console, console.is_jupyter)
        console.is_jupyter = False


# Tables like in a terminal, and the learning curves of results.

_TERMINAL_WIDTH = 120
_TERMINAL_HEIGHT = 34
"""The size, in characters and lines, of the terminal whose output a cell shows."""
_MAX_TABLE_CHARACTERS = 20_000


def trials_html(trials: Sequence[Trial], metrics: Sequence[str], more: str) -> str:
    """Return a table with a row per trial: status, step, metrics, differing parameters; `more` is a note below it."""
    table, hidden = trials_table(trials, metrics, width=_TERMINAL_WIDTH)
    notes = (Text([note], kind="legend") for note in (hidden, more) if note)
    return cell_html(*([Code(text_of(table, width=_TERMINAL_WIDTH), "text")] if trials else []), *notes)


def progress_html(state: ProgressState, ending: Ending, error: str, link: str | None = None) -> str:
    """Return the progress or the ending of a search; `error` is the message of a failure, `link` the URL of its run."""
    after = f"after {format_duration(state.elapsed)}"
    headline: list[Cell] = []
    match ending:
        case Ending.RUNNING:
            headline = [f"running for {format_duration(state.elapsed)}"]
        case Ending.DONE if state.ended_because:
            headline = [f"ended early {after}: {state.ended_because}"]
        case Ending.DONE if not state.has_trained:
            headline = ["nothing to train: all trials have already ended. For a new search, use a new experiment name"]
        case Ending.DONE:
            headline = [f"done {after}"]
        case Ending.INTERRUPTED:
            same_name = Verbatim(f"experiment={state.outlook.experiment!r}")
            headline = [f"interrupted {after}. To resume it, run the cell again with ", same_name]
        case Ending.FAILED:
            headline = [f"failed {after}: {error}"]
    parts = [shorten(part, 300) if isinstance(part, str) else part for part in headline]
    address = [Text([Link("in the Prefect UI", link)])] if link else []
    kind: Literal["", "bad"] = "bad" if ending is Ending.FAILED else ""
    table = text_of(frame(state, _TERMINAL_WIDTH, _TERMINAL_HEIGHT), width=_TERMINAL_WIDTH)
    return cell_html(Text(parts, kind=kind), Code(table[-_MAX_TABLE_CHARACTERS:], "text"), *address)


Points: TypeAlias = "Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]"
"""Learning curves: steps and values by trial and metric."""
ReadCurves: TypeAlias = "Callable[[Sequence[str], Sequence[str]], Points]"
"""Reads the learning curves of these trials, for these metrics."""
MAX_ROWS = 20
_MAX_METRICS = 4


def results_html(report: ReportInput, read_curves: ReadCurves, read_cost: Callable[[], ExperimentCost]) -> str:
    """Return the report without its runs and settings, for any number of trials.

    `read_curves` and `read_cost` may read the target; if that fails, the error replaces the curves or hides the cost.
    """
    metrics = report.objective.metrics if report.objective else common_metrics(report.first_trials)[:_MAX_METRICS]
    blocks = [*headline_and_facts(report), *best_trial(report)]
    try:
        curves = read_curves([trial.trial for trial in spread([*report.ranking] or report.trials, DRAWN)], metrics)
    except TuneError as error:
        blocks.append(Text([f"The learning curves could not be read: {first_line(str(error))}"], kind="legend"))
        curves = {}
    history = replace(report.history, metrics=tuple(metrics), metric_count=len(metrics), curves=curves)
    blocks += [*figures(replace(report, history=history)), *table_of_trials(report), *table_of_errors(report)]
    with suppress(TuneError):
        if sentence := cost_sentence(read_cost()):
            blocks.append(Text([sentence]))
    return cell_html(*blocks)


def curve_points(reports: pa.Table, trials: Sequence[str], metrics: Sequence[str]) -> Points:
    """Return the learning curves of some trials from a table with a row per report; long curves are thinned out."""
    import pyarrow.compute as pc

    columns = metric_columns(reports, metrics)
    selected = reports.select(["trial", "step", *columns.values()]).filter(pc.field("trial").isin(trials))
    curves: dict[str, dict[str, Series]] = {trial: {name: Series() for name in columns} for trial in trials}
    for row in selected.to_pylist():
        for name, number in numbers_in({name: row[column] for name, column in columns.items()}).items():
            curves[row["trial"]][name].add(row["step"], number)
    return {
        trial: {name: points for name, series in curves_of_trial.items() if (points := series.points())}
        for trial, curves_of_trial in curves.items()
    }


def more_trials(count: int) -> str:
    """Return how many trials a table leaves out, and how to get them; empty if none."""
    return f"and {plural(count, 'more trial', 'more trials')}: results.to_pandas()" if count else ""
