"""What a cell shows: a running search, and the results of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from prefect_tune.arrow_tables import metric_columns
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.cost import ExperimentCost, cost_sentence
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import best_label, counted, named, ranked
from prefect_tune.core.experiment.trial_transitions import Status, Trial, newest_checkpoint
from prefect_tune.core.html_tables import Html, cell_html, escaped, facts_table, paragraph, rows_table, soft
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.shown_text import first_line, format_duration, plural
from prefect_tune.core.values import metric_in
from prefect_tune.notebook.cell_output import Ending
from prefect_tune.reporting.facts import DRAWN, ReportInput, spread
from prefect_tune.reporting.history import HistoryView, Series, numbers_in
from prefect_tune.reporting.svg import BLUE, GREEN, GREY, ORANGE, RED
from prefect_tune.reporting.timeline_charts import FILLS, cost_bar
from prefect_tune.reporting.trial_charts import learning_curves
from prefect_tune.terminal.formatting import errors_by_cause, format_counts, format_value, names_of
from prefect_tune.terminal.progress_view import (
    ProgressState,
    cells_of,
    chosen_trials,
    common_metrics,
    config_cells,
    format_time_left,
    head_facts,
    hidden_columns_note,
    pace,
)

if TYPE_CHECKING:
    import pyarrow as pa


_WIDTH = 150
"""In characters: more parameters than fit are left out, as in a terminal of this width."""
_CELL = 80
_ERRORS = 3


def trials_html(
    trials: Sequence[Trial],
    metrics: Sequence[str],
    *,
    best: str | None = None,
    more: Mapping[str, list[str]] = MappingProxyType({}),
) -> Html:
    """Return a table with a row per trial: status, step, metrics, the columns `more`, the differing parameters."""
    if not trials:
        return Html("")
    names, rows, hidden = cells_of(trials, metrics, _WIDTH, more)
    place = names.index("status")
    cells = [
        [_status(trial, cell) if index == place else escaped(cell, _CELL) for index, cell in enumerate(row)]
        for trial, row in zip(trials, rows, strict=True)
    ]
    marked = next((index for index, each in enumerate(trials) if each.trial == best), None)
    note = hidden_columns_note(hidden, "results.to_arrow() has all columns")
    return Html(rows_table(names, cells, marked=marked) + (paragraph(soft(note)) if note else ""))


def _status(trial: Trial, label: str) -> Html:
    ink = FILLS[trial.status].ink if trial.status in FILLS else GREY
    return Html(f'<span class="pt-dot" style="background:{ink}"></span>{escaped(label)}')


def errors_html(errored: Sequence[Trial], count: int) -> Html:
    """Return the errors of the first trials of `count` that errored, each different one in one line."""
    shown = errored[:_ERRORS]
    causes = [f"{names_of(alike)} {cause}" for cause, alike in errors_by_cause(shown)]
    lines = [paragraph(escaped(cause), kind="pt-bad") for cause in causes]
    if count > len(shown):
        lines.append(paragraph(soft(f"and {plural(count - len(shown), 'more error', 'more errors')}: results.errors")))
    return Html("".join(lines))


# A running search as the output of its cell: progress, the best trial so far, a table of trials, errors, events.

_MOST_ROWS = 20
_MOST_NOTES = 4
_INKS = {Ending.RUNNING: BLUE, Ending.DONE: GREEN, Ending.INTERRUPTED: ORANGE, Ending.FAILED: RED}


def progress_html(state: ProgressState, ending: Ending, why: str, link: str | None = None) -> Html:
    """Return the output: at most 20 trials and the first errors, for any number of trials.

    Args:
        state: the search at this moment.
        ending: how it ended, if it has.
        why: the error of a failure.
        link: the URL of its run in the Prefect UI; None if it is not known.
    """
    return cell_html(*_progress_parts(state, ending, why, link))


def _progress_parts(state: ProgressState, ending: Ending, why: str, link: str | None) -> Iterator[Html]:
    yield paragraph(escaped(state.outlook.experiment), kind="pt-title")
    yield paragraph(*_headline(state, ending, why), kind="pt-bad" if ending is Ending.FAILED else "")
    if state.share is not None:
        has_failed = state.counts.get(Status.ERRORED, 0) == sum(state.counts.values()) > 0
        yield _bar(state.share, RED if has_failed else _INKS[ending])
    facts = {name: escaped(text) for name, text in head_facts(state).items()}
    yield facts_table({**facts, "run": _link(link) if link else Html("")})
    objective = state.outlook.objective
    trials = chosen_trials(state, _MOST_ROWS)
    best = state.best.trial if state.best is not None and objective is not None else None
    yield trials_html(trials, objective.metrics if objective else common_metrics(trials), best=best)
    if (hidden := sum(state.counts.values()) - len(trials)) > 0 and trials:
        yield paragraph(soft(f"and {plural(hidden, 'more trial', 'more trials')}"))
    yield errors_html(state.errored, state.counts.get(Status.ERRORED, 0))
    if ending is Ending.RUNNING:
        yield from (
            paragraph(soft(f"{each.at:%H:%M:%S} {each.trial} {each.text}")) for each in state.notes[-_MOST_NOTES:]
        )


def _headline(state: ProgressState, ending: Ending, why: str) -> Iterator[Html]:
    after = f"after {format_duration(state.elapsed)}"
    match ending:
        case Ending.RUNNING:
            yield escaped(" · ".join(_pace(state)))
        case Ending.DONE if state.ended_because:
            yield escaped(f"ended early {after}: {state.ended_because}")
        case Ending.DONE if not state.has_trained:
            yield escaped("nothing to train: every trial had ended before. A new experiment name begins a new search")
        case Ending.DONE:
            yield escaped(f"done {after}")
        case Ending.INTERRUPTED:
            yield escaped(f"interrupted {after}. To resume it, run the cell again with")
            yield Html(f" <code>experiment={escaped(repr(state.outlook.experiment))}</code>")
        case Ending.FAILED:
            yield escaped(f"failed {after}: {why}")


def _pace(state: ProgressState) -> Iterator[str]:
    yield f"running for {format_duration(state.elapsed)}"
    yield from filter(None, (format_time_left(state), pace(state)))


def _link(address: str) -> Html:
    return Html(f'<a href="{escape(address)}" target="_blank" rel="noopener">in the Prefect UI</a>')


def _bar(share: float, ink: str) -> Html:
    percent = f"{100 * share:.1f}"
    return Html(
        f'<div class="pt-bar" role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" aria-valuemax="100">'
        f'<div style="width:{percent}%;background:{ink}"></div></div>'
    )


# The results of an experiment as the output of a cell: counts, the best trial, a table of trials, learning curves.

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
    view = ReportInput(experiment, uri, datetime.now(UTC), objective, HistoryView(), trials, losses)
    return cell_html(*_results_parts(view, read_curves), *_cost(read_cost))


def _cost(read_cost: Callable[[], ExperimentCost]) -> Iterator[Html]:
    """Yield the sentence on the cost, and the bar of its categories; nothing while the target fails."""
    try:
        cost = read_cost()
    except TuneError:
        return
    if sentence := cost_sentence(cost):
        yield paragraph(escaped(sentence))
        yield Html(cost_bar(cost))


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
        facts[best_label(view.objective)] = escaped(said)
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
