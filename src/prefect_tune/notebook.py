"""What a cell shows: one HTML display, updated in place; tables as in a terminal; no log lines of Prefect."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from html import escape
from typing import TYPE_CHECKING, TextIO, TypeAlias

from rich.console import Console, RenderableType

from prefect_tune.arrow_tables import metric_columns
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.cost import ExperimentCost, cost_sentence
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import best_label, counted, named, ranked
from prefect_tune.core.experiment.trial_transitions import Status, Trial, newest_checkpoint
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search_view import SearchSnapshot, Series, numbers_in
from prefect_tune.core.shown_text import (
    Html,
    cell_html,
    code,
    escaped,
    first_line,
    format_duration,
    paragraph,
    plural,
    soft,
)
from prefect_tune.core.values import metric_in
from prefect_tune.reporting.facts import DRAWN, ReportInput, spread
from prefect_tune.reporting.svg import learning_curves
from prefect_tune.terminal.formatting import errors_by_cause, facts_table, format_counts, format_value, names_of
from prefect_tune.terminal.live_display import QuietFilter, console_handlers
from prefect_tune.terminal.progress_view import ProgressState, common_metrics, format_config, frame, trials_table

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


Draw: TypeAlias = "Callable[[Ending, str], tuple[Html, str]]"
"""Returns the output as HTML and as one line of text; its arguments are the ending, and the error of a failure."""


class CellOutput:
    """A display in the cell that created it, with an id by which it is updated. Call it from any thread."""

    def __init__(self, html: Html, text: str) -> None:
        from IPython.display import display

        self._handle = display({"text/html": html, "text/plain": text}, raw=True, display_id=True)
        self.is_used = False

    def show(self, html: Html, text: str) -> None:
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
    output = CellOutput(cell_html(paragraph(soft(f"{what}: starting …"))), f"{what}: starting")
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
            output.show(cell_html(paragraph(soft(f"{what}: {unused}"))), f"{what}: {unused}")


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
_MAX_ERRORS = 3


def terminal_html(*parts: RenderableType) -> Html:
    """Return what a terminal would show, as text in the color of the cell."""
    console = Console(color_system=None, force_jupyter=False, width=_WIDTH, file=io.StringIO())
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return code("\n".join(line.rstrip() for line in captured.get().splitlines()), _MAX_CHARACTERS)


def trials_html(trials: Sequence[Trial], metrics: Sequence[str], more: Mapping[str, list[str]] | None = None) -> Html:
    """Return a table with a row per trial: status, step, metrics, the columns `more`, the differing parameters."""
    if not trials:
        return Html("")
    table, hidden = trials_table(trials, metrics, more or {}, width=_WIDTH)
    return Html(terminal_html(table) + (paragraph(soft(hidden)) if hidden else ""))


def progress_html(state: ProgressState, ending: Ending, why: str, link: str | None = None) -> Html:
    """Return the output of a running search, or how it ended; `why` is the error of a failure, `link` its run's URL."""
    after = f"after {format_duration(state.elapsed)}"
    match ending:
        case Ending.RUNNING:
            headline = escaped(f"running for {format_duration(state.elapsed)}")
        case Ending.DONE if state.ended_because:
            headline = escaped(f"ended early {after}: {state.ended_because}")
        case Ending.DONE if not state.has_trained:
            headline = escaped(
                "nothing to train: every trial had ended before. A new experiment name begins a new search"
            )
        case Ending.DONE:
            headline = escaped(f"done {after}")
        case Ending.INTERRUPTED:
            name = escaped(repr(state.outlook.experiment))
            headline = Html(
                f"interrupted {after}. To resume it, run the cell again with <code>experiment={name}</code>"
            )
        case Ending.FAILED:
            headline = escaped(f"failed {after}: {why}")
    address = f'<a href="{escape(link)}" target="_blank" rel="noopener">in the Prefect UI</a>' if link else ""
    kind = "pt-bad" if ending is Ending.FAILED else ""
    return cell_html(paragraph(headline, kind=kind), terminal_html(frame(state, _WIDTH, _HEIGHT)), Html(address))


Points: TypeAlias = "Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]"
"""Learning curves: steps and values by trial and metric."""
ReadCurves: TypeAlias = "Callable[[Sequence[str], Sequence[str]], Points]"
"""Reads the curves of trials, by metric."""
MAX_ROWS = 20
_MAX_METRICS = 4
_CHART_TRIALS = 2


def results_html(
    experiment: Experiment,
    objective: Objective | None,
    uri: str,
    read_curves: ReadCurves,
    read_cost: Callable[[], ExperimentCost],
) -> Html:
    """Return the output: the best 20 trials and 60 curves, for any number of trials.

    `read_curves` and `read_cost` may read the target: an error of it takes the place of the curves, and hides the cost.
    """
    trials = list(experiment.trials.values())
    losses = {trial.trial: compared for trial, compared in ranked(trials, objective)}
    view = ReportInput(experiment, uri, datetime.now(UTC), objective, SearchSnapshot(experiment), trials, losses)
    parts = list(_results_parts(view, read_curves))
    with suppress(TuneError):
        if sentence := cost_sentence(read_cost()):
            parts.append(paragraph(escaped(sentence)))
    return cell_html(*parts)


def _results_parts(view: ReportInput, read_curves: ReadCurves) -> Iterator[Html]:
    objective = view.objective
    ordered = [*view.ranking, *(trial for trial in view.trials if trial.trial not in view.losses)]
    metrics = objective.metrics if objective else common_metrics(ordered)[:_MAX_METRICS]
    facts = {
        "trials": format_counts(counted(view.experiment)),
        "target": view.uri,
        "ended early": first_line(view.experiment.ends),
    }
    if view.best and objective is not None:
        best, compared = view.best[0], zip(objective.metrics, objective.modes, strict=True)
        values = [f"{name} {format_value(metric_in(best.metrics, name))} ({mode})" for name, mode in compared]
        facts[best_label(objective)] = (
            f"trial {named(best.trial, best.status)}, {', '.join(values)} at step {best.step}"
        )
        facts[""] = format_config(best)
    shown = ordered[:MAX_ROWS]
    newest = [newest_checkpoint(trial) for trial in shown]
    yield paragraph(escaped(view.experiment.name), kind="pt-title")
    yield terminal_html(facts_table({name: text for name, text in facts.items() if text}))
    yield trials_html(shown, metrics, {"checkpoint": [f"step {each.step}" if each else "" for each in newest]})
    yield paragraph(soft(more_trials(len(view.trials) - len(shown))))
    errors = errors_by_cause([trial for trial in view.trials if trial.status is Status.ERRORED])
    for cause, trials in errors[:_MAX_ERRORS]:
        yield paragraph(escaped(f"{names_of(trials)} {cause}"), kind="pt-bad")
    if len(errors) > _MAX_ERRORS:
        yield paragraph(soft(f"and {plural(len(errors) - _MAX_ERRORS, 'other error', 'other errors')}: results.errors"))
    # The learning curves of the best trials and of a selection of the others, as the report draws them.
    drawn = [trial.trial for trial in spread([*view.ranking] or view.trials, DRAWN)]
    try:
        points = read_curves(drawn, metrics)
    except TuneError as error:
        yield paragraph(soft(f"The learning curves could not be read: {first_line(str(error))}"))
        return
    svg = learning_curves(replace(view, history=replace(view.history, metrics=tuple(metrics), curves=points)))
    if svg is not None:
        yield Html(svg)
        if objective is not None and len(view.trials) > _CHART_TRIALS:
            yield paragraph(soft("Orange: the best. Blue: the next ones; paler: the others."))


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
