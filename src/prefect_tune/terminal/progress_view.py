"""Render the progress of a search: as much as fits a terminal, or one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.models import metric_in
from prefect_tune.terminal.formatting import said, said_counts, said_span
from prefect_tune.terminal.progress_state import Noted, ProgressState
from prefect_tune.terminal.trials_table import cells_of, config_cells

__all__ = ["frame", "line"]

_MOST_ROWS = 16
_MOST_NOTES = 5
_HEAD = 8  # lines of everything that is neither a trial nor an event
_STYLES = {Status.RUNNING: "green", Status.ERRORED: "red", Status.PAUSED: "yellow", Status.PENDING: "dim"}
_LONG_RUNGS = 8


def frame(sight: ProgressState, width: int, height: int) -> RenderableType:
    """Render for a terminal of `width` columns and `height` lines, leaving its last line free."""
    room = max(0, height - 1 - _HEAD)
    notes = sight.notes[-min(_MOST_NOTES, room // 3) :] if room >= 3 else ()
    rows = _chosen(sight, min(_MOST_ROWS, room - len(notes)))
    parts: list[RenderableType] = [_cut(each) for each in _head(sight)]
    if rows:
        parts += [Text(), _trials(sight, rows, width)]
    if notes:
        parts += [Text(), *map(_note, notes)]
    return Group(*parts)


def line(sight: ProgressState) -> str:
    """Return the progress as one line, for a log."""
    parts = [f"{_trial_counts(sight)} after {said_span(sight.elapsed)}"]
    if sight.left is not None and sight.running:
        parts.append(f"about {said_span(sight.left)} left")
    if sight.best is not None and sight.outlook.objective is not None:
        parts.append(f"best: trial {sight.best.trial}, {_compared(sight, sight.best)}")
    return f"{sight.outlook.experiment}: {'; '.join(parts)}"


def _head(sight: ProgressState) -> Iterator[Text]:
    yield _title(sight)
    yield _labelled("trials", _trial_counts(sight))
    if sight.rungs:
        yield _labelled("rungs", _rungs(sight))
    if sight.best is not None and sight.outlook.objective is not None:
        best = sight.best
        yield _labelled("best", f"{best.trial}: {_compared(sight, best)} at step {best.step}")
        yield _labelled("", ", ".join(f"{name} {value}" for name, value in config_cells(best)))


def _title(sight: ProgressState) -> Text:
    title = Text.assemble((sight.outlook.experiment, "bold"), f"  {said_span(sight.elapsed)}")
    if sight.left is not None:
        title.append(f", about {said_span(sight.left)} left")
    if sight.reports_per_second:
        title.append(f"  {sight.reports_per_second:.3g} reports/s", "dim")
    return title


def _trial_counts(sight: ProgressState) -> str:
    counts = {str(status): sight.counts[status] for status in Status if sight.counts.get(status)}
    of = f" of {sight.outlook.trial_count}" if sight.outlook.trial_count is not None else ""
    return f"{said_counts(counts)}{of}"


def _rungs(sight: ProgressState) -> str:
    """Return the number of trials that the scheduler has judged at each rung."""
    rungs = list(sight.rungs.items())
    shown = rungs if len(rungs) <= _LONG_RUNGS else [*rungs[: _LONG_RUNGS // 2], *rungs[-_LONG_RUNGS // 2 :]]
    said_rungs = [f"{count} at step {step}" for step, count in shown]
    if len(shown) < len(rungs):
        said_rungs.insert(_LONG_RUNGS // 2, "…")
    return ", ".join(said_rungs)


def _compared(sight: ProgressState, trial: Trial) -> str:
    metrics = sight.outlook.objective.metrics if sight.outlook.objective else ()
    return ", ".join(f"{name} {said(metric_in(trial.metrics, name))}" for name in metrics)


def _chosen(sight: ProgressState, most: int) -> Sequence[Trial]:
    """Return the trials to show: running ones, with a third of the lines for the best of the others."""
    others = min(len(sight.others), max(most // 3, most - len(sight.running)))
    return [*sight.running[: most - others], *sight.others[:others]] if most > 0 else ()


def _trials(sight: ProgressState, trials: Sequence[Trial], width: int) -> Table:
    objective = sight.outlook.objective
    names, rows = cells_of(trials, objective.metrics if objective else _common(trials), width)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in names:
        table.add_column(Text(name), no_wrap=True, overflow="ellipsis")
    for trial, cells in zip(trials, rows, strict=True):
        table.add_row(*map(Text, cells), style=_STYLES.get(trial.status, ""))
    return table


def _common(trials: Sequence[Trial]) -> Sequence[str]:
    return next((tuple(each.metrics) for each in trials if each.metrics), ())


def _note(noted: Noted) -> Text:
    told = (f"{noted.trial} {noted.text}", "red" if noted.is_bad else "")
    return _cut(Text.assemble((noted.at.strftime("%H:%M:%S"), "dim"), "  ", told))


def _labelled(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<8}", "dim"), text)


def _cut(text: Text) -> Text:
    """Truncate instead of wrapping."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
