"""What a cell shows: tables as in a terminal, and the learning curves of results."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console, RenderableType

from prefect_tune.arrow_tables import metric_columns
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.cost import ExperimentCost, cost_sentence
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import best_label, counted, named, ranked
from prefect_tune.core.experiment.trial_transitions import Status, Trial, newest_checkpoint
from prefect_tune.core.html_tables import Html, cell_html, code, escaped, paragraph, soft
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search_view import SearchSnapshot, Series, numbers_in
from prefect_tune.core.shown_text import first_line, format_duration, plural
from prefect_tune.core.values import metric_in
from prefect_tune.notebook.cell_output import Ending
from prefect_tune.reporting.facts import DRAWN, ReportInput, spread
from prefect_tune.reporting.trial_charts import learning_curves
from prefect_tune.terminal.formatting import errors_by_cause, facts_table, format_counts, format_value, names_of
from prefect_tune.terminal.progress_view import ProgressState, common_metrics, config_cells, frame, trials_table

if TYPE_CHECKING:
    import pyarrow as pa


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
    """Return the output of a running search, or how it ended.

    Args:
        state: the search at this moment.
        ending: how it ended, if it has.
        why: the error of a failure.
        link: the URL of its run in the Prefect UI; None if it is not known.
    """
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
MOST_ROWS = 20
_METRICS = 4
_CHART_TRIALS = 2


def results_html(
    experiment: Experiment,
    objective: Objective | None,
    uri: str,
    read_curves: Callable[[Sequence[str], Sequence[str]], Points],
    read_cost: Callable[[], ExperimentCost],
) -> Html:
    """Return the output: the best 20 trials and 60 curves, for any number of trials.

    Args:
        experiment: the results.
        objective: what trials are compared by.
        uri: the target's.
        read_curves: reads the curves of trials, by metric. An error of the target is shown in their place.
        read_cost: returns its cost; of a running experiment it reads the target.
    """
    trials = list(experiment.trials.values())
    losses = {each.trial: found for each, found in ranked(trials, objective)}
    view = ReportInput(experiment, uri, datetime.now(UTC), objective, SearchSnapshot(experiment), trials, losses)
    return cell_html(*_results_parts(view, read_curves), *_cost(read_cost))


def _cost(read_cost: Callable[[], ExperimentCost]) -> Iterator[Html]:
    """Yield the sentence on the cost; nothing while the target fails."""
    try:
        cost = read_cost()
    except TuneError:
        return
    if sentence := cost_sentence(cost):
        yield paragraph(escaped(sentence))


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
        trial: {name: points for name, each in found.items() if (points := each.points())}
        for trial, found in curves.items()
    }


def _results_parts(view: ReportInput, read_curves: Callable[[Sequence[str], Sequence[str]], Points]) -> Iterator[Html]:
    objective, count = view.objective, len(view.trials)
    ordered = [*view.ranking, *(each for each in view.trials if each.trial not in view.losses)]
    metrics = objective.metrics if objective else common_metrics(ordered)[:_METRICS]
    shown = ordered[:MOST_ROWS]
    yield paragraph(escaped(view.experiment.name), kind="pt-title")
    yield terminal_html(facts_table({name: text for name, text in _facts(view).items() if text}))
    yield trials_html(shown, metrics, {"checkpoint": _checkpoints(shown)})
    yield paragraph(soft(more_trials(count - len(shown))))
    errors = errors_by_cause([each for each in view.trials if each.status is Status.ERRORED])
    for cause, trials in errors[:_MAX_ERRORS]:
        yield paragraph(escaped(f"{names_of(trials)} {cause}"), kind="pt-bad")
    if len(errors) > _MAX_ERRORS:
        yield paragraph(soft(f"and {plural(len(errors) - _MAX_ERRORS, 'other error', 'other errors')}: results.errors"))
    yield from _curves(view, metrics, read_curves)


def more_trials(count: int) -> str:
    """Return how many trials a table leaves out, and where they are; empty if none."""
    return f"and {plural(count, 'more trial', 'more trials')}: results.to_pandas()" if count else ""


def _facts(view: ReportInput) -> Mapping[str, str]:
    facts = {
        "trials": format_counts(counted(view.experiment)),
        "target": view.uri,
        "ended early": first_line(view.experiment.ends),
    }
    if view.best and view.objective is not None:
        best, compared = view.best[0], zip(view.objective.metrics, view.objective.modes, strict=True)
        values = [f"{name} {format_value(metric_in(best.metrics, name))} ({mode})" for name, mode in compared]
        facts[best_label(view.objective)] = (
            f"trial {named(best.trial, best.status)}, {', '.join(values)} at step {best.step}"
        )
        facts[""] = ", ".join(f"{name} {value}" for name, value in config_cells(best))
    return facts


def _checkpoints(trials: Sequence[Trial]) -> list[str]:
    return [f"step {newest.step}" if (newest := newest_checkpoint(each)) else "" for each in trials]


def _curves(
    view: ReportInput, metrics: Sequence[str], read_curves: Callable[[Sequence[str], Sequence[str]], Points]
) -> Iterator[Html]:
    """Yield the learning curves of the best trials and of a selection of the others, as the report draws them."""
    drawn = [each.trial for each in spread([*view.ranking] or view.trials, DRAWN)]
    try:
        points = read_curves(drawn, metrics)
    except TuneError as error:
        yield paragraph(soft(f"The learning curves could not be read: {first_line(str(error))}"))
        return
    history = replace(view.history, metrics=tuple(metrics), curves=points)
    svg = learning_curves(replace(view, history=history))
    if svg is not None:
        yield Html(svg)
        if view.objective is not None and len(view.trials) > _CHART_TRIALS:
            yield paragraph(soft("Orange: the best. Blue: the next ones; paler: the others."))
