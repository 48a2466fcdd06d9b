"""The results of an experiment as the output of a cell: counts, the best trial, a table of trials, learning curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

from prefect_tune.arrow_tables import metric_columns
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.ranking import best_label, ranked
from prefect_tune.core.experiment.summary import counted, named
from prefect_tune.core.experiment.trial_transitions import Status, Trial, newest_checkpoint
from prefect_tune.core.html_tables import Html, cell_html, escaped, facts_table, paragraph, soft
from prefect_tune.core.models import first_line, metric_in, plural
from prefect_tune.core.search.objective import Objective
from prefect_tune.notebook.trials_html import errors_html, trials_html
from prefect_tune.reporting.charts.trial_charts import learning_curves
from prefect_tune.reporting.curve_sampling import Series, numbers_in
from prefect_tune.reporting.history import HistoryView
from prefect_tune.reporting.report_input import DRAWN, ReportInput, spread
from prefect_tune.terminal.formatting import format_counts, format_value
from prefect_tune.terminal.progress_view import common_metrics
from prefect_tune.terminal.trials_table import config_cells

if TYPE_CHECKING:
    import pyarrow as pa

Points: TypeAlias = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
"""Learning curves: steps and values by trial and metric."""
MOST_ROWS = 20
_METRICS = 4
_CHART_TRIALS = 2


def results_html(
    experiment: Experiment,
    objective: Objective | None,
    uri: str,
    read_curves: Callable[[Sequence[str], Sequence[str]], Points],
) -> Html:
    """Return the output: the best 20 trials and 60 curves, for any number of trials.

    Args:
        experiment: the results.
        objective: what trials are compared by.
        uri: the target's.
        read_curves: reads the curves of trials, by metric. An error of the target is shown in their place.
    """
    trials = list(experiment.trials.values())
    losses = {each.trial: found for each, found in ranked(trials, objective)}
    view = ReportInput(experiment, uri, datetime.now(UTC), objective, HistoryView(), trials, losses)
    return cell_html(*_parts(view, read_curves))


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


def _parts(view: ReportInput, read_curves: Callable[[Sequence[str], Sequence[str]], Points]) -> Iterator[Html]:
    objective, count = view.objective, len(view.trials)
    ordered = [*view.ranking, *(each for each in view.trials if each.trial not in view.losses)]
    metrics = objective.metrics if objective else common_metrics(ordered)[:_METRICS]
    best = view.best[0] if view.best and objective else None
    yield paragraph(escaped(view.experiment.name), kind="pt-title")
    yield facts_table(_facts(view, best))
    shown = ordered[:MOST_ROWS]
    yield trials_html(shown, metrics, best=best.trial if best else None, more={"checkpoint": _checkpoints(shown)})
    yield paragraph(soft(more_trials(count - len(shown))))
    errored = [each for each in view.trials if each.status is Status.ERRORED]
    yield errors_html(errored, len(errored))
    yield from _curves(view, metrics, read_curves)


def more_trials(count: int) -> str:
    """Return how many trials a table leaves out, and where they are; empty if none."""
    return f"and {plural(count, 'more trial', 'more trials')}: results.to_pandas()" if count else ""


def _facts(view: ReportInput, best: Trial | None) -> Mapping[str, Html]:
    facts = {
        "trials": escaped(format_counts(counted(view.experiment))),
        "target": Html(f"<code>{escaped(view.uri)}</code>"),
        "ended early": escaped(first_line(view.experiment.ends)),
    }
    if best is not None and view.objective is not None:
        compared = zip(view.objective.metrics, view.objective.modes, strict=True)
        values = [f"{name} {format_value(metric_in(best.metrics, name))} ({mode})" for name, mode in compared]
        said = f"trial {named(best.trial, best.status)}, {', '.join(values)} at step {best.step}"
        facts["best"] = escaped(f"{best_label(view.objective).removeprefix('best ')}: {said}")
        facts[""] = escaped(", ".join(f"{name} {value}" for name, value in config_cells(best)))
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
    history = HistoryView(metrics=tuple(metrics), curves=points)
    svg = learning_curves(replace(view, history=history))
    if svg is not None:
        yield Html(svg)
        if view.objective is not None and len(view.trials) > _CHART_TRIALS:
            yield paragraph(soft("Orange: the best. Blue: the next ones; paler: the others."))
