"""Show a search or its results in a notebook cell: one HTML display, updated in place, without Prefect's log lines."""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Literal, TypeAlias

from rich.console import Console

from prefect_tune.arrow_tables import find_metric_columns
from prefect_tune.core.display_text import first_line, format_duration, pluralize, shorten
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.cost import ExperimentCost, format_cost
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.page_elements import Cell, Code, Link, Text, Verbatim, render_notebook_cell
from prefect_tune.core.search_view import Series, select_numeric_metrics
from prefect_tune.reporting.facts import MAX_CURVES, ReportInput, sample_trials
from prefect_tune.reporting.page import (
    make_best_trial_section,
    make_errors_section,
    make_figures_section,
    make_headline_section,
    make_trials_section,
)
from prefect_tune.terminal.formatting import render_text
from prefect_tune.terminal.live_display import QuietFilter, find_console_handlers
from prefect_tune.terminal.progress_view import ProgressState, find_metric_names, make_trials_table, render_progress

if TYPE_CHECKING:
    import pyarrow as pa

_DRAW_INTERVAL = timedelta(seconds=1)
_MAX_CPU_SHARE = 0.05
_END_TIMEOUT = timedelta(seconds=5)


class CellStatus(StrEnum):
    """The status of the search that a cell shows."""

    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


Draw: TypeAlias = "Callable[[CellStatus, str], tuple[str, str]]"
"""Takes the status and an error message ("" without an error); returns the output as HTML and as one line of text."""


class CellOutput:
    """A display in the cell in which this object was created. `show` may be called from any thread."""

    def __init__(self, html: str, text: str) -> None:
        from IPython.display import display

        self._handle = display({"text/html": html, "text/plain": text}, raw=True, display_id=True)
        self.is_used = False

    def show(self, html: str, text: str) -> None:
        """Replace what is displayed."""
        self.is_used = True
        self._handle.update({"text/html": html, "text/plain": text}, raw=True)


_current_output: ContextVar[CellOutput | None] = ContextVar("prefect_tune_cell_output", default=None)


def current_cell_output() -> CellOutput | None:
    """Return the output of the cell that runs the search; None outside of a notebook."""
    return _current_output.get()


@contextmanager
def showing_search_output(flow: str) -> Iterator[None]:
    """In a notebook, display that the flow is starting, and hide Prefect's log; outside a notebook, do nothing.

    Raises:
        KeyboardInterrupt: the kernel was interrupted; raised without the traceback of the waiting code.
    """
    if not can_show_html():
        yield
        return
    output = CellOutput(render_notebook_cell(Text([f"{flow}: starting …"], kind="legend")), f"{flow}: starting")
    token = _current_output.set(output)
    status = "nothing was left to do"
    try:
        with quiet_console():
            yield
    except BaseException as error:
        status = f"{type(error).__name__}, before it began"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{flow} was interrupted; run the cell again to resume it") from None
        raise
    finally:
        _current_output.reset(token)
        if not output.is_used:
            output.show(render_notebook_cell(Text([f"{flow}: {status}"], kind="legend")), f"{flow}: {status}")


@contextmanager
def live_output(
    output: CellOutput, draw: Draw, on_error: Callable[[Exception], None], stop: threading.Event
) -> Iterator[None]:
    """Show the result of `draw` in the cell, updated at most once a second during the `with` block, and once after it.

    A thread calls `draw`, and uses at most 5 % of a CPU. `on_error` receives errors of `draw` or the kernel. After an
    error, only the final status is drawn.
    """
    ended = threading.Event()
    status_and_error = CellStatus.RUNNING, ""

    def draw_once() -> float:
        """Draw, and return the pause until the next call, in seconds."""
        began = time.thread_time()
        output.show(*draw(*status_and_error))
        return max(_DRAW_INTERVAL.total_seconds(), (time.thread_time() - began) / _MAX_CPU_SHARE)

    def draw_until_end() -> None:
        while not ended.wait(draw_once()):
            pass

    def run_display() -> None:
        """Draw until the end. After an error, draw only the final status, so that the cell never stays at "running"."""
        for step in (draw_until_end, draw_once):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the thread's edge: the search continues without the display
                on_error(error)
            ended.wait()

    context = copy_context()  # it tells the kernel in which cell to show the thread's output
    thread = threading.Thread(target=context.run, args=(run_display,), name="cell-output", daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        status_and_error = CellStatus.INTERRUPTED, ""
        raise
    except BaseException as error:
        status_and_error = CellStatus.FAILED, first_line(f"{type(error).__name__}: {error}")
        raise
    else:
        status_and_error = CellStatus.INTERRUPTED if stop.is_set() else CellStatus.DONE, ""
    finally:
        ended.set()
        thread.join(_END_TIMEOUT.total_seconds())


# Detect a notebook, and hide Prefect's log lines in it.


def can_show_html(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the cells of this process show HTML; `PREFECT_TUNE_PROGRESS=off` disables this."""
    # A kernel has already imported IPython and ipykernel, so this function need not import them.
    if environment.get("PREFECT_TUNE_PROGRESS") == "off" or "ipykernel" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


_QUIET_FILTER = QuietFilter()
_guard = threading.Lock()
_active_uses: list[object] = []  # one object per running `quiet_console` block
_jupyter_consoles: dict[Console, bool] = {}  # the original `is_jupyter` of each console that `quiet_console` changed


@contextmanager
def quiet_console() -> Iterator[None]:
    """Make Prefect's console handlers write only warnings, errors and notices, as text.

    In a notebook, these handlers would display HTML for each line. All other handlers still receive every record, so
    Prefect's UI has the complete log.
    """
    use = object()
    with _guard:
        _active_uses.append(use)
        for handler in find_console_handlers():
            handler.addFilter(_QUIET_FILTER)  # adding it again has no effect
            console = getattr(handler, "console", None)
            if isinstance(console, Console) and can_show_html():  # make Rich write text, not display HTML
                _jupyter_consoles.setdefault(console, console.is_jupyter)
                console.is_jupyter = False
    try:
        yield
    finally:
        with _guard:
            _active_uses.remove(use)
            for handler in () if _active_uses else find_console_handlers():
                handler.removeFilter(_QUIET_FILTER)
            while _jupyter_consoles and not _active_uses:
                console, is_jupyter = _jupyter_consoles.popitem()
                console.is_jupyter = is_jupyter


# Render trials and progress as the tables that a terminal would show, and results with their learning curves.

_TERMINAL_WIDTH = 120
_TERMINAL_HEIGHT = 34
"""The width in characters, and the height in lines, of the tables in a cell."""
_MAX_TABLE_CHARACTERS = 20_000


def render_trials_html(trials: Sequence[Trial], metrics: Sequence[str], more: str) -> str:
    """Return a table with a row per trial; the note `more` is below the table."""
    table, hidden = make_trials_table(trials, metrics, width=_TERMINAL_WIDTH)
    notes = (Text([note], kind="legend") for note in (hidden, more) if note)
    return render_notebook_cell(*([Code(render_text(table, width=_TERMINAL_WIDTH), "text")] if trials else []), *notes)


def render_progress_html(state: ProgressState, status: CellStatus, error: str, link: str | None = None) -> str:
    """Return the progress of a search as HTML. `error` is the failure's message, and `link` is the run's URL."""
    after = f"after {format_duration(state.elapsed)}"
    headline: list[Cell] = []
    match status:
        case CellStatus.RUNNING:
            headline = [f"running for {format_duration(state.elapsed)}"]
        case CellStatus.DONE if state.stop_reason:
            headline = [f"ended early {after}: {state.stop_reason}"]
        case CellStatus.DONE if not state.has_started_attempt:
            headline = ["nothing to train: all trials have already ended. For a new search, use a new experiment name"]
        case CellStatus.DONE:
            headline = [f"done {after}"]
        case CellStatus.INTERRUPTED:
            same_name = Verbatim(f"experiment={state.extent.experiment!r}")
            headline = [f"interrupted {after}. To resume it, run the cell again with ", same_name]
        case CellStatus.FAILED:
            headline = [f"failed {after}: {error}"]
    parts = [shorten(part, 300) if isinstance(part, str) else part for part in headline]
    address = [Text([Link("in the Prefect UI", link)])] if link else []
    kind: Literal["", "bad"] = "bad" if status is CellStatus.FAILED else ""
    table = render_text(render_progress(state, _TERMINAL_WIDTH, _TERMINAL_HEIGHT), width=_TERMINAL_WIDTH)
    return render_notebook_cell(Text(parts, kind=kind), Code(table[-_MAX_TABLE_CHARACTERS:], "text"), *address)


CurvePoints: TypeAlias = "Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]"
"""Learning curves: for each trial and metric, the steps with their values."""
ReadCurves: TypeAlias = "Callable[[Sequence[str], Sequence[str]], CurvePoints]"
"""Reads the learning curves of the given trials (first argument), for the given metrics (second argument)."""
MAX_ROWS = 20
_MAX_METRICS = 4


def render_results_html(report: ReportInput, read_curves: ReadCurves, read_cost: Callable[[], ExperimentCost]) -> str:
    """Return the report as HTML, without its runs and settings.

    `read_curves` and `read_cost` may read the target. If the curves cannot be read, the HTML has the error
    instead. If the cost cannot be read, the HTML omits the cost.
    """
    reported = find_metric_names(report.first_trials)[:_MAX_METRICS]
    metrics = report.objective.metrics if report.objective else reported
    elements = [*make_headline_section(report), *make_best_trial_section(report)]
    try:
        drawn = [trial.id for trial in sample_trials([*report.ranking] or report.trials, MAX_CURVES)]
        curves = read_curves(drawn, metrics)
    except TuneError as error:
        elements.append(Text([f"The learning curves could not be read: {first_line(str(error))}"], kind="legend"))
        curves = {}
    history = replace(report.snapshot, metrics=tuple(metrics), metric_count=len(metrics), curves=curves)
    figures = make_figures_section(replace(report, snapshot=history))
    elements += [*figures, *make_trials_section(report), *make_errors_section(report)]
    with suppress(TuneError):
        if sentence := format_cost(read_cost()):
            elements.append(Text([sentence]))
    return render_notebook_cell(*elements)


def select_curve_points(reports: pa.Table, trials: Sequence[str], metrics: Sequence[str]) -> CurvePoints:
    """Return the learning curves of some trials from a table of reports; long curves are downsampled."""
    import pyarrow.compute as pc

    columns = find_metric_columns(reports, metrics)
    selected = reports.select(["trial", "step", *columns.values()]).filter(pc.field("trial").isin(trials))
    curves: dict[str, dict[str, Series]] = {trial: {name: Series() for name in columns} for trial in trials}
    for row in selected.to_pylist():
        for name, number in select_numeric_metrics({name: row[column] for name, column in columns.items()}).items():
            curves[row["trial"]][name].add_point(row["step"], number)
    return {
        trial: {name: points for name, series in curves_of_trial.items() if (points := series.list_points())}
        for trial, curves_of_trial in curves.items()
    }


def format_omitted_trials(count: int) -> str:
    """Describe how many trials a table omits, and how to get them; return "" if `count` is 0."""
    return f"and {pluralize(count, 'more trial', 'more trials')}: results.to_pandas()" if count else ""
