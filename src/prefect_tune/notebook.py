"""What a cell shows: one HTML display, updated in place; tables as in a terminal; no log lines of Prefect."""

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

_PERIOD = timedelta(seconds=1)
_SHARE = 0.05
_END_TIMEOUT = timedelta(seconds=5)


class Ending(StrEnum):
    """How a search that a cell shows has ended."""

    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


Draw: TypeAlias = "Callable[[Ending, str], tuple[str, str]]"
"""Returns the output as HTML and as one line of text; its arguments are the ending, and the error of a failure."""


class CellOutput:
    """A display in the cell that created it, with an id by which it is updated. Call it from any thread."""

    def __init__(self, html: str, text: str) -> None:
        from IPython.display import display

        self._handle = display({"text/html": html, "text/plain": text}, raw=True, display_id=True)
        self.is_used = False

    def show(self, html: str, text: str) -> None:
        """Replace what is displayed."""
        self.is_used = True
        self._handle.update({"text/html": html, "text/plain": text}, raw=True)


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
    output = CellOutput(cell_html(Text([f"{what}: starting …"], kind="legend")), f"{what}: starting")
    token = _here.set(output)
    unused = "nothing was left to do"
    try:
        with quiet_console():
            yield
    except BaseException as error:
        unused = f"{type(error).__name__}, before it began"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{what} was interrupted; run the cell again to resume it") from None
        raise
    finally:
        _here.reset(token)
        if not output.is_used:
            output.show(cell_html(Text([f"{what}: {unused}"], kind="legend")), f"{what}: {unused}")


@contextmanager
def live_output(
    output: CellOutput, draw: Draw, on_error: Callable[[Exception], None], stop: threading.Event
) -> Iterator[None]:
    """Show what `draw` returns during the `with` block, at most once a second, and how it ended afterwards.

    A thread calls `draw`, for a 20th of the time at most. `on_error` receives an error of it or of the kernel; only the
    end is drawn then.
    """
    over = threading.Event()
    ending = Ending.RUNNING, ""

    def show() -> float:
        """Draw once; return the pause until the next time, in seconds."""
        began = time.thread_time()
        output.show(*draw(*ending))
        return max(_PERIOD.total_seconds(), (time.thread_time() - began) / _SHARE)

    def show_until_over() -> None:
        while not over.wait(show()):
            pass

    def run() -> None:
        """Draw, and after an error only the end: else the cell would say for ever that the search runs."""
        for draw_part in (show_until_over, show):
            try:
                draw_part()
            except Exception as error:  # noqa: BLE001 - the thread's edge: the search continues without the display
                on_error(error)
            over.wait()

    context = copy_context()  # by which a kernel finds the cell
    runner = threading.Thread(target=context.run, args=(run,), name="cell-output", daemon=True)
    runner.start()
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
        over.set()
        runner.join(_END_TIMEOUT.total_seconds())


# The kernel and its log.


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


# Tables as in a terminal, and the learning curves of results.

_WIDTH = 120
_HEIGHT = 34
"""In characters and lines: of the terminal whose output a cell shows."""
_MAX_CHARACTERS = 20_000


def trials_html(trials: Sequence[Trial], metrics: Sequence[str], more: str) -> str:
    """Return a table with a row per trial: status, step, metrics, the differing parameters; `more` is said below it."""
    table, hidden = trials_table(trials, metrics, width=_WIDTH)
    notes = (Text([note], kind="legend") for note in (hidden, more) if note)
    return cell_html(*([Code(text_of(table, width=_WIDTH), "text")] if trials else []), *notes)


def progress_html(state: ProgressState, ending: Ending, why: str, link: str | None = None) -> str:
    """Return the output of a running search, or how it ended; `why` is the error of a failure, `link` its run's URL."""
    after = f"after {format_duration(state.elapsed)}"
    headline: list[Cell] = []
    match ending:
        case Ending.RUNNING:
            headline = [f"running for {format_duration(state.elapsed)}"]
        case Ending.DONE if state.ended_because:
            headline = [f"ended early {after}: {state.ended_because}"]
        case Ending.DONE if not state.has_trained:
            headline = ["nothing to train: every trial had ended before. A new experiment name begins a new search"]
        case Ending.DONE:
            headline = [f"done {after}"]
        case Ending.INTERRUPTED:
            same_name = Verbatim(f"experiment={state.outlook.experiment!r}")
            headline = [f"interrupted {after}. To resume it, run the cell again with ", same_name]
        case Ending.FAILED:
            headline = [f"failed {after}: {why}"]
    parts = [shorten(part, 300) if isinstance(part, str) else part for part in headline]
    address = [Text([Link("in the Prefect UI", link)])] if link else []
    kind: Literal["", "bad"] = "bad" if ending is Ending.FAILED else ""
    table = text_of(frame(state, _WIDTH, _HEIGHT), width=_WIDTH)
    return cell_html(Text(parts, kind=kind), Code(table[-_MAX_CHARACTERS:], "text"), *address)


Points: TypeAlias = "Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]"
"""Learning curves: steps and values by trial and metric."""
ReadCurves: TypeAlias = "Callable[[Sequence[str], Sequence[str]], Points]"
"""Reads the curves of trials, by metric."""
MAX_ROWS = 20
_MAX_METRICS = 4


def results_html(report: ReportInput, read_curves: ReadCurves, read_cost: Callable[[], ExperimentCost]) -> str:
    """Return the output: the report without its runs and settings, for any number of trials.

    `read_curves` and `read_cost` may read the target: an error of it takes the place of the curves, and hides the cost.
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
    """Return the learning curves of some trials from a table with a row per report; of long ones some points."""
    import pyarrow.compute as pc

    columns = metric_columns(reports, metrics)
    wanted = reports.select(["trial", "step", *columns.values()]).filter(pc.field("trial").isin(trials))
    curves: dict[str, dict[str, Series]] = {trial: {name: Series() for name in columns} for trial in trials}
    for row in wanted.to_pylist():
        for name, number in numbers_in({name: row[column] for name, column in columns.items()}).items():
            curves[row["trial"]][name].add(row["step"], number)
    return {
        trial: {name: points for name, series in curves_of_trial.items() if (points := series.points())}
        for trial, curves_of_trial in curves.items()
    }


def more_trials(count: int) -> str:
    """Return how many trials a table leaves out, and where they are; empty if none."""
    return f"and {plural(count, 'more trial', 'more trials')}: results.to_pandas()" if count else ""
